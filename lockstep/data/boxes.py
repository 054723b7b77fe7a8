"""Random rectangles: the parts of images that are enlarged, erased or replaced."""

import math

import numpy as np

_N_TRIES = 10


def draw_boxes(
    random: np.random.Generator,
    n_samples: int,
    image_size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> np.ndarray:
    """Return a random rectangle in each image, with uniform area and uniform logarithm of its ratio.

    A rectangle that does not fit is drawn again, ten times in all.

    Args:
        random: The generator.
        n_samples: The number of images.
        image_size: Rows and columns of all images.
        scale: The least and largest share of the image's area.
        ratio: The least and largest ratio of columns to rows.

    Returns:
        int32 (n_samples, 4): first row, first column, rows, columns; rows 0 where none fitted.
    """
    height, width = image_size
    boxes = np.zeros((n_samples, 4), np.int32)
    pending = np.arange(n_samples)
    narrowest, widest = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(_N_TRIES):
        areas = height * width * random.uniform(*scale, len(pending))
        ratios = np.exp(random.uniform(narrowest, widest, len(pending)))
        rows = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
        columns = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
        fits = (rows > 0) & (rows <= height) & (columns > 0) & (columns <= width)
        rows, columns, chosen = rows[fits], columns[fits], pending[fits]
        first_rows = random.integers(height - rows + 1)
        first_columns = random.integers(width - columns + 1)
        boxes[chosen] = np.stack([first_rows, first_columns, rows, columns], 1)
        pending = pending[~fits]
    return boxes


def middle_box(image_size: tuple[int, int], ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the largest rectangle in the middle whose ratio of columns to rows is in a range.

    It has at least one row and one column, even if the ratio asks for less.
    """
    height, width = image_size
    rows = max(1, min(height, round(width / ratio[0])))
    columns = max(1, min(width, round(height * ratio[1])))
    return (height - rows) // 2, (width - columns) // 2, rows, columns
