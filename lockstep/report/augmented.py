"""A contact sheet of augmentation: training images as stored, and as the network sees them."""

import dataclasses

import numpy as np
from PIL import Image

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.config.augmentation import makes_images
from lockstep.data.dataset import Dataset, with_mean
from lockstep.loading.host import HostFiller, HostRing
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape

N_IMAGES = N_DRAWS = 8
_SIDE, _GAP = 96, 4  # pixels of an image on the sheet, and between two


def draw_sheet(config: Config, dataset: Dataset, size: tuple[int, int]) -> Image.Image:
    """Return a sheet with a row for each image: as stored, then augmented as in epochs 1 to N_DRAWS.

    Args:
        config: Its keys of augmentation and its seed are used.
        dataset: Its first training images are drawn.
        size: Rows and columns of the network's images.

    Raises:
        UserError: An image can't be read, or an argument does not fit the images.
    """
    n_images = min(N_IMAGES, len(dataset.train))
    stored = np.stack([dataset.train.image(number) for number in range(n_images)])
    columns = [stored, *augmented_images(config, dataset, size, n_images)]
    width = _SIDE + _GAP
    sheet = Image.new("RGB", (len(columns) * width + 2 * _GAP, n_images * width + _GAP), "white")
    for column, images in enumerate(columns):
        left = _GAP + column * width + (_GAP if column else 0)
        for row, image in enumerate(images):
            thumbnail = Image.fromarray(in_colors(image)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
            sheet.paste(thumbnail, (left, _GAP + row * width))
    return sheet


def in_colors(image: np.ndarray) -> np.ndarray:
    """Return an image of one or three channels; of two or four, the first or the first three."""
    return image[..., :3] if image.shape[2] >= 3 else image[..., 0]


def augmented_images(
    config: Config, dataset: Dataset, size: tuple[int, int], n_images: int
) -> list[np.ndarray]:
    """Return the first training images as the network sees them: N_DRAWS arrays, uint8 (n, *size, channel).

    The mean is added again. Images are mixed with others of these.
    """
    config = dataclasses.replace(
        config, shuffle="none", sampler=None, batch_size=n_images, mix_off_epoch=None
    )
    if not makes_images(config):  # the mean has a place in the stored image: do without
        dataset = with_mean(dataset, (0.0,) * dataset.image_shape[2])
    n_channels, n_labels = dataset.image_shape[2], dataset.n_labels
    ring = HostRing(RingShape(1, n_images, size, "float32", size, n_channels, n_labels=n_labels))
    reader = Reader(config, dataset, size, lambda text: None)
    filler = HostFiller(reader, ring.block, ring.shape)
    slot = ring.shape.slots(ring.block.array(np.uint8, (ring.shape.n_bytes,)))[0]
    draws = []
    for epoch in range(1, N_DRAWS + 1):
        filler.fill(0, Order("train", epoch, 1, 0, n_images, 0, n_images))
        seen = slot.images + reader.mean[: size[0], : size[1]]
        draws.append(np.rint(seen).clip(0, 255).astype(np.uint8))
    filler.close()
    return draws
