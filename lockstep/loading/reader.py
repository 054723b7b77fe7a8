"""The reader of orders: raw images, labels, sample numbers, crops, mirrors and colour shifts.

Raw images are the stored ones, or with some keys of augmentation those of the network's size that the reader
makes of them (lockstep/data/preparing.py). For a GPU the reader describes what the kernels have to do.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.config.augmentation import DeviceChanges, crop_of, makes_images, mixes
from lockstep.data.colours import draw_shifts, principal_components
from lockstep.data.dataset import Dataset, Split
from lockstep.data.mixing import PARTS, Mixer, Mixing, mix, unmixed
from lockstep.data.preparing import Preparer
from lockstep.data.randomness import Purpose, draw
from lockstep.loading.slots import RingShape, Slot

N_VIEWS = 10  # the centre and the four corners, then the same mirrored (Krizhevsky et al. 2012, section 4.1)


class Reader:
    """A reader whose results depend on configuration, data and order only.

    Args:
        crop_size: Rows and columns of the network's images.
        say: Called with a line about the current activity.
        changes: The changes that the device's kernels make.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        crop_size: tuple[int, int],
        say: Callable[[str], object],
        changes: DeviceChanges | None = None,
    ) -> None:
        self.dataset = dataset
        self.mean = mean_of_raw(config, dataset.mean, crop_size)
        self.crop_size = crop_size
        self._config = config
        self._changes = changes
        self._say = say
        self._epoch: tuple[str, int] | None = None
        self._n_threads = config.read_threads or 1
        self._pool = ThreadPoolExecutor(self._n_threads) if self._n_threads > 1 else None
        self._components = np.zeros((3, 3))
        if self.shifts_colours:
            say("computing the principal components of the images' colours")
            self._components = principal_components(dataset.train)
        self._preparer: Preparer | None = None
        self._mixer: Mixer | None = None
        if makes_images(config):
            size = dataset.image_shape[0], dataset.image_shape[1]
            self._preparer = Preparer(config, size, crop_size, self.mean[0, 0], changes)
            self._mixer = Mixer(config, crop_size) if mixes(config) else None
            most = config.batch_size * (2 if self._mixer else 1)
            if not (changes and changes.crops):
                self._stored = np.empty((most, *dataset.image_shape), np.uint8)
            if self._mixer and not changes:
                self._made = np.empty((most, *crop_size, dataset.image_shape[2]), np.uint8)

    @property
    def shifts_colours(self) -> bool:
        """True if `rand_color` shifts the colours of images."""
        return self._config.rand_color > 0

    def raw_shape(self, n_slots: int) -> RingShape:
        """Return the shape of the slots that `read` fills."""
        place = self.dataset.image_shape, self.crop_size, self._changes
        return raw_shape(self._config, n_slots, *place, self.dataset.n_labels)

    def read(self, order: Order, slot: Slot[np.ndarray]) -> None:
        """Fill the first images of a raw slot in host memory, as many as the order has."""
        self._say(f"{order}: preparing")
        self._turn_to(order.stage, order.epoch)
        n_samples = order.last - order.first
        samples = self._order.samples(order.first, order.last)
        slot.shifts[:n_samples] = self._shifts[self._rows(order)]
        slot.samples[:n_samples] = samples
        mixing = self._fill_images(order, slot)
        slot.labels[:n_samples] = slot.other_labels[:n_samples] = self._split.labels_of(samples)
        slot.label_weights[:n_samples] = 1
        if mixing:
            slot.other_labels[:n_samples] = self._split.labels_of(self._order.samples_at(mixing.partners))
            slot.label_weights[:n_samples] = mixing.weights

    def _fill_images(self, order: Order, slot: Slot[np.ndarray]) -> Mixing | None:
        """Fill a slot's images and crops; return with which others they are mixed."""
        n_samples = order.last - order.first
        if self._preparer is None:
            self._read_images(order, slot.images)
            slot.crops[:n_samples] = self._crops_of(order)
            return None
        slot.crops[:n_samples] = 0  # the images have the network's size already, or kernels give it to them
        if self._changes:
            return self._describe(self._preparer, order, slot)
        if self._mixer is None or order.stage == "val":
            self._prepare(self._preparer, order, slot.images[:n_samples])
            return None
        mixing = self._mixer.choose_partners(*order.step_span, order.first, order.last)
        self._read_pairs(self._preparer, order, mixing, slot.images[:n_samples])
        return mixing

    def _describe(self, preparer: Preparer, order: Order, slot: Slot[np.ndarray]) -> Mixing | None:
        """Fill a slot's images, its changes and pairs; return with which others the images are mixed."""
        assert self._changes and slot.changes is not None
        mixing = None
        if self._mixer and order.stage == "train" and order.last > order.first:
            mixing = self._mixer.choose_partners(*order.step_span, order.first, order.last)
        pairs = mixing or unmixed(order.first, order.last)
        positions = np.arange(order.first, order.last)
        needed = np.union1d(positions, pairs.partners)
        for part, rows in _parts(order, needed):
            if self._changes.crops:
                self._read_images(part, slot.images[rows])
            else:
                self._prepare(preparer, part, slot.images[rows])
            crops = self._crops_of(part)
            preparer.describe(self._rows(part), self._crop_rows(part), crops, slot.changes[rows])
        slot.changes[len(needed) :] = np.zeros((), slot.changes.dtype)
        if slot.pairs is not None:
            mixed = slot.pairs[: len(positions)]
            mixed["own"] = np.searchsorted(needed, positions)
            mixed["partner"] = np.searchsorted(needed, pairs.partners)
            mixed["weight"], mixed["box"] = np.rint(pairs.weights * PARTS), pairs.boxes
        return mixing

    def _rows(self, order: Order) -> np.ndarray:
        """Return an order's rows in the epoch's tables of random choices: int64 (n,).

        They are the numbers of its samples. A sampler may draw a sample several times in an epoch, and each
        time with other choices, so its rows are the places in the epoch.
        """
        if self._config.sampler and order.stage == "train":
            return np.arange(order.first, order.last)
        return self._order.samples(order.first, order.last)

    def _crop_rows(self, order: Order) -> np.ndarray:
        """Return the rows of an order's crops and mirrors; batch_crop_mirror uses the batch's first row."""
        rows = self._rows(order)
        if not self._config.batch_crop_mirror or not len(rows):
            return rows
        return np.repeat(self._rows(replace(order, first=order.start, last=order.start + 1)), len(rows))

    def _crops_of(self, order: Order) -> np.ndarray:
        """Return the crops of an order: int32 (n, 3)."""
        rows = self._crop_rows(order)
        if order.view:
            return np.broadcast_to(np.array(self._view(order.view), np.int32), (len(rows), 3))
        crops: np.ndarray = self._crops[rows]
        return crops

    def _prepare(self, preparer: Preparer, order: Order, out: np.ndarray) -> None:
        """Read an order's images and make those of the network's size, uint8 (n, *crop_size, channel)."""
        stored = self._stored[: len(out)]
        self._read_images(order, stored)
        rows, samples = self._rows(order), self._order.samples(order.first, order.last)
        preparer.apply(stored, rows, self._crop_rows(order), self._crops_of(order), out, samples)

    def _read_pairs(self, preparer: Preparer, order: Order, mixing: Mixing, out: np.ndarray) -> None:
        """Make an order's images and their partners, whichever trainer has those, and mix them."""
        if not len(out):
            return
        needed = np.union1d(np.arange(order.first, order.last), mixing.partners)
        made = self._made[: len(needed)]
        for part, rows in _parts(order, needed):
            self._prepare(preparer, part, made[rows])
        owns = np.searchsorted(needed, np.arange(order.first, order.last)).tolist()
        partners = np.searchsorted(needed, mixing.partners).tolist()
        pairs = zip(owns, partners, mixing.weights.tolist(), mixing.boxes, out, strict=True)
        for own, partner, weight, box, result in pairs:
            mix(made[own], made[partner], weight, box, result)

    def _read_images(self, order: Order, images: np.ndarray) -> None:
        reads = self._reads(order, images)
        if self._pool is None:
            for file, first, out in reads:
                self._say(f"{order}: reading {self._split.name_of(file)}")
                self._fetch(file, first, out)
            return
        planned = list(reads)
        names = sorted({self._split.name_of(file) for file, _, _ in planned})
        self._say(f"{order}: reading {', '.join(names)}")
        for _ in self._pool.map(lambda read: self._fetch(*read), planned):  # reads release the GIL
            pass  # re-raises a read's exception

    def _fetch(self, file: int, first: int, out: np.ndarray) -> None:
        self._split.read(file, first, out, self._config.read_retries)

    def _reads(self, order: Order, images: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (file, first row, destination), long runs of rows cut into pieces for all threads."""
        done, most = 0, -(-(order.last - order.first) // self._n_threads)
        for rows in self._order.rows(order.first, order.last):
            step = rows.count if self._split.is_read_whole(rows.file) else most
            for start in range(0, rows.count, step):
                count = min(step, rows.count - start)
                yield rows.file, rows.first + start, images[done : done + count]
                done += count

    def _turn_to(self, stage: str, epoch: int) -> None:
        """Draw the order, crops, mirrors and shifts of an epoch, if it is not the current one."""
        if self._epoch == (stage, epoch):
            return
        config, training = self._config, stage == "train"
        self._split: Split = self.dataset.train if training else self.dataset.val
        self._order = self._split.order_of(config, epoch, training)
        height, width, n_colors = self.dataset.image_shape
        rows, columns = self.crop_size
        crop = training and crop_of(config) in ("random", "padded")
        mirror = config.rand_mirror and training
        added = 2 * self._preparer.padding if self._preparer and training else 0
        self._crops = np.zeros((len(self._split), 3), np.int32)
        self._crops[:, 0] = self._corners(Purpose.CROP_ROW, epoch, height + added - rows, crop)
        self._crops[:, 1] = self._corners(Purpose.CROP_COLUMN, epoch, width + added - columns, crop)
        if mirror:
            self._crops[:, 2] = draw(config.seed, epoch, Purpose.MIRROR, len(self._split), 2)
        self._shifts = np.zeros((len(self._split), n_colors), np.float32)
        if self.shifts_colours and training:
            self._shifts = draw_shifts(
                config.seed, epoch, config.rand_color, self._components, len(self._split)
            )
        if self._preparer:
            self._preparer.draw(training, epoch, len(self._split))
        if self._mixer and training:
            self._mixer.begin_epoch(epoch, len(self._split))
        self._epoch = (stage, epoch)

    def _view(self, number: int) -> tuple[int, int, int]:
        """Return row, column and mirror of one of the N_VIEWS views."""
        height, width, _ = self.dataset.image_shape
        lowest, rightmost = height - self.crop_size[0], width - self.crop_size[1]
        middle = (lowest // 2, rightmost // 2)
        places = (middle, (0, 0), (0, rightmost), (lowest, 0), (lowest, rightmost))
        return (*places[number % 5], number // 5)

    def _corners(self, purpose: Purpose, epoch: int, margin: int, random: bool) -> np.ndarray | int:
        """Return where each sample's crop begins, in pixels: anywhere in the margin, or in its middle."""
        if not random:
            return margin // 2
        return draw(self._config.seed, epoch, purpose, len(self._split), margin + 1)


def mean_of_raw(config: Config, mean: np.ndarray, crop_size: tuple[int, int]) -> np.ndarray:
    """Return the mean to subtract from raw images, float32 (row, column, channel), which has their size.

    Args:
        config: The run's configuration.
        mean: The mean of stored images, which is the same for all pixels where the reader makes images.
        crop_size: Rows and columns of the network's images.
    """
    return mean[: crop_size[0], : crop_size[1]] if makes_images(config) else mean


def raw_shape(
    config: Config,
    n_slots: int,
    image_shape: tuple[int, ...],
    crop_size: tuple[int, int],
    changes: DeviceChanges | None,
    n_labels: int = 0,
) -> RingShape:
    """Return the shape of raw slots.

    Args:
        image_shape: Rows, columns and channels of stored images.
        crop_size: Rows and columns of the network's images.
        changes: The changes that the device's kernels make.
        n_labels: Numbers in the label of an image; 0: labels are classes.
    """
    height, width, n_colors = image_shape
    on_cores = makes_images(config) and not (changes and changes.crops)
    size = crop_size if on_cores else (height, width)
    return RingShape(
        n_slots, config.batch_size, size, "uint8", crop_size, n_colors, changes=changes, n_labels=n_labels
    )


def _parts(order: Order, positions: np.ndarray) -> Iterator[tuple[Order, slice]]:
    """Yield an order for each run of consecutive positions, and the run's place in the sorted array."""
    if not len(positions):
        return
    edges = (np.flatnonzero(np.diff(positions) != 1) + 1).tolist()
    for begin, end in zip([0, *edges], [*edges, len(positions)], strict=True):
        part = replace(order, first=int(positions[begin]), last=int(positions[end - 1]) + 1)
        yield part, slice(begin, end)
