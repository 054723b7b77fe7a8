"""NVIDIA GPUs: PyCUDA's memory, stream and events, in which torch computes."""

from typing import Any

import numpy as np
import torch

from lockstep.backends import Backend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.augmentation import device_changes, makes_images, uploader_of
from lockstep.errors import UserError
from lockstep.exchange.p2p import PeerTransport, SwapTransport
from lockstep.exchange.proof import iommu, prove
from lockstep.exchange.staged import StagedTransport
from lockstep.exchange.transport import Transport
from lockstep.kernels.fold import MOST_RANKS
from lockstep.loading import Filler, Ring
from lockstep.loading.cuda import AugmentingFiller, CudaFiller, CudaRing, RawFiller, RawRing, ReadyRing
from lockstep.loading.reader import Reader, mean_of_raw, raw_shape
from lockstep.loading.slots import BlockLayout, RingShape
from lockstep.loading.uploading import UploadRing
from lockstep.memory import Block
from lockstep.memory.cuda import NON_BLOCKING, CudaBlock, CudaMemory
from lockstep.network import layers, low_precision
from lockstep.network.convolution import blocks_for, layout_of
from lockstep.network.low_precision import image_dtype
from lockstep.network.program import Program
from lockstep.network.recorder import Stopwatch, StreamStopwatch

_BY_BLOCKS = ("space_to_depth", "all")
# The streams in which torch computes, by device: in one that is destroyed, torch would crash.
_streams: dict[str, Any] = {}


