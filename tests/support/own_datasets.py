"""Small datasets that are Python objects, for tests and for the processes of their runs."""

from pathlib import Path

import numpy as np

N_CLASSES = 4


class Squares:
    """Noise with a bright square, whose place is the class; every item is a function of its number.

    Args:
        n_items: The length.
        seed: Of the items.
        size: Rows and columns.
        channels: Of the images.
    """

    def __init__(
        self, n_items: int, seed: int, size: tuple[int, int] = (36, 36), n_channels: int = 3
    ) -> None:
        self.n_items, self.seed, self.size, self.n_channels = n_items, seed, size, n_channels

    def __len__(self) -> int:
        return self.n_items

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        random = np.random.default_rng([self.seed, index])
        label = int(random.integers(N_CLASSES))
        rows, columns = self.size
        image = random.integers(0, 100, (rows, columns, self.n_channels), dtype=np.uint8)
        row, column = rows // 8 + rows // 2 * (label // 2), columns // 8 + columns // 2 * (label % 2)
        image[row : row + rows // 3, column : column + columns // 3] += 100
        return image, label


class Shrinking(Squares):
    """Squares whose length is the content of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(0, 0)
        self.path = path

    def __len__(self) -> int:
        return int(self.path.read_text())

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index >= len(self):
            raise IndexError(index)
        return super().__getitem__(index)


def make_squares() -> tuple[Squares, Squares]:
    """Return the datasets for `data: own_datasets:make_squares`."""
    return Squares(90, 0), Squares(33, 1)
