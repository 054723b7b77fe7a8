"""The training or validation images of a dataset: what loaders and trainers need of them.

`HklSplit` has files of images, which are the fastest to read. `ItemSplit` (items.py) has any Python object
with a length and items. Loaders do not distinguish them.
"""

from abc import ABC, abstractmethod

import numpy as np

from lockstep.config import Config
from lockstep.data.classes import draw_by_class
from lockstep.data.hkl import HklArray, read_rows
from lockstep.data.sampling import EpochSamples


class Split(ABC):
    """A sequence of images with labels, in one or several files, whose rows are read together.

    Attributes:
        files: The .hkl files; () for other sources, whose files have one image each.
    """

    files: tuple[HklArray, ...] = ()

    @property
    @abstractmethod
    def labels(self) -> np.ndarray:
        """The labels of all images, int64 (n,), or with `task: multilabel` uint8 (n, class).

        Raises:
            UserError: They are not known before the images are read.
        """

    @property
    @abstractmethod
    def file_rows(self) -> tuple[int, ...]:
        """The number of images in each file."""

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, ...]:
        """(rows, columns, channels) of the images that `read` writes."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def read(self, file: int, first: int, out: np.ndarray, retries: int = 0) -> None:
        """Read images of one file. Several threads may call it at once.

        Args:
            file: The file's number.
            first: The first row to read.
            out: uint8 (images, *image_shape), C-contiguous, overwritten.
            retries: Further attempts after a disk error.

        Raises:
            UserError: An image can't be read; the message names it.
        """

    def image(self, number: int) -> np.ndarray:
        """Return one image, counted over all files: uint8 image_shape. Raise UserError as `read` does."""
        ends = np.cumsum(self.file_rows)
        file = int(np.searchsorted(ends, number, side="right"))
        image: np.ndarray = np.empty((1, *self.image_shape), np.uint8)
        self.read(file, number - int(ends[file]) + self.file_rows[file], image)
        return image.squeeze(0)

    @abstractmethod
    def labels_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the labels of images that this process has read, like `labels`, as many as `samples`."""

    @abstractmethod
    def name_of(self, file: int) -> str:
        """Return a file's path, or another name that leads a user to it."""

    def order_of(self, config: Config, epoch: int, training: bool) -> EpochSamples:
        """Return the order of an epoch's samples; in validation it is the stored one."""
        if training and config.sampler:
            samples = draw_by_class(self.labels, config.sampler, config.seed, epoch)
            return EpochSamples.listed(self.file_rows, samples)
        shuffle = config.shuffle if training else "none"
        return EpochSamples(self.file_rows, shuffle, config.shuffle_block, config.seed, epoch)

    def is_read_whole(self, file: int) -> bool:
        """Return whether reading some rows of a file costs as much as reading all."""
        return False


class HklSplit(Split):
    """Images in .hkl files, and their labels."""

    def __init__(self, files: tuple[HklArray, ...], labels: np.ndarray) -> None:
        self.files, self._labels = files, labels

    @property
    def labels(self) -> np.ndarray:
        return self._labels

    @property
    def file_rows(self) -> tuple[int, ...]:
        return tuple(file.shape[0] for file in self.files)

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.files[0].row_shape

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, file: int, first: int, out: np.ndarray, retries: int = 0) -> None:
        read_rows(self.files[file], first, out, retries)

    def labels_of(self, samples: np.ndarray) -> np.ndarray:
        labels: np.ndarray = self._labels[samples]
        return labels

    def name_of(self, file: int) -> str:
        return self.files[file].path

    def is_read_whole(self, file: int) -> bool:
        return self.files[file].layout == "c01b"
