"""Everything that depends on the kind of device: `HostBackend` for CPUs, `CudaBackend` for NVIDIA GPUs.

A trainer and its loader each have a back end (host.py, cuda.py); the rest of the program does not depend on
the device. `devices.py` chooses and checks a run's devices; `gpus.py` lists NVIDIA GPUs for it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.augmentation import uploader_of
from lockstep.loading import Filler, Ring
from lockstep.loading.reader import Reader
from lockstep.loading.slots import BlockLayout, RingShape
from lockstep.memory import Block, Memory

if TYPE_CHECKING:  # the launcher, the doctor and the report import this package without torch
    import torch

    from lockstep.exchange.transport import Transport
    from lockstep.network.program import Program
    from lockstep.network.recorder import Stopwatch


class Backend(ABC):
    """The parts of a trainer or loader that depend on its device.

    Attributes:
        memory: The device's allocator.
    """

    memory: Memory

    @abstractmethod
    def start_computing(self, config: Config) -> None:
        """Prepare torch in this trainer's process, including its switches for precision and determinism.

        Raises:
            UserError: torch cannot use the device.
        """

    @abstractmethod
    def speed_up(self, program: "Program", config: Config) -> str:
        """Make a program use this device's kernels, and add to its `implementations`.

        Returns:
            A message for the user, or ''.
        """

    @abstractmethod
    def stopwatch(self) -> "Stopwatch":
        """Return a stopwatch of the device's time."""

    @abstractmethod
    def open_transport(
        self, kind: str, block: Block, arena: "torch.Tensor", group: Group
    ) -> "tuple[Transport, str]":
        """Return the transport between all trainers, which call this at once, and why it was chosen.

        Args:
            kind: `exchange` in the configuration.
            block: The block of this trainer's arena.
            arena: The whole arena, (n,).
            group: All trainers of this host.

        Raises:
            UserError: That kind of exchange does not work here.
        """

    @abstractmethod
    def make_ring(
        self,
        config: Config,
        n_slots: int,
        crop_size: tuple[int, int],
        mean: np.ndarray,
        blocks: BlockLayout | None = None,
        n_labels: int = 0,
    ) -> Ring:
        """Return the trainer's ring.

        Args:
            n_slots: Number of slots.
            crop_size: Rows and columns of the network's images.
            mean: The mean image, float32 (row, column, channel), of the size of stored images.
            blocks: Blocks in which the network takes its images, if `speed_up` found that this device writes
                them.
            n_labels: Numbers in the label of an image, with `task: multilabel`.
        """

    @abstractmethod
    def fill_directly(self, ring: Ring, reader: Reader) -> Filler:
        """Return a filler in the trainer's own process."""

    @abstractmethod
    def receive_ring(self, trainer: Pipe, shape: RingShape, reader: Reader) -> Filler:
        """Return a filler in the loader's process, of the ring to which the trainer connects it."""


def backend_of(device: str) -> Backend:
    """Return the back end for 'cpu' or 'cuda:<n>'.

    Raises:
        UserError: The device cannot be used.
    """
    if device == "cpu":
        from lockstep.backends.host import HostBackend

        return HostBackend()
    from lockstep.backends.cuda import CudaBackend

    return CudaBackend(device)


def loaders_backend(config: Config, device: str) -> Backend:
    """Return the back end of a trainer's loader: that of CPUs if the trainer uploads."""
    return backend_of("cpu" if uploader_of(config) == "trainer" else device)
