"""What every process that computes with a network does: share the cores, and say plainly what it can't do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.backends.devices import count_cores
from lockstep.comm.group import World
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch import cores
from lockstep.launch.status import StatusBoard

_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # a plain RuntimeError of torch's


@contextmanager
def computing(config: Config, world: World, board: StatusBoard) -> Iterator[None]:
    """Around all that a trainer computes: with `cpu_threads` threads.

    Raises UserError where memory is not enough, or `deterministic` asks for what an operation can't do.
    """
    n_threads = config.cpu_threads or max(1, count_cores() // world.local_size)
    torch.set_num_threads(n_threads)
    if config.pin_cores:
        cores.pin(world.local_rank, world.local_size, n_threads)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _NO_HOST_MEMORY in str(error):
            text = f"{config.devices[world.local_rank]} is out of memory ({board.read()}): {error}"
            raise UserError(f"{text}; lower batch_size or n_slots, or use a smaller model") from error
        if "use_deterministic_algorithms" in str(error):
            raise UserError(f"deterministic: the network has an operation that is not: {error}") from error
        raise
