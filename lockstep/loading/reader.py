"""Reads what an order asks for: raw images, labels, sample numbers, crops, mirrors and shifts of colour."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.data.colours import draw_shifts, principal_components
from lockstep.data.dataset import Dataset, Split
from lockstep.data.hkl import HklArray, read_rows
from lockstep.data.randomness import Purpose, draw
from lockstep.data.sampling import EpochSamples
from lockstep.loading.slots import RingShape, Slot

N_VIEWS = 10  # the middle and the four corners, then the same mirrored (Krizhevsky et al. 2012, section 4.1)


class Reader:
    """What it reads depends on configuration, data and order only. say: told what it is doing."""

    def __init__(
        self, config: Config, dataset: Dataset, crop_size: int, say: Callable[[str], object]
    ) -> None:
        self.dataset = dataset
        self.crop_size = crop_size
        self._config = config
        self._say = say
        self._epoch: tuple[str, int] | None = None
        self._pool = ThreadPoolExecutor(config.read_threads) if config.read_threads > 1 else None
        self._components = np.zeros((3, 3))
        if self.shifts_colours:
            say("computing the principal components of the pictures' colours")
            self._components = principal_components(dataset.train)

    @property
    def shifts_colours(self) -> bool:
        """Whether any picture's shifts are other than zero."""
        return self._config.rand_color > 0

    def raw_shape(self, n_slots: int) -> RingShape:
        """Of the slots that `read` fills: images as they lie in the files, uint8."""
        height, width, _ = self.dataset.image_shape
        return RingShape(n_slots, self._config.batch_size, (height, width), "uint8", self.crop_size)

    def read(self, order: Order, slot: Slot[np.ndarray]) -> None:
        """Fills the first images of a raw slot in host memory, as many as the order has."""
        self._say(f"{order}: preparing")
        self._turn_to(order.stage, order.epoch)
        n_samples = order.last - order.first
        samples = self._order.samples(order.first, order.last)
        self._read_images(order, slot.images)
        # One draw for the minibatch is that of its first sample, wherever the minibatch is cut into shares.
        drawn = samples
        if self._config.batch_crop_mirror and n_samples:
            drawn = np.repeat(self._order.samples(order.start, order.start + 1), n_samples)
        slot.crops[:n_samples] = self._crops[drawn]
        if order.view:
            slot.crops[:n_samples] = self._view(order.view)
        slot.shifts[:n_samples] = self._shifts[samples]
        slot.labels[:n_samples] = self._split.labels[samples]
        slot.samples[:n_samples] = samples

    def _read_images(self, order: Order, images: np.ndarray) -> None:
        reads = self._reads(order, images)
        if self._pool is None:
            for file, first, out in reads:
                self._say(f"{order}: reading {file.path}")
                self._fetch(file, first, out)
            return
        wanted = list(reads)  # the GIL is let go of while bytes come
        self._say(f"{order}: reading {', '.join(sorted({file.path for file, _, _ in wanted}))}")
        for _ in self._pool.map(lambda read: self._fetch(*read), wanted):
            pass  # raises what a read has raised

    def _fetch(self, file: HklArray, first: int, out: np.ndarray) -> None:
        read_rows(file, first, out, self._config.read_retries)

    def _reads(self, order: Order, images: np.ndarray) -> Iterator[tuple[HklArray, int, np.ndarray]]:
        """File, first row, and where to: long runs of rows in pieces, so that all threads have some."""
        done, most = 0, -(-(order.last - order.first) // self._config.read_threads)
        for rows in self._order.rows(order.first, order.last):
            file = self._split.files[rows.file]
            # of an old file all bytes are read, whatever is wanted of it
            step = rows.count if file.layout == "c01b" else most
            for start in range(0, rows.count, step):
                count = min(step, rows.count - start)
                yield file, rows.first + start, images[done : done + count]
                done += count

    def _turn_to(self, stage: str, epoch: int) -> None:
        """Draws the order, crops, mirrors and shifts of an epoch, when another one begins."""
        if self._epoch == (stage, epoch):
            return
        config, training = self._config, stage == "train"
        self._split: Split = self.dataset.train if training else self.dataset.val
        self._order = EpochSamples(
            self._split.file_rows,
            config.shuffle if training else "none",
            config.shuffle_block,
            config.seed,
            epoch,
        )
        height, width, _ = self.dataset.image_shape
        crop, mirror = config.rand_crop and training, config.rand_mirror and training
        self._crops = np.zeros((len(self._split), 3), np.int32)
        self._crops[:, 0] = self._corners(Purpose.CROP_ROW, epoch, height - self.crop_size, crop)
        self._crops[:, 1] = self._corners(Purpose.CROP_COLUMN, epoch, width - self.crop_size, crop)
        if mirror:
            self._crops[:, 2] = draw(config.seed, epoch, Purpose.MIRROR, len(self._split), 2)
        self._shifts = np.zeros((len(self._split), 3), np.float32)
        if self.shifts_colours and training:
            self._shifts = draw_shifts(
                config.seed, epoch, config.rand_color, self._components, len(self._split)
            )
        self._epoch = (stage, epoch)

    def _view(self, number: int) -> tuple[int, int, int]:
        """Row, column and mirror of one of the N_VIEWS views."""
        height, width, _ = self.dataset.image_shape
        lowest, rightmost = height - self.crop_size, width - self.crop_size
        middle = (lowest // 2, rightmost // 2)
        places = (middle, (0, 0), (0, rightmost), (lowest, 0), (lowest, rightmost))
        return (*places[number % 5], number // 5)

    def _corners(self, purpose: Purpose, epoch: int, margin: int, random: bool) -> np.ndarray | int:
        """Where each sample's crop begins, in pixels: anywhere in the margin, or in its middle."""
        if not random:
            return margin // 2
        return draw(self._config.seed, epoch, purpose, len(self._split), margin + 1)
