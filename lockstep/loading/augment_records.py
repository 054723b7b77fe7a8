"""The rows in which a loader tells a GPU's kernels what it has drawn for each image."""

import numpy as np

_BOX = ("i4", 4)  # first row, first column, rows, columns

# What kernels do to one image of a raw slot: struct Change of augment.cu.
CHANGE = np.dtype(
    [
        ("box", *_BOX),  # of the stored image, from which the crop is made; without rows there is no image
        ("mirror", "i4"),
        ("order", "i4", 4),  # of color jitter: numbers of the factors, -1 for none
        ("factors", "f4", 4),  # of brightness, contrast and saturation, and what is added to the byte of hue
        ("erased", *_BOX),  # of the crop
        ("color", "u1", 4),  # of the erased part
    ]
)
# How a sample's image is mixed of two images of the slot: struct Pair of augment.cu.
PAIR = np.dtype(
    [
        ("own", "i4"),
        ("partner", "i4"),
        ("weight", "i4"),  # of the own image, in 1/256
        ("box", *_BOX),  # that is replaced by the partner's; without rows the images are blended
    ]
)
