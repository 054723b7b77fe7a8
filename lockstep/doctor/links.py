"""Whether GPUs reach each other's memory, and how fast trainers on them can average."""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor.report import Line, Report, failure
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.ranks import try_ranks

if TYPE_CHECKING:  # they import torch, and the doctor also speaks where that is broken
    from lockstep.backends.cuda import CudaBackend
    from lockstep.exchange.p2p import PeerTransport
    from lockstep.exchange.proof import Pair
    from lockstep.exchange.staged import StagedTransport
    from lockstep.exchange.transport import Transport

N_ELEMENTS = 4 << 20  # of each trainer's arena: 16 MiB
_ROUNDS = 5
_SECONDS = 120.0  # torch is imported from a cold disk, perhaps


@dataclass(frozen=True)
class Trial:
    """One kind of exchange: how long it took to average, or why it can't be had."""

    name: str
    milliseconds: float
    problem: str = ""


def examine(report: Report, devices: tuple[str, ...]) -> None:
    """Shows a table of all pairs, the machine's IOMMU, and the kinds of exchange, best first."""
    names = devices if len(devices) > 1 else devices * 2
    report.title("Peer to peer, GB/s: who (row) reads and writes whose memory (column), proven bit for bit")
    if len(set(names)) == 1:
        report.show(Line("note", "two processes on the one GPU: inside its memory, over no link"))
    outcomes = try_ranks(_examine, len(names), names, seconds=_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.problem:
            report.show(failure(f"{rank}: {names[rank]}", outcome.problem))
    values = [outcome.value for outcome in outcomes if not outcome.problem]
    if len(values) < len(outcomes):
        return
    pairs, iommu, _ = values[0]
    _show_pairs(report, names, pairs)
    report.show(Line("IOMMU", iommu))
    for number, trials in enumerate(zip(*(trials for _, _, trials in values), strict=False)):
        problem = "; ".join(dict.fromkeys(trial.problem for trial in trials if trial.problem))
        text = f"16 MiB of each trainer averaged in {trials[0].milliseconds:.2f} ms"
        report.show(Line(trials[0].name, problem or text, wrong=bool(problem) and number == 0))


def _show_pairs(report: Report, names: tuple[str, ...], pairs: "list[Pair]") -> None:
    cells = {(pair.rank, pair.peer): _cell(pair) for pair in pairs}
    cells.update(((rank, rank), "-") for rank in range(len(names)))
    report.show(Line("", "".join(f"{rank:>9}" for rank in range(len(names)))))
    for rank, name in enumerate(names):
        row = "".join(f"{cells.get((rank, peer), '?'):>9}" for peer in range(len(names)))
        report.show(Line(f"{rank}: {name}", row))
    for pair in pairs:
        if pair.problem:
            remedy = "turn off the IOMMU and PCIe access control (ACS) in the firmware; till then "
            text = f"{pair.problem}; {remedy if _is_tried(pair) else ''}runs go through host memory"
            report.show(Line(f"{pair.rank} -> {pair.peer}", text, wrong=_is_tried(pair)))


def _cell(pair: "Pair") -> str:
    if pair.problem:
        return "WRONG" if _is_tried(pair) else "denied"
    return f"{pair.gb_per_second:.1f}"


def _is_tried(pair: "Pair") -> bool:
    """The driver may deny access: that is how many a machine is built, and nothing wrong with it."""
    return pair.gb_per_second > 0


def _examine(
    rank: int, pipes: dict[int, Pipe], names: tuple[str, ...]
) -> "tuple[list[Pair], str, list[Trial]]":
    from lockstep.backends.cuda import CudaBackend
    from lockstep.exchange.p2p import PeerTransport
    from lockstep.exchange.proof import iommu, prove
    from lockstep.exchange.staged import StagedTransport

    backend, group = CudaBackend(names[rank]), Group.on_one_host(rank, pipes)
    pairs = prove(backend.memory, backend.stream, group)
    trials = []
    if not any(pair.problem for pair in pairs):
        trials.append(_try(PeerTransport, backend, group))
    if not any(trial.problem for trial in trials):  # else trainers are no longer in step
        trials.append(_try(StagedTransport, backend, group))
    return pairs, iommu(), trials


def _try(kind: "type[PeerTransport | StagedTransport]", backend: "CudaBackend", group: Group) -> Trial:
    memory, stream = backend.memory, backend.stream
    try:
        block = memory.allocate(4 * N_ELEMENTS, "trying the exchange")
        transport = kind(memory, stream, block, N_ELEMENTS, group)
        memory.upload(block, _values(group.world.rank))
        _step(transport, backend, group)
        found = np.empty(N_ELEMENTS, np.float32)
        memory.driver.memcpy_dtoh(found, block.pointer)
        n_wrong = sum(group.all_gather("compared", int((found != _mean(group.world.size)).sum())))
        seconds = statistics.median(_step(transport, backend, group) for _ in range(_ROUNDS))
        transport.close()
        block.close()
    except (UserError, PeerProblem, memory.driver.Error) as error:
        return Trial(kind.name, 0.0, f"trainer {group.world.rank}: {error}")
    problem = f"{n_wrong:,} numbers were averaged wrongly: please report this" if n_wrong else ""
    return Trial(kind.name, seconds * 1e3, problem)


def _step(transport: "Transport", backend: "CudaBackend", group: Group) -> float:
    """Averages as a step does, and waits for the device. Returns seconds."""
    group.barrier("ready")
    begin = time.perf_counter()
    transport.all_reduce((0, N_ELEMENTS), "mean")
    backend.stream.synchronize()
    return time.perf_counter() - begin


def _values(rank: int) -> np.ndarray:
    values: np.ndarray = np.random.default_rng(rank).random(N_ELEMENTS, np.float32)
    return values


def _mean(n_ranks: int) -> np.ndarray:
    """In the kernel's order of additions."""
    total = _values(0)
    for rank in range(1, n_ranks):
        total += _values(rank)
    return total / np.float32(n_ranks)
