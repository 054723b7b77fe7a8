"""One network per file. A file exports `Model(n_classes, **model_args)`, an nn.Module with

    input_size: int                     rows and columns of the square pictures it takes
    forward(images) -> logits           float (batch, 3, input_size, input_size) -> float (batch, n_classes)

and, where it needs them,

    input_mean: 3 numbers               subtracted from R, G and B instead of the dataset's mean image
    input_scale: a number or 3          what pixels are multiplied by after that (1)
    aux_weights: numbers                forward, in training, returns (logits, aux1, ...): the loss of each
                                        aux is added with its weight; otherwise it returns logits alone

Pictures come as RGB from 0 to 255, the mean subtracted and scaled as above, lying channels last. `nn.Dropout`
is swapped for one whose masks follow the samples (lockstep/network/dropout.py). A file is chosen by its name:
`model: alexnet`. Networks from elsewhere: docs/models.md.
"""

# Of ImageNet's pictures, as torchvision and timm have them: the mean, and one over the standard deviation.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_SCALE = (1 / 58.395, 1 / 57.12, 1 / 57.375)
