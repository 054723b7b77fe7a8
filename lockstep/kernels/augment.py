"""The Python wrappers of augment.cu, which changes, crops, mirrors and converts the images of a slot."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import kernels
from lockstep.errors import UserError
from lockstep.kernels.common import THREADS
from lockstep.kernels.filters import scaling_filters
from lockstep.memory.cuda import CudaMemory

if TYPE_CHECKING:  # slots lie in a higher package
    from lockstep.loading.slots import RingShape

_MOST_IMAGES = 65_535  # rows of a grid
_WARP = 32


class ChangeKernels:
    """The kernels that make uint8 images of the network's size from a raw slot, as its changes say.

    Args:
        stream: The stream of their launches.
        raw: Shape of the raw slots, which has changes.
    """

    def __init__(self, memory: CudaMemory, stream: Any, raw: "RingShape") -> None:
        assert raw.changes is not None
        self._driver, self._stream, self._raw, self._changes = memory.driver, stream, raw, raw.changes
        module = kernels.load(memory.driver, "augment")
        names = ("resized_crop", "sum_gray", "jitter", "erase", "mix")
        self._kernels = {name: module.get_function(f"augment_{name}") for name in names}
        (self._rows, self._columns), n_bytes = raw.crop_size, raw.n_colors * math.prod(raw.crop_size)
        sizes = {"crops": raw.n_images * n_bytes, "mixed": 0, "sums": 0}
        if self._changes.mixes:
            sizes["mixed"] = raw.batch_size * n_bytes
        if self._changes.jitters:
            sizes["sums"] = 8 * raw.n_images
        self._blocks = {
            name: memory.allocate(size, "augmented images") for name, size in sizes.items() if size
        }
        self._n_weights = 0, 0
        if self._changes.resizes:
            down, across = map(scaling_filters, raw.image_size, raw.crop_size)
            self._n_weights = down.shape[2], across.shape[2]
            for name, filters in (("down", down), ("across", across)):
                self._blocks[name] = memory.allocate(filters.nbytes, "filters of scaled images")
                memory.upload(self._blocks[name], filters)

    def launch(self, raw: int, n_samples: int) -> int:
        """Make the images of the first n_samples samples, which stay until the next launch.

        Args:
            raw: Address of a raw slot.

        Returns:
            The address of the images, uint8 (n_samples, *crop_size, channel).
        """
        # At most as many partners as samples. Kernels skip the places that have no image.
        n_images = 2 * n_samples if self._changes.mixes else n_samples
        crops, mixed, sums = self._at("crops"), self._at("mixed"), self._at("sums")
        changes = raw + self._raw.head_bytes
        size = self._rows, self._columns
        shape = (*size, self._raw.n_colors)
        stored = raw + self._raw.at("images"), changes, self._at("down"), self._at("across"), crops
        numbers = *self._n_weights, *self._raw.image_size, *shape, int(self._changes.reflects)
        self._run("resized_crop", n_images, stored, numbers)
        if self._changes.jitters:
            self._driver.memset_d8_async(sums, 0, 8 * n_images, self._stream)
            self._run("sum_gray", n_images, (crops, changes, sums), size, _WARP)
            self._run("jitter", n_images, (crops, changes, sums), size)
        if self._changes.erases:
            self._run("erase", n_images, (crops, changes), shape)
        if not self._changes.mixes:
            return crops
        self._run("mix", n_samples, (crops, raw + self._raw.at("pairs"), mixed), shape)
        return mixed

    def _at(self, name: str) -> int:
        """Return the address of a block, 0 if its kernel is not used."""
        return self._blocks[name].pointer if name in self._blocks else 0

    def _run(
        self,
        name: str,
        n_images: int,
        pointers: Iterable[int],
        numbers: Iterable[int],
        threads: int = THREADS,
    ) -> None:
        """Launch a kernel: one block for each row of each image."""
        arguments = *map(np.uint64, pointers), *map(np.int32, numbers)
        grid, block = (self._rows, n_images), (threads, 1, 1)
        self._kernels[name](*arguments, grid=grid, block=block, stream=self._stream)

    def close(self) -> None:
        """Free the memory of images."""
        for block in self._blocks.values():
            block.close()


class CropMirrorSubtractKernel:
    """The kernels that turn a raw slot into a slot as the network takes it, both in this device's memory.

    Args:
        stream: The stream of its launches.
        mean: Mean image, float32 (row, column, channel).
        raw: Shape of the raw slots.
        out: Shape of the slots that it writes.

    Raises:
        UserError: The batch is too large, or the kernel cannot be compiled.
    """

    def __init__(
        self, memory: CudaMemory, stream: Any, mean: np.ndarray, raw: "RingShape", out: "RingShape"
    ) -> None:
        if raw.n_images > _MOST_IMAGES:
            most = _MOST_IMAGES * raw.batch_size // raw.n_images
            raise UserError(f"batch_size: a GPU trainer takes {most:,} at most, not {raw.batch_size:,}")
        self._driver, self._stream, self._raw, self._out = memory.driver, stream, raw, out
        self._kernel = kernels.load(memory.driver, "augment").get_function(f"crop_and_subtract_{out.dtype}")
        self._mean = memory.allocate(mean.nbytes, "the mean image")
        memory.upload(self._mean, mean)
        self._changes = ChangeKernels(memory, stream, raw) if raw.changes else None

    def launch(self, raw: int, out: int, n_images: int) -> None:
        """Copy labels and sample numbers, and make the first n_images images.

        Args:
            raw: Address of a raw slot.
            out: Address of the slot to write.
        """
        self._driver.memcpy_dtod_async(out, raw, self._raw.head_bytes, self._stream)
        if not n_images:
            return
        images, (height, width) = raw + self._raw.at("images"), self._raw.image_size
        if self._changes:
            images, (height, width) = self._changes.launch(raw, n_images), self._raw.crop_size
        blocks, (rows, columns) = self._out.blocks, self._out.crop_size
        size, padding = (blocks.size, blocks.padding) if blocks else (1, 0)
        n_rows, n_columns = self._out.image_size  # of blocks
        self._kernel(
            np.uint64(images),
            np.uint64(raw + self._raw.at("crops")),
            np.uint64(raw + self._raw.at("shifts")),
            np.uint64(self._mean.pointer),
            np.uint64(out + self._out.at("images")),
            *map(np.int32, (height, width, rows, columns, n_columns, self._out.n_colors, size, padding)),
            block=(THREADS, 1, 1),
            grid=(n_rows, n_images),
            stream=self._stream,
        )

    def close(self) -> None:
        """Free the mean image and the memory of changed images."""
        self._mean.close()
        if self._changes:
            self._changes.close()
