"""One loader: receive an order, read images, crop and mirror them, subtract the mean, fill a slot, answer.

Each trainer has one loader process (`para_load: True`). While the trainer computes, its loader works ahead by
as many batches as the ring has free slots. With `para_load: False` the trainer calls the same reader and
filler itself. lockstep/loading/reader.py reads the images. On a CPU the loader crops and converts them; on a
GPU it copies the bytes to the device, where a kernel does.
"""

from multiprocessing.connection import Connection

import torch

from lockstep.backends import loaders_backend
from lockstep.comm.group import World
from lockstep.comm.messages import Fill, Filled, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import open_dataset, with_mean
from lockstep.launch.status import StatusBoard
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape


def run_loader(
    control: Pipe,
    board: StatusBoard,
    connection: Connection,
    world: World,
    config: Config,
) -> None:
    """Fill slots for this host's trainer `world.local_rank` until it sends Stop."""
    torch.set_num_threads(1)  # loaders are parallel already
    board.say("opening the dataset")
    dataset = open_dataset(config)
    backend = loaders_backend(config, config.devices[world.local_rank])
    trainer = Pipe(connection, f"trainer {world.local_rank}", config.timeout)
    first = trainer.receive(object, "the network's mean")
    if isinstance(first, Stop):  # restarted when no loader was needed any more
        return
    assert isinstance(first, Subtract)
    dataset = with_mean(dataset, first.mean)
    shape = trainer.receive(RingShape, "the ring's shape")
    reader = Reader(config, dataset, shape.crop_size, board.say, shape.changes)
    filler = backend.receive_ring(trainer, shape, reader)
    while True:
        board.say("waiting for an order")
        message = trainer.receive(object, "its next order")
        if isinstance(message, Stop):
            break
        assert isinstance(message, Fill)
        filler.fill(message.slot, message.order)
        trainer.send(Filled(message.slot, message.order))
    filler.close()
