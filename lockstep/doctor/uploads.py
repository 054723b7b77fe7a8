"""The measurement for `upload`: copies of batches by the trainer or by the loader, beside kernels."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor.report import TRY_SECONDS, Finding, Report
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.ranks import try_ranks

if TYPE_CHECKING:  # they import torch, which may be broken
    from lockstep.backends.cuda import CudaBackend

_BYTES = 8 << 20  # per copy
_MOST_ELEMENTS = 1 << 24  # per array of the kernel
_LAUNCH = 2e-4  # least seconds of a kernel if possible, so that the time of launches is negligible
_TURN = 0.04  # seconds of the kernels of a round alone, and of the copies alone
_MOST_LAUNCHES = 500  # a device's queue holds about a thousand
_ROUNDS = 5
_CLEARLY = 1.05  # smaller ratios may be chance
_WHERE = "batches to the device"


@dataclass(frozen=True)
class Times:
    """Seconds of kernels alone, of copies alone, and of both at once by the copying process.

    `loader` is None if the loader can't copy, for the reason in `problem`.
    """

    kernels: float
    copies: float
    trainer: float
    loader: float | None
    problem: str = ""


@dataclass(frozen=True)
class Work:
    """An operation that is issued `number` times to a stream, which is then synchronized."""

    once: Callable[[], object]
    stream: Any
    number: int

    def issue(self) -> None:
        """Issue the operations without waiting for them."""
        for _ in range(self.number):
            self.once()

    def do(self) -> None:
        """Issue the operations and wait until they are done."""
        self.issue()
        self.stream.synchronize()


def examine(report: Report, device: str) -> None:
    """Measure both ways on one device and show which to set. None is wrong: one way is enough."""
    trainer, loader = try_ranks(measure, 2, device, seconds=TRY_SECONDS)
    report.title(f"Copies to {device} beside kernels of its trainer")
    if trainer.problem:
        report.show(Finding("upload", f"not measured: {trainer.problem}"))
        return
    times: Times = trainer.value
    for line in describe(replace(times, problem=loader.problem or times.problem)):
        report.show(line)


def describe(times: Times) -> list[Finding]:
    """Return the lines about the measurement, the last with the recommended value."""
    work = f"for {times.kernels * 1e3:.1f} ms of kernels and {times.copies * 1e3:.1f} ms of copies"
    lines = [Finding("upload: trainer", f"{times.trainer * 1e3:.1f} ms {work}")]
    if times.loader is None:
        lines.append(Finding("upload: loader", f"does not work here: {times.problem}"))
        return [*lines, Finding("set upload to", "auto, which is trainer")]
    lines.append(Finding("upload: loader", f"{times.loader * 1e3:.1f} ms {work}"))
    advice = "auto, which is trainer: loader is no faster"
    if times.trainer > _CLEARLY * times.loader:
        advice = f"loader, which is {times.trainer / times.loader:.2f} times as fast"
    return [*lines, Finding("set upload to", advice)]


def measure(rank: int, pipes: dict[int, Pipe], device: str) -> Times | None:
    """Measure on two ranks: rank 0 is the trainer, which returns the times, rank 1 the loader."""
    from lockstep.backends.cuda import CudaBackend

    backend, group = CudaBackend(device), Group.on_one_host(rank, pipes)
    if rank == 0:
        return _train(backend, group, pipes[1])
    _load(backend, group, pipes[0])
    return None


def _train(backend: "CudaBackend", group: Group, loader: Pipe) -> Times:
    """Measure kernels, copies in a second stream, both at once, and kernels while the loader copies."""
    from lockstep.memory.cuda import NON_BLOCKING
    from lockstep.memory.host import HostMemory
    from lockstep.memory.pagelock import pagelock, unlock

    memory, driver = backend.memory, backend.memory.driver
    block, host = memory.allocate(_BYTES, _WHERE), HostMemory().allocate(_BYTES, _WHERE)
    pagelock(host)
    source, beside = host.array(np.uint8, (_BYTES,)), driver.Stream(NON_BLOCKING)
    compute = _sized(_kernel(backend), backend.stream)
    copy = _sized(partial(driver.memcpy_htod_async, block.pointer, source, beside), beside)

    def both() -> None:
        copy.issue()
        compute.do()
        beside.synchronize()

    single = _median(compute.do), _median(copy.do), _median(both)
    unlock(host)
    try:
        block.send(loader)
        loader.send(copy.number)
        combined = statistics.median(_rounds(group, compute.do))
    except (UserError, PeerProblem, driver.Error) as error:
        return Times(*single, None, str(error))
    return Times(*single, combined)


def _load(backend: "CudaBackend", group: Group, trainer: Pipe) -> None:
    """Copy from the loader's page-locked memory into the trainer's block."""
    driver = backend.memory.driver
    block = backend.memory.receive(trainer, "its block")
    source, number = backend.memory.pinned(_BYTES), trainer.receive(int, "how many copies")
    once = partial(driver.memcpy_htod_async, block.pointer, source, backend.stream)
    _rounds(group, Work(once, backend.stream, number).do)
    block.close()


def _kernel(backend: "CudaBackend") -> Callable[[], object]:
    """Return a launch of a kernel that adds two arrays, long enough to take about _LAUNCH seconds."""
    from lockstep.kernels.fold import ReduceKernel

    arrays = [backend.memory.allocate(4 * _MOST_ELEMENTS, "kernels beside copies") for _ in range(2)]
    kernel, addresses = ReduceKernel(backend.memory, backend.stream), [array.pointer for array in arrays]

    def launch(n_elements: int) -> None:  # the reference keeps the memory of the arrays alive
        assert arrays
        kernel.launch(addresses, addresses[:1], (0, n_elements), "mean")

    n_elements = 1 << 14
    while n_elements < _MOST_ELEMENTS:
        once = Work(partial(launch, n_elements), backend.stream, 1)
        once.do()
        if _seconds(once.do) > _LAUNCH:
            break
        n_elements *= 2
    return partial(launch, n_elements)


def _sized(once: Callable[[], object], stream: Any) -> Work:
    """Return the work repeated to take about _TURN seconds."""
    few = Work(once, stream, 4)
    few.do()
    number = round(_TURN * few.number / _seconds(few.do))
    return Work(once, stream, max(1, min(_MOST_LAUNCHES, number)))


def _median(work: Callable[[], object]) -> float:
    """Return the median seconds after a warm-up."""
    work()
    return statistics.median(_seconds(work) for _ in range(_ROUNDS))


def _rounds(group: Group, work: Callable[[], object]) -> list[float]:
    """Return seconds per round in which both ranks start together and finish, after a warm-up."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        group.barrier("a round")
        seconds.append(max(group.all_gather("took", _seconds(work))))
    return seconds[1:]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
