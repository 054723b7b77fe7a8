"""CPUs: memory files that all processes map."""

import numpy as np
import torch

from lockstep.backends import Backend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.exchange.host import HostTransport
from lockstep.exchange.staged import HostStagedTransport
from lockstep.exchange.transport import Transport
from lockstep.loading import Filler, Ring
from lockstep.loading.host import HostFiller, HostRing, RawHostFiller
from lockstep.loading.reader import Reader
from lockstep.loading.slots import BlockLayout, RingShape
from lockstep.memory import Block
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.memory.malloc import keep_freed_memory
from lockstep.network import low_precision
from lockstep.network.program import Program
from lockstep.network.recorder import HostStopwatch


class HostBackend(Backend):
    """The back end of 'cpu'."""

    memory: HostMemory

    def __init__(self) -> None:
        self.memory = HostMemory()

    def start_computing(self, config: Config) -> None:
        """Set torch's switches, order its sums, and keep freed memory in this process."""
        low_precision.configure(config)
        if not config.deterministic:  # even then CPUs give the same bits, where torch can
            # By default two threads add the gradient of x[index] in an order that depends on timing.
            torch.set_deterministic_debug_mode("warn")
            # To fill new tensors would cost time, and change no result.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        keep_freed_memory()

    def speed_up(self, program: Program, config: Config) -> str:
        """Record that torch computes everything."""
        kernels = ("lrn", "dropout", "pool", "sgd", "blocks")
        implementations = dict.fromkeys(kernels, "torch, on CPUs") | {
            "augment": "on the host, where slots are filled"
        }
        program.implementations = {
            **program.implementations,
            **implementations,
            "upload": "nothing to copy on CPUs",
        }
        return ""

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def open_transport(
        self, kind: str, block: Block, arena: torch.Tensor, group: Group
    ) -> tuple[Transport, str]:
        assert isinstance(block, HostBlock) and kind in ("auto", "staged")
        if kind == "staged":  # there are GPUs among the devices
            if arena.dtype != torch.float32:
                raise UserError(f"beside a GPU the model's weights must be float32, not {arena.dtype}")
            return HostStagedTransport(block, len(arena), group), ""
        n_threads = torch.get_num_threads()
        return HostTransport.open(block, arena.numpy().dtype, len(arena), group, n_threads), ""

    def make_ring(
        self,
        config: Config,
        n_slots: int,
        crop_size: tuple[int, int],
        mean: np.ndarray,
        blocks: BlockLayout | None = None,
        n_labels: int = 0,
    ) -> HostRing:
        assert blocks is None
        n_colors = mean.shape[2]
        batch_size = config.batch_size
        shape = RingShape(n_slots, batch_size, crop_size, "float32", crop_size, n_colors, n_labels=n_labels)
        return HostRing(shape)

    def fill_directly(self, ring: Ring, reader: Reader) -> Filler:
        assert isinstance(ring, HostRing)
        return HostFiller(reader, ring.block, ring.shape)

    def receive_ring(self, trainer: Pipe, shape: RingShape, reader: Reader) -> Filler:
        # Slots are raw if the trainer's device makes the images.
        kind = RawHostFiller if shape.dtype == "uint8" else HostFiller
        return kind(reader, self.memory.receive(trainer, "the ring's memory"), shape)
