"""Slots: the memory layout of minibatches between files and network, the same in every kind of memory."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from lockstep.config.augmentation import DeviceChanges
from lockstep.loading.augment_records import CHANGE, PAIR

if TYPE_CHECKING:  # the launcher imports this file, with lockstep.backends, without torch
    import torch

Array = TypeVar("Array")
Dtype = Literal["uint8", "float32", "bfloat16"]

_PAGE = 4096
_ITEM_BYTES = {"uint8": 1, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class BlockLayout:
    """The form of images for a first convolution by space-to-depth (lockstep/network/convolution.py).

    Attributes:
        size: Rows and columns of a block in pixels. A block's values are channels: (row in the block, column
            in the block, 3).
        padding: Rows and columns before the image at which the blocks begin; values outside the image are
            zero.
        count: Blocks in each direction; pixels behind them are left out.
    """

    size: int
    padding: int
    count: int


@dataclass(frozen=True)
class Slot(Generic[Array]):
    """One minibatch in one contiguous piece of memory, as NumPy arrays or tensors.

    Attributes:
        labels: int64 (batch,), or uint8 (batch, n_labels).
        samples: Sample numbers, int64 (batch,).
        crops: int32 (batch, 3): each image's first row, first column, and whether to mirror it (0 or 1).
        shifts: float32 (batch, channel), added to all pixels, such as to red, green and blue.
        other_labels: Like `labels`: those of the images with which these are mixed.
        label_weights: float32 (batch,): the share of `labels` in each image; 1 for images that are not mixed.
        images: (batch, row, column, channel) of the ring's dtype. Raw slots have room for the partners of
            mixed images, too, if kernels mix.
        changes: What kernels do to each image, CHANGE (n,). None: nothing but crop and mirror by `crops`.
        pairs: The two images of each sample, PAIR (batch,). None: kernels do not mix.
    """

    labels: Array
    samples: Array
    crops: Array
    shifts: Array
    other_labels: Array
    label_weights: Array
    images: Array
    changes: np.ndarray | None = None
    pairs: np.ndarray | None = None

    def n_images(self, n_samples: int) -> int:
        """Return the number of images in a slot of n_samples samples."""
        return n_samples if self.changes is None else int(np.count_nonzero(self.changes["box"][:, 2]))


@dataclass(frozen=True)
class RingShape:
    """The layout of a ring, on which both of its ends must agree.

    Attributes:
        image_size: (rows, columns) of the images: raw ones of the dataset, the network's crops, or with
            `blocks` the number of blocks in each direction.
        dtype: uint8 for raw images, else the network's.
        crop_size: Rows and columns of the network's images.
        n_colors: Numbers for each pixel.
        changes: What the device's kernels do to raw images besides crop and mirror. None: nothing.
        n_labels: Numbers in the label of an image, each 0 or 1; 0: labels are classes.
    """

    n_slots: int
    batch_size: int
    image_size: tuple[int, int]
    dtype: Dtype
    crop_size: tuple[int, int]
    n_colors: int = 3
    blocks: BlockLayout | None = None
    changes: DeviceChanges | None = None
    n_labels: int = 0

    @property
    def raw_changes(self) -> DeviceChanges | None:
        """The changes whose draws lie in these slots. Only raw slots hold them."""
        return self.changes if self.dtype == "uint8" else None

    @property
    def n_images(self) -> int:
        """The images for which a slot has room."""
        return self.batch_size * (2 if self.raw_changes and self.raw_changes.mixes else 1)

    @property
    def n_channels(self) -> int:
        """Numbers for each pixel, or for each block."""
        return self.n_colors * self.blocks.size**2 if self.blocks else self.n_colors

    @property
    def arrays(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """The dtype and the shape of each array of a slot, in the order in which they lie, images last."""
        size, changes = self.batch_size, self.raw_changes
        labels = ("uint8", (size, self.n_labels)) if self.n_labels else ("int64", (size,))
        arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
            "labels": labels,
            "samples": ("int64", (size,)),
            "crops": ("int32", (size, 3)),
            "shifts": ("float32", (size, self.n_colors)),
            "other_labels": labels,
            "label_weights": ("float32", (size,)),
        }
        if changes:
            arrays["changes"] = CHANGE, (self.n_images,)
        if changes and changes.mixes:
            arrays["pairs"] = PAIR, (size,)
        arrays["images"] = self.dtype, (self.n_images, *self.image_size, self.n_channels)
        return arrays

    def at(self, name: str) -> int:
        """Return the bytes from a slot's beginning to one of its arrays."""
        return _offsets(self)[name]

    @property
    def head_bytes(self) -> int:
        """Bytes from a slot's beginning to the end of the arrays that all slots of a ring have."""
        return self.at("changes" if self.raw_changes else "images")

    @property
    def image_bytes(self) -> int:
        rows, columns = self.image_size
        return rows * columns * self.n_channels * _ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        return _whole_pages(self.used_bytes(self.n_images))

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.slot_bytes

    def used_bytes(self, n_images: int) -> int:
        """Return the bytes from a slot's beginning to the end of its first n_images images."""
        return self.at("images") + n_images * self.image_bytes

    def slots(self, memory: np.ndarray) -> list[Slot[np.ndarray]]:
        """Return the slots as views of `memory`, uint8 (n_bytes,). NumPy has no bfloat16."""
        return self._slots(lambda start, dtype, shape: np.ndarray(shape, dtype, memory, start))

    def tensors(self, memory: "torch.Tensor | np.ndarray") -> "list[Slot[torch.Tensor]]":
        """Return the slots as tensors on `memory`, uint8 (n_bytes,), which may be a device's."""
        import torch

        flat = torch.as_tensor(memory)

        def view(start: int, name: Any, shape: tuple[int, ...]) -> torch.Tensor:
            dtype = getattr(torch, name)
            return flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return self._slots(view)

    def _slots(self, view: Callable[[int, Any, tuple[int, ...]], Any]) -> list[Slot[Any]]:
        arrays = self.arrays.items()
        return [
            Slot(**{name: view(first + self.at(name), *array) for name, array in arrays})
            for first in range(0, self.n_bytes, self.slot_bytes)
        ]


@functools.cache
def _offsets(shape: RingShape) -> dict[str, int]:
    """Return the bytes from a slot's beginning to each of its arrays, which begin on pages."""
    *before, _ = shape.arrays.values()
    sizes = (_whole_pages(math.prod(each) * np.dtype(dtype).itemsize) for dtype, each in before)
    return dict(zip(shape.arrays, itertools.accumulate(sizes, initial=0), strict=True))


def _whole_pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE
