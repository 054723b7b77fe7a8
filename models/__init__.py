"""One network per file. A file exports `Model(n_classes, **model_args)`, an nn.Module with

    input_size: int                     rows and columns of the square pictures it takes
    forward(images) -> logits           float (batch, 3, input_size, input_size) -> float (batch, n_classes)

Pictures come as RGB from 0 to 255 with the mean image subtracted, lying channels last. `nn.Dropout` is
swapped for one whose masks follow the samples (lockstep/dropout.py). A file is chosen by its name: `model:
alexnet`.
"""
