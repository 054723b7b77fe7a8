"""The networks that `model` can name, one per file: `model: alexnet` is alexnet.py.

A file exports `Model(n_classes, **model_args)`, an nn.Module with

    input_size: int or (int, int)       rows and columns of the images that it takes
    forward(images) -> logits           float (batch, channel, row, column) -> float (batch, n_classes)

and, if it needs them,

    n_channels: int = 3                 as an argument: the channels of the images
    input_mean: 3 numbers               subtracted from R, G and B instead of the dataset's mean image
    input_scale: a number or 3          factor of the pixels after that (1)
    aux_weights: numbers                forward, in training, returns (logits, aux1, ...): the loss of each
                                        aux is added with its weight; otherwise it returns logits alone

Images are RGB from 0 to 255, channels last, after subtraction and scaling. `nn.Dropout` is replaced by a
layer whose masks depend on the samples (lockstep/network/dropout.py). Networks from elsewhere:
docs/models.md.
"""

# ImageNet's mean, and one over its standard deviation, as in torchvision and timm.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_SCALE = (1 / 58.395, 1 / 57.12, 1 / 57.375)
