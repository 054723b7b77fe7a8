"""What one loader does: wait for an order, read, crop and mirror, subtract the mean, fill the slot, answer.

A loader is a process of its own beside each trainer (`para_load: True`). It works ahead, as many minibatches
as the ring has free slots, while its trainer computes. With `para_load: False` the trainer uses the same
reader and filler itself. What is read is in lockstep/loading/reader.py, how it gets into the slot in
lockstep/loading: on a CPU the loader prepares the images; on a GPU it has the bytes copied to the device,
where a kernel does.
"""

import os
from multiprocessing.connection import Connection

from lockstep.backends import loaders_backend
from lockstep.comm.group import World
from lockstep.comm.messages import Fill, Filled, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data.dataset import open_dataset, subtracting
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
    """The loader process of this host's trainer `world.local_rank`: serves it until it says Stop."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for torch, where it is needed: loaders are the parallelism
    board.say("opening the dataset")
    dataset = open_dataset(config)
    backend = loaders_backend(config, config.devices[world.local_rank])
    trainer = Pipe(connection, f"trainer {world.local_rank}", config.wait_deadline)
    first = trainer.receive(object, "the network's mean")
    if isinstance(first, Stop):  # started in the place of a loader that nobody needed any more
        return
    assert isinstance(first, Subtract)
    dataset = subtracting(dataset, first.mean)
    shape = trainer.receive(RingShape, "the ring's shape")
    filler = backend.receive_ring(trainer, shape, Reader(config, dataset, shape.crop_size, board.say))
    while True:
        board.say("waiting for an order")
        message = trainer.receive(object, "its next order")
        if isinstance(message, Stop):
            break
        assert isinstance(message, Fill)
        filler.fill(message.slot, message.order)
        trainer.send(Filled(message.slot, message.order))
    filler.close()