def start_torch(device: str, stream: Any) -> None:
    """Make torch compute on the device, in PyCUDA's stream, which lives until `stop_torch`.

    Raises:
        RuntimeError: torch cannot use the device.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    place = torch.device(device)
    torch.cuda.set_device(place)
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle, place))  # type: ignore[no-untyped-call]
    _streams[device] = stream
    # Autograd has a thread for each device. PyCUDA's launches there need the device's context, which becomes
    # current with the first kernel that torch launches in that thread.
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device=place, requires_grad=True).mul(2).backward()  # type: ignore[no-untyped-call]


def stop_torch(device: str) -> None:
    """Make torch compute in its default stream again, and leave the other stream to its owner."""
    torch.cuda.set_stream(torch.cuda.default_stream(torch.device(device)))
    _streams.pop(device, None)


class CudaBackend(Backend):
    """The back end of 'cuda:<n>'.

    Attributes:
        stream: The stream in which a trainer computes, or a loader copies.
    """

    memory: CudaMemory

    def __init__(self, device: str) -> None:
        self.memory = CudaMemory(device)
        self.stream = self.memory.driver.Stream(NON_BLOCKING)

    def start_computing(self, config: Config) -> None:
        low_precision.configure(config)
        try:
            start_torch(self.memory.device, self.stream)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
            raise UserError(f"torch {torch.__version__} can't use {self.memory}: {error}") from error

    def speed_up(self, program: Program, config: Config) -> str:
        place = config, self.memory, self.stream
        implementations = layers.install_kernels(program.model, *place)
        implementations |= layers.install_step_kernel(program.optimizer.low_precision, *place)
        implementations["blocks"] = _enable_blocks(program, config)
        process = "loader" if config.augment_on == "loader" and config.para_load else "trainer"
        implementations["augment"] = _augmentation(config, f"{layers.INSTALLED}, in the {process}")
        implementations["upload"] = f"by the {uploader_of(config)} (upload: {config.upload})"
        program.implementations = {**program.implementations, **implementations}
        return "; ".join(
            f"{name}: {way}" for name, way in implementations.items() if layers.UNAVAILABLE in way
        )

    def stopwatch(self) -> Stopwatch:
        return StreamStopwatch(self.memory.driver.Event, self.stream)

    def open_transport(
        self, kind: str, block: Block, arena: torch.Tensor, group: Group
    ) -> tuple[Transport, str]:
        if arena.dtype != torch.float32:
            raise UserError(f"on a GPU the model's weights must be float32, not {arena.dtype}")
        if group.world.size > MOST_RANKS:
            raise UserError(
                f"devices: at most {MOST_RANKS} GPU trainers can exchange, not {group.world.size}"
            )
        assert isinstance(block, CudaBlock)
        kind, reason = self._choose(kind, group)
        makers = {"p2p": PeerTransport, "swap": SwapTransport, "staged": StagedTransport}
        return makers[kind](self.memory, self.stream, block, len(arena), group), reason

    def _choose(self, kind: str, group: Group) -> tuple[str, str]:
        """Return the kind of exchange that works here, and why."""
        if not group.pipes:
            return "p2p", ""  # a single trainer exchanges nothing
        if kind == "staged":
            return kind, "as asked"
        pairs = prove(self.memory, self.stream, group)
        problems = [pair.problem for pair in pairs if pair.problem]
        if not problems:
            slowest = min(pair.gb_per_second for pair in pairs)
            reason = f"all {len(pairs)} pairs proven, the slowest at {slowest:.0f} GB/s"
            return kind.replace("auto", "p2p"), reason
        if kind == "auto":
            return "staged", f"{problems[0]}; {iommu()}"
        raise UserError(
            f"exchange: {kind} can't be had: {problems[0]}; {iommu()}. Use exchange: auto or staged."
        )

    def make_ring(
        self,
        config: Config,
        n_slots: int,
        crop_size: tuple[int, int],
        mean: np.ndarray,
        blocks: BlockLayout | None = None,
        n_labels: int = 0,
    ) -> CudaRing:
        changes, n_colors = device_changes(config), mean.shape[2]
        raw = raw_shape(config, n_slots, mean.shape, crop_size, changes, n_labels)
        mean = mean_of_raw(config, mean, crop_size)
        size = (blocks.count, blocks.count) if blocks else crop_size
        form: tuple[Any, ...] = (
            config.batch_size,
            size,
            image_dtype(config),
            crop_size,
            n_colors,
            blocks,
            changes,
            n_labels,
        )
        if config.augment_on == "loader" and config.para_load:
            return ReadyRing(self.memory, self.stream, RingShape(n_slots, *form))
        ready = RingShape(1, *form)
        if uploader_of(config) == "trainer" and config.para_load:
            copy_stream = self.memory.driver.Stream(NON_BLOCKING)
            return UploadRing(self.memory, self.stream, raw, ready, mean, copy_stream)
        return RawRing(self.memory, self.stream, raw, ready, mean)

    def fill_directly(self, ring: Ring, reader: Reader) -> Filler:
        assert isinstance(ring, CudaRing)
        ring.filled = self.memory.events(ring.shape.n_slots)
        parts = reader, ring.shape, ring.block, ring.released, ring.filled
        return RawFiller(self.memory, self.stream, *parts)

    def receive_ring(self, trainer: Pipe, shape: RingShape, reader: Reader) -> Filler:
        block = self.memory.receive(trainer, "the ring's memory")
        if block.pci_bus_id != self.memory.pci_bus_id:
            raise UserError(
                f"{self.memory} is another device than {trainer.peer}'s, {block.pci_bus_id}. "
                "Set the same CUDA_VISIBLE_DEVICES in all processes."
            )
        released = self.memory.receive_events(trainer, "its events")
        kind: type[CudaFiller] = RawFiller if shape.dtype == "uint8" else AugmentingFiller
        filled = self.memory.shared_events(shape.n_slots)
        filler = kind(self.memory, self.stream, reader, shape, block, released, filled)
        filler.write_probe()
        self.memory.send_events(trainer, filler.filled)
        return filler


def _augmentation(config: Config, kernel: str) -> str:
    """Return where images are augmented."""
    changes = device_changes(config)
    if changes and changes.crops:
        return f"{kernel}: {changes}, mean and conversion"
    if makes_images(config):
        rest = f"{changes}, mean" if changes else "mean"
        return f"images by the loader's core, {rest} and conversion by {kernel}"
    return kernel


def _enable_blocks(program: Program, config: Config) -> str:
    """Have the augmentation kernel write images in blocks if the network takes them; return the outcome."""
    if (layout := layout_of(config)) not in _BY_BLOCKS:
        return f"images stay as they are, by conv_layout: {layout}"
    if not layers.is_asked("blocks", config):
        return f"torch, by custom_kernels: {config.custom_kernels}"
    rows, columns = program.crop_size
    if rows != columns or config.n_channels not in (None, 3):
        return "torch: the kernel makes blocks of square images with three channels"
    program.blocks, problem = blocks_for(program.model, rows, program.arena.flat)
    return layers.INSTALLED if program.blocks else f"torch: {problem}"
