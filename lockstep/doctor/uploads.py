"""Which process had better copy minibatches to a GPU (`upload`): each way beside kernels of the trainer."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor.report import Line, Report
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.ranks import try_ranks

if TYPE_CHECKING:  # they import torch, and the doctor also speaks where that is broken
    from lockstep.backends.cuda import CudaBackend

_BYTES = 8 << 20  # of a copy
_MOST_ELEMENTS = 1 << 24  # of each array that a kernel adds
_LAUNCH = 2e-4  # seconds of a kernel, if it comes to that: launching counts for little then
_TURN = 0.04  # seconds that the kernels of a round take by themselves, and the copies
_MOST_LAUNCHES = 500  # a device's queue takes about a thousand
_ROUNDS = 5
_SECONDS = 120.0  # torch is imported from a cold disk, perhaps
_CLEARLY = 1.05  # times as long: less may be chance
_WHERE = "minibatches to the device"


@dataclass(frozen=True)
class Times:
    """Seconds of kernels and of copies by themselves, and of both at once, by who copies; None: it can't."""

    kernels: float
    copies: float
    trainer: float
    loader: float | None
    problem: str = ""  # of the loader


@dataclass(frozen=True)
class Work:
    """What is asked of a device `number` times in a row, then waited for."""

    once: Callable[[], object]
    stream: Any
    number: int

    def issue(self) -> None:
        for _ in range(self.number):
            self.once()

    def do(self) -> None:
        self.issue()
        self.stream.synchronize()


def examine(report: Report, device: str) -> None:
    """Shows what both ways take on one device, and what to set. Nothing of it is wrong: one way is enough."""
    trainer, loader = try_ranks(_examine, 2, device, seconds=_SECONDS)
    report.title(f"Copies to {device} beside kernels of its trainer")
    if trainer.problem:
        report.show(Line("upload", f"not measured: {trainer.problem}"))
        return
    found: Times = trainer.value
    for line in describe(replace(found, problem=loader.problem or found.problem)):
        report.show(line)


def describe(found: Times) -> list[Line]:
    """What was measured, and what to set."""
    work = f"for {found.kernels * 1e3:.1f} ms of kernels and {found.copies * 1e3:.1f} ms of copies"
    lines = [Line("upload: trainer", f"{found.trainer * 1e3:.1f} ms {work}")]
    if found.loader is None:
        lines.append(Line("upload: loader", f"does not work here: {found.problem}"))
        return [*lines, Line("set upload to", "trainer")]
    lines.append(Line("upload: loader", f"{found.loader * 1e3:.1f} ms {work}"))
    advice = "auto, which is loader: trainer is no faster"
    if found.loader > _CLEARLY * found.trainer:
        advice = f"trainer, which is {found.loader / found.trainer:.2f} times as fast"
    return [*lines, Line("set upload to", advice)]


def _examine(rank: int, pipes: dict[int, Pipe], device: str) -> Times | None:
    """Rank 0 is the trainer, rank 1 the loader."""
    from lockstep.backends.cuda import CudaBackend

    backend, group = CudaBackend(device), Group.on_one_host(rank, pipes)
    if rank == 0:
        return _train(backend, group, pipes[1])
    _load(backend, group, pipes[0])
    return None


def _train(backend: "CudaBackend", group: Group, loader: Pipe) -> Times:
    """Computes alone, copies alone in a second stream, does both; then computes while the loader copies."""
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

    alone = _median(compute.do), _median(copy.do), _median(both)
    unlock(host)
    try:
        block.send(loader)
        loader.send(copy.number)
        together = statistics.median(_rounds(group, compute.do))
    except (UserError, PeerProblem, driver.Error) as error:
        return Times(*alone, None, str(error))
    return Times(*alone, together)


def _load(backend: "CudaBackend", group: Group, trainer: Pipe) -> None:
    """Copies from page-locked memory of its own into the trainer's block."""
    driver = backend.memory.driver
    block = backend.memory.receive(trainer, "its block")
    source, number = backend.memory.pinned(_BYTES), trainer.receive(int, "how many copies")
    once = partial(driver.memcpy_htod_async, block.pointer, source, backend.stream)
    _rounds(group, Work(once, backend.stream, number).do)
    block.close()


def _kernel(backend: "CudaBackend") -> Callable[[], object]:
    """Launches one that adds two arrays, of as many elements as take some time."""
    from lockstep.exchange.p2p import FoldKernel

    arrays = [backend.memory.allocate(4 * _MOST_ELEMENTS, "kernels beside copies") for _ in range(2)]
    kernel, addresses = FoldKernel(backend.memory, backend.stream), [array.pointer for array in arrays]

    def launch(n_elements: int) -> None:  # with a hold on the arrays, whose memory would go with them
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
    """As often as fills a turn."""
    few = Work(once, stream, 4)
    few.do()
    number = round(_TURN * few.number / _seconds(few.do))
    return Work(once, stream, max(1, min(_MOST_LAUNCHES, number)))


def _median(work: Callable[[], object]) -> float:
    """Seconds, after a warm-up."""
    work()
    return statistics.median(_seconds(work) for _ in range(_ROUNDS))


def _rounds(group: Group, work: Callable[[], object]) -> list[float]:
    """Seconds until both ranks have done their work, which they begin at once; after a warm-up."""
    found = []
    for _ in range(_ROUNDS + 1):
        group.barrier("a round")
        found.append(max(group.all_gather("took", _seconds(work))))
    return found[1:]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
