"""What one loader does: wait for an order, read, crop and mirror, subtract the mean, fill the slot, answer.

A loader is a process of its own beside each trainer (`para_load: True`). It works ahead, as many minibatches
as the ring has free slots, while its trainer computes. With `para_load: False` the trainer calls the same
`SlotFiller`.
"""

from multiprocessing.connection import Connection

import numpy as np
import torch

from lockstep.augment import Augmenter
from lockstep.batches import read_rows
from lockstep.config import Config
from lockstep.dataset import Dataset, Split, open_dataset
from lockstep.memory import memory_of
from lockstep.messages import Fill, Filled, Order, Stop
from lockstep.order import EpochOrder
from lockstep.pipes import Pipe
from lockstep.randomness import Purpose, draw
from lockstep.slots import RingShape, Slot
from lockstep.status import StatusBoard


def run_loader(
    control: Pipe,
    board: StatusBoard,
    connection: Connection,
    rank: int,
    config: Config,
) -> None:
    """The loader process of trainer `rank`: serves its trainer until that says Stop."""
    torch.set_num_threads(1)  # one loader per trainer is the parallelism
    board.say("opening the dataset")
    dataset = open_dataset(config)
    trainer = Pipe(connection, f"trainer {rank}", config.wait_deadline)
    shape = trainer.receive(RingShape, "the ring's shape")
    block = memory_of("cpu").receive(trainer, "the ring's memory")
    slots = shape.slots(block)
    filler = SlotFiller(config, dataset, shape, board)
    while True:
        board.say("waiting for an order")
        message = trainer.receive(object, "its next order")
        if isinstance(message, Stop):
            return
        assert isinstance(message, Fill)
        filler.fill(slots[message.slot], message.order)
        trainer.send(Filled(message.slot, message.order))


class SlotFiller:
    """Turns orders into filled slots. What it writes depends on configuration, data and order only."""

    def __init__(self, config: Config, dataset: Dataset, shape: RingShape, board: StatusBoard) -> None:
        self._config = config
        self._dataset = dataset
        self._board = board
        self._crop_size = shape.crop_size
        self._augmenter = Augmenter(torch.from_numpy(dataset.mean), shape.crop_size)
        self._raw = np.empty((shape.batch_size, *dataset.image_shape), np.uint8)
        self._epoch: tuple[str, int] | None = None

    def fill(self, slot: Slot, order: Order) -> None:
        """Reads, crops, mirrors and subtracts; writes images, labels and sample numbers into the slot."""
        self._board.say(f"{order}: preparing")
        self._turn_to(order.stage, order.epoch)
        n_samples = order.last - order.first
        samples = self._order.samples(order.first, order.last)
        self._read(order)
        # One draw for the minibatch is that of its first sample, wherever the minibatch is cut into shares.
        drawn = samples
        if self._config.batch_crop_mirror and n_samples:
            drawn = np.repeat(self._order.samples(order.start, order.start + 1), n_samples)
        self._augmenter.apply(
            torch.from_numpy(self._raw[:n_samples]),
            self._rows[drawn].tolist(),
            self._columns[drawn].tolist(),
            self._mirror[drawn].tolist(),
            slot.images[:n_samples],
        )
        slot.labels[:n_samples] = torch.from_numpy(self._split.labels[samples])
        slot.samples[:n_samples] = torch.from_numpy(samples)

    def _read(self, order: Order) -> None:
        done = 0
        for rows in self._order.rows(order.first, order.last):
            file = self._split.files[rows.file]
            self._board.say(f"{order}: reading {file.path}")
            read_rows(file, rows.first, self._raw[done : done + rows.count])
            done += rows.count

    def _turn_to(self, stage: str, epoch: int) -> None:
        """Draws the order and the augmentation of an epoch, when another one begins."""
        if self._epoch == (stage, epoch):
            return
        config, training = self._config, stage == "train"
        self._split: Split = self._dataset.train if training else self._dataset.val
        self._order = EpochOrder(
            self._split.file_rows,
            config.shuffle if training else "none",
            config.shuffle_block,
            config.seed,
            epoch,
        )
        height, width, _ = self._dataset.image_shape
        crop, mirror = config.rand_crop and training, config.rand_mirror and training
        self._rows = self._corners(Purpose.CROP_ROW, epoch, height - self._crop_size, crop)
        self._columns = self._corners(Purpose.CROP_COLUMN, epoch, width - self._crop_size, crop)
        self._mirror = np.zeros(len(self._split), bool)
        if mirror:
            self._mirror = draw(config.seed, epoch, Purpose.MIRROR, len(self._split), 2).astype(bool)
        self._epoch = (stage, epoch)

    def _corners(self, purpose: Purpose, epoch: int, margin: int, random: bool) -> np.ndarray:
        """Where each sample's crop begins, in pixels: anywhere in the margin, or in its middle."""
        if not random:
            return np.full(len(self._split), margin // 2)
        return draw(self._config.seed, epoch, purpose, len(self._split), margin + 1)
