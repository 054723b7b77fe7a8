"""What depends on the kind of device, in one place: `HostBackend` for CPUs, `CudaBackend` for NVIDIA GPUs.

A trainer and its loader each have one (host.py, cuda.py); the rest of the program does not ask what it runs
on. devices.py says which devices there are and which a run takes; gpus.py lists NVIDIA's for it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.loading import Filler, Ring
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Blocks, RingShape
from lockstep.memory import Block, Memory

if TYPE_CHECKING:  # a loader for CPUs has no need of torch
    import torch

    from lockstep.exchange.transport import Transport
    from lockstep.network.program import Program
    from lockstep.network.recorder import Stopwatch


class Backend(ABC):
    """The parts of a trainer or loader that depend on its device."""

    memory: Memory

    @abstractmethod
    def start_computing(self, config: Config) -> None:
        """Prepares torch in this process, which is a trainer."""

    @abstractmethod
    def speed_up(self, program: "Program", config: Config) -> str:
        """Makes a program use what this device has for it, and adds to its `ways`.

        Returns what a user should know.
        """

    @abstractmethod
    def stopwatch(self) -> "Stopwatch":
        """Measures the time that the device takes."""

    @abstractmethod
    def open_transport(
        self, kind: str, block: Block, arena: "torch.Tensor", group: Group
    ) -> "tuple[Transport, str]":
        """The transport between all trainers, who call it at once, and why it is this one.

        kind: `exchange` in the configuration. block: where this trainer's arena lies; arena: all of it.
        Raises UserError where that kind can't be had.
        """

    @abstractmethod
    def make_ring(
        self, config: Config, n_slots: int, crop_size: int, mean: np.ndarray, blocks: Blocks | None = None
    ) -> Ring:
        """The trainer's ring. mean: float32 (row, column, 3), which also tells the size of raw images.

        blocks: in which the network takes its images, where `speed_up` has found that this device makes them.
        """

    @abstractmethod
    def fill_directly(self, ring: Ring, reader: Reader) -> Filler:
        """A filler in the trainer's own process."""

    @abstractmethod
    def receive_ring(self, trainer: Pipe, shape: RingShape, reader: Reader) -> Filler:
        """A filler in the loader's process, of the ring that the trainer offers."""


def backend_of(device: str) -> Backend:
    """The back end for 'cpu' or 'cuda:<n>'. Raises UserError where the device can't be used."""
    if device == "cpu":
        from lockstep.backends.host import HostBackend

        return HostBackend()
    from lockstep.backends.cuda import CudaBackend

    return CudaBackend(device)


def loaders_backend(config: Config, device: str) -> Backend:
    """The back end of the loader of a trainer on `device`, which need not be the trainer's (`upload`)."""
    return backend_of("cpu" if config.upload == "trainer" else device)
