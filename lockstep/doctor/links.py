"""The test whether GPUs reach each other's memory, and how fast trainers on them can average."""

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor.report import TRY_SECONDS, Finding, Report, failure
from lockstep.errors import PeerProblem, UserError
from lockstep.launch.ranks import try_ranks

if TYPE_CHECKING:  # they import torch, which may be broken
    from lockstep.backends.cuda import CudaBackend
    from lockstep.exchange.p2p import PeerTransport
    from lockstep.exchange.proof import Pair
    from lockstep.exchange.staged import StagedTransport
    from lockstep.exchange.transport import Transport

N_ELEMENTS = 4 << 20  # of each trainer's arena: 16 MiB
_ROUNDS = 5


@dataclass(frozen=True)
class Trial:
    """One kind of exchange: the time of an average, or the reason why it can't be used."""

    name: str
    milliseconds: float
    problem: str = ""


def examine(report: Report, devices: tuple[str, ...]) -> None:
    """Show a table of all pairs, the machine's IOMMU, and the kinds of exchange, best first."""
    names = devices if len(devices) > 1 else devices * 2
    report.title("Peer to peer, GB/s: who (row) reads and writes whose memory (column), proven bit for bit")
    if len(set(names)) == 1:
        report.show(Finding("note", "two processes on the one GPU: inside its memory, over no link"))
    outcomes = try_ranks(_examine, len(names), names, seconds=TRY_SECONDS)
    for rank, outcome in enumerate(outcomes):
        if outcome.problem:
            report.show(failure(f"{rank}: {names[rank]}", outcome.problem))
    values = [outcome.value for outcome in outcomes if not outcome.problem]
    if len(values) < len(outcomes):
        return
    pairs, iommu, _ = values[0]
    _show_pairs(report, names, pairs)
    report.show(Finding("IOMMU", iommu))
    for number, trials in enumerate(zip(*(trials for _, _, trials in values), strict=False)):
        problem = "; ".join(dict.fromkeys(trial.problem for trial in trials if trial.problem))
        text = f"16 MiB of each trainer averaged in {trials[0].milliseconds:.2f} ms"
        report.show(Finding(trials[0].name, problem or text, wrong=bool(problem) and number == 0))


def _show_pairs(report: Report, names: tuple[str, ...], pairs: "list[Pair]") -> None:
    cells = {(pair.rank, pair.peer): _cell(pair) for pair in pairs}
    cells.update(((rank, rank), "-") for rank in range(len(names)))
    report.show(Finding("", "".join(f"{rank:>9}" for rank in range(len(names)))))
    for rank, name in enumerate(names):
        row = "".join(f"{cells.get((rank, peer), '?'):>9}" for peer in range(len(names)))
        report.show(Finding(f"{rank}: {name}", row))
    for pair in pairs:
        if pair.problem:
            remedy = "turn off the IOMMU and PCIe access control (ACS) in the firmware; till then "
            text = f"{pair.problem}; {remedy if _is_tried(pair) else ''}runs go through host memory"
            report.show(Finding(f"{pair.rank} -> {pair.peer}", text, wrong=_is_tried(pair)))


def _cell(pair: "Pair") -> str:
    if pair.problem:
        return "WRONG" if _is_tried(pair) else "denied"
    return f"{pair.gb_per_second:.1f}"


def _is_tried(pair: "Pair") -> bool:
    """Return whether a pair is tested. A driver that denies access is common and not wrong."""
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
    if not any(trial.problem for trial in trials):  # after a problem the trainers are no longer synchronized
        trials.append(_try(StagedTransport, backend, group))
    return pairs, iommu(), trials


def _try(kind: "type[PeerTransport | StagedTransport]", backend: "CudaBackend", group: Group) -> Trial:
    memory, stream = backend.memory, backend.stream
    try:
        block = memory.allocate(4 * N_ELEMENTS, "trying the exchange")
        transport = kind(memory, stream, block, N_ELEMENTS, group)
        memory.upload(block, _values(group.world.rank))
        _step(transport, backend, group)
        result = np.empty(N_ELEMENTS, np.float32)
        memory.driver.memcpy_dtoh(result, block.pointer)
        n_wrong = sum(group.all_gather("compared", int((result != _mean(group.world.size)).sum())))
        seconds = statistics.median(_step(transport, backend, group) for _ in range(_ROUNDS))
        transport.close()
        block.close()
    except (UserError, PeerProblem, memory.driver.Error) as error:
        return Trial(kind.name, 0.0, f"trainer {group.world.rank}: {error}")
    problem = f"{n_wrong:,} numbers were averaged wrongly: please report this" if n_wrong else ""
    return Trial(kind.name, seconds * 1e3, problem)


def _step(transport: "Transport", backend: "CudaBackend", group: Group) -> float:
    """Average as a step does, wait for the device, and return the seconds."""
    group.barrier("ready")
    begin = time.perf_counter()
    transport.all_reduce((0, N_ELEMENTS), "mean")
    backend.stream.synchronize()
    return time.perf_counter() - begin


def _values(rank: int) -> np.ndarray:
    values: np.ndarray = np.random.default_rng(rank).random(N_ELEMENTS, np.float32)
    return values


def _mean(n_ranks: int) -> np.ndarray:
    """Return the expected mean, with the kernel's order of additions."""
    total = _values(0)
    for rank in range(1, n_ranks):
        total += _values(rank)
    return total / np.float32(n_ranks)
