"""The test of each GPU in its own process: memory, kernels, torch, and the speed of copies."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep import kernels
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor.report import TRY_SECONDS, Finding, Report, failure
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.ranks import try_ranks

if TYPE_CHECKING:  # they import torch, which may be broken
    from lockstep.backends.cuda import CudaBackend

COPY_BYTES = 64 << 20
_COPIES = 4  # in a row, so that the time of the calls is negligible
_ROUNDS = 7


@dataclass(frozen=True)
class Card:
    """The result for one GPU. to_device: GB/s alone, and while all others copy too."""

    lines: list[Finding]
    to_device: tuple[float, float] | None = None


def examine(report: Report, devices: tuple[str, ...]) -> tuple[float, float] | None:
    """Test each device and show the results.

    Returns:
        GB/s from host memory to a device: of the slowest device alone, and the sum of all at once. None if
        they could not be measured.
    """
    outcomes = try_ranks(_examine, len(devices), devices, seconds=TRY_SECONDS)
    for device, outcome in zip(devices, outcomes, strict=True):
        report.title(f"Device {device}")
        if outcome.problem:
            report.show(failure("process", outcome.problem))
        for line in outcome.value.lines if outcome.value else []:
            report.show(line)
    cards: list[Card] = [outcome.value for outcome in outcomes if not outcome.problem]
    speeds = [card.to_device for card in cards if card.to_device]
    if len(speeds) < len(devices):
        return None
    return min(single for single, _ in speeds), sum(combined for _, combined in speeds)


def _examine(rank: int, pipes: dict[int, Pipe], devices: tuple[str, ...]) -> Card:
    from lockstep.backends.cuda import CudaBackend

    backend = CudaBackend(devices[rank])
    lines = [_try(name, step, backend) for name, step in _STEPS.items()]
    try:
        copies, to_device = _measure_copies(backend, Group.on_one_host(rank, pipes))
    except (UserError, PeerProblem, backend.memory.driver.Error) as error:
        at_fault = not isinstance(error, PeerProblem)
        return Card([*lines, Finding("copies", f"not measured: {error}", wrong=at_fault)])
    return Card([*lines, copies], to_device)


def _try(name: str, step: "Callable[[CudaBackend], str]", backend: "CudaBackend") -> Finding:
    try:
        return Finding(name, step(backend))
    except (UserError, RuntimeError, backend.memory.driver.Error) as error:  # RuntimeError: torch's
        return Finding(name, str(error), wrong=True)


def _describe(backend: "CudaBackend") -> str:
    memory = backend.memory
    free, total = memory.driver.mem_get_info()
    major, minor = memory.driver.Context.get_device().compute_capability()
    version = memory.driver.get_driver_version()
    return (
        f"{memory.name}, {memory.pci_bus_id}, compute capability {major}.{minor}, {free / 2**30:.1f} of "
        f"{total / 2**30:.1f} GiB free, driver for CUDA {version // 1000}.{version % 1000 // 10}"
    )


def _load_kernels(backend: "CudaBackend") -> str:
    driver = backend.memory.driver
    names = sorted(path.stem for path in kernels.HERE.glob("*.cu"))
    for name in names:
        kernels.load(driver, name)
    major, minor = driver.Context.get_device().compute_capability()
    return f"{' and '.join(names)} compiled for sm_{major}{minor} and loaded"


def _compute(backend: "CudaBackend") -> str:
    """Let torch fill PyCUDA's memory in PyCUDA's stream, and read it back with PyCUDA."""
    import torch

    from lockstep.config import Config

    backend.start_computing(Config())
    block = backend.memory.allocate(4096, "trying torch on it")
    block.tensor(torch.float32, (1024,)).fill_(7)
    backend.stream.synchronize()
    result = np.empty(1024, np.float32)
    backend.memory.driver.memcpy_dtoh(result, block.pointer)
    block.close()
    if (result != 7).any():
        raise UserError("what torch writes does not arrive in PyCUDA's memory: please report this")
    return "computes in PyCUDA's memory and stream"


_STEPS = {"device": _describe, "kernels": _load_kernels, "torch": _compute}


def _measure_copies(backend: "CudaBackend", group: Group) -> tuple[Finding, tuple[float, float]]:
    memory, stream = backend.memory, backend.stream
    host = memory.pinned(COPY_BYTES)
    block, other = (memory.allocate(COPY_BYTES, "measuring copies") for _ in range(2))
    driver, pointer = memory.driver, block.pointer

    def to_device() -> None:
        driver.memcpy_htod_async(pointer, host, stream)

    def to_host() -> None:
        driver.memcpy_dtoh_async(host, pointer, stream)

    def within() -> None:
        driver.memcpy_dtod_async(other.pointer, pointer, COPY_BYTES, stream)

    for turn in range(group.world.size):
        group.barrier(f"turn {turn}")
        if turn == group.world.rank:
            single, back, inside = (_speed(copy, driver, stream) for copy in (to_device, to_host, within))
    group.barrier("all at once")
    combined = _speed(to_device, driver, stream)
    block.close()
    other.close()
    beside = f" ({combined:.1f} while all devices copy)" if group.pipes else ""
    text = f"{single:.1f} GB/s from page-locked memory{beside}, {back:.1f} back to it, {inside:.1f} on it"
    return Finding("copies", text), (single, combined)


def _speed(copy: Callable[[], None], driver: Any, stream: Any) -> float:
    """Return the median GB/s after a warm-up."""
    milliseconds = []
    for _ in range(_ROUNDS + 1):
        begin, end = driver.Event(), driver.Event()
        begin.record(stream)
        for _ in range(_COPIES):
            copy()
        end.record(stream)
        end.synchronize()
        milliseconds.append(float(end.time_since(begin)))
    return _COPIES * COPY_BYTES / statistics.median(milliseconds[1:]) / 1e6
