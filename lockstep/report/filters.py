"""The filters of the first convolution, read from a checkpoint without building the network."""

from pathlib import Path

import numpy as np
from PIL import Image
from safetensors import SafetensorError, safe_open

from lockstep.errors import UserError
from lockstep.files import name_in_utf8

_MOST = 256
_COLUMNS = 16
_SIDE = 40  # least pixels of a filter on the page
_GAP = 4


def read_filters(tensors: Path) -> tuple[str, np.ndarray] | None:
    """Return the name and the weights of the convolution that takes images.

    Returns:
        The name and float32 (filter, row, column, 3); None if no convolution has three input channels.

    Raises:
        UserError: The file can't be read, or its weights are not finite.
    """
    try:
        with name_in_utf8(tensors) as path, safe_open(path, "numpy") as file:
            for name in sorted(key for key in file.keys() if key.startswith("weights/")):  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                if len(shape) == 4 and shape[1] == 3 and shape[2] > 1 and 0 not in shape:
                    weights = file.get_tensor(name).astype(np.float32)
                    if not np.isfinite(weights).all():
                        raise UserError(f"{tensors}: {name} holds values that are not finite")
                    return name.removeprefix("weights/"), weights.transpose(0, 2, 3, 1)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{tensors}: can't be read: {error}") from error
    return None


def draw_filters(weights: np.ndarray) -> Image.Image:
    """Draw all filters in rows, each scaled by its largest weight. Gray is zero; gaps are transparent."""
    weights = weights[:_MOST]
    n_filters, side = len(weights), max(weights.shape[1:3])
    zoom = -(-_SIDE // side)
    largest = np.abs(weights).max((1, 2, 3), keepdims=True)
    pixels = np.rint(127.5 + 127.5 * weights / np.where(largest > 0, largest, 1.0)).astype(np.uint8)
    pixels = pixels.repeat(zoom, 1).repeat(zoom, 2)
    step = side * zoom + _GAP
    n_rows, n_columns = -(-n_filters // _COLUMNS), min(n_filters, _COLUMNS)
    sheet = np.zeros((n_rows * step - _GAP, n_columns * step - _GAP, 4), np.uint8)
    for number, filter_pixels in enumerate(pixels):
        row, column = (place * step for place in divmod(number, _COLUMNS))
        height, width = filter_pixels.shape[:2]
        sheet[row : row + height, column : column + width, :3] = filter_pixels
        sheet[row : row + height, column : column + width, 3] = 255
    return Image.fromarray(sheet)
