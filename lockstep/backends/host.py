"""CPUs: memory files that all processes map."""

from typing import TYPE_CHECKING

import numpy as np

from lockstep.backends import Backend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.loading import Filler, Ring
from lockstep.loading.host import HostFiller, HostRing, RawHostFiller
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Blocks, RingShape
from lockstep.memory import Block
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.memory.malloc import keep_freed_memory

if TYPE_CHECKING:
    import torch

    from lockstep.exchange.transport import Transport
    from lockstep.network.program import Program
    from lockstep.network.recorder import Stopwatch


class HostBackend(Backend):
    """What computes loads torch when it is asked for; a loader asks for none of it."""

    memory: HostMemory

    def __init__(self) -> None:
        self.memory = HostMemory()

    def start_computing(self, config: Config) -> None:
        """torch computes on a CPU without being told; what it has freed stays with the process."""
        keep_freed_memory()

    def speed_up(self, program: "Program", config: Config) -> str:
        """torch's own way is the one."""
        kernels = ("lrn", "dropout", "pool", "sgd", "blocks")
        ways = dict.fromkeys(kernels, "torch, on CPUs") | {"augment": "on the host, where slots are filled"}
        program.ways = {**program.ways, **ways, "upload": "nothing to copy on CPUs"}
        return ""

    def stopwatch(self) -> "Stopwatch":
        from lockstep.network.recorder import HostStopwatch

        return HostStopwatch()

    def open_transport(
        self, kind: str, block: Block, arena: "torch.Tensor", group: Group
    ) -> "tuple[Transport, str]":
        import torch

        from lockstep.exchange.host import HostTransport

        assert isinstance(block, HostBlock) and kind == "auto"
        n_threads = torch.get_num_threads()
        return HostTransport.open(block, arena.numpy().dtype, len(arena), group, n_threads), ""

    def make_ring(
        self, config: Config, n_slots: int, crop_size: int, mean: np.ndarray, blocks: Blocks | None = None
    ) -> HostRing:
        assert blocks is None
        size = (crop_size, crop_size)
        return HostRing(RingShape(n_slots, config.batch_size, size, "float32", crop_size))

    def fill_directly(self, ring: Ring, reader: Reader) -> Filler:
        assert isinstance(ring, HostRing)
        return HostFiller(reader, ring.block, ring.shape)

    def receive_ring(self, trainer: Pipe, shape: RingShape, reader: Reader) -> Filler:
        kind = (
            RawHostFiller if shape.dtype == "uint8" else HostFiller
        )  # the trainer's device makes the images
        return kind(reader, self.memory.receive(trainer, "the ring's memory"), shape)
