"""The coordination of all trainers of all hosts: stop and save requests, sums of losses, equal replicas.

Trainers of a host exchange these through their pipes, at the first barrier of a step. Between hosts they
travel with the sum that follows that barrier.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.hosts.all_reduce import N_NUMBERS, Row
from lockstep.hosts.hierarchical import HierarchicalTransport, HostsStepBarrier
from lockstep.hosts.network import HostNetwork
from lockstep.runs.plan import RunPlan
from lockstep.sync import StepBarrier

Sums = list[float]  # loss, wrong answers, images, minibatches before a loss that is not finite

_TRIAL_ELEMENTS = 1 << 20  # of the sum that is timed: 4 MB
_N_WISHES = 3  # at the beginning of a row: stop, save, copy
_WORTH_CHANGING = 0.2  # the share of the compute time above which an exchange is worth a change of keys


@dataclass(frozen=True)
class StepReport:
    """A trainer's report at the end of a step.

    stop: It was asked to stop. save: A checkpoint is due. sums: Of its recorder, in steps in which all
    trainers have some; None otherwise. copy: A memory checkpoint is due.
    """

    stop: bool
    save: bool
    sums: Sums | None
    copy: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """The agreement of all trainers at the end of a step.

    stop, save: Whether any trainer asked for it. copy: The same; over several hosts, whether all hosts did,
    because none may be completing an earlier copy. sums: Of every trainer, or of every host; empty in steps
    without.
    """

    stop: bool = False
    save: bool = False
    sums: list[Sums] = field(default_factory=list)
    copy: bool = False


class Coordinator:
    """A trainer's view of all trainers.

    Args:
        group: The trainers of this host.
        network: To the trainers of this local rank on the other hosts; None for a run of one host.
    """

    def __init__(self, group: Group, network: HostNetwork | None) -> None:
        self._group, self.network = group, network
        self.world: World = group.everywhere
        self._cost: NetworkCost | None = None

    @classmethod
    def joined(cls, group: Group, plan: RunPlan, like: torch.Tensor) -> "Coordinator":
        """Connect to the other hosts, if any, and return the coordinator. All trainers call it.

        Args:
            group: The trainers of this host.
            plan: The run's.
            like: A tensor of the dtype and on the device of what will be exchanged.

        Raises:
            PeerProblem: A trainer has not joined; the message names it.
            UserError: The library that `network` names is not available.
        """
        if plan.host_connection is None:
            return cls(group, None)
        network = HostNetwork.join(group.everywhere, plan.host_connection, plan.config, like.device)
        coordinator = cls(group, network)
        coordinator._cost = NetworkCost(network, like.dtype, like.device, what_reduces(plan.config))
        return coordinator

    def step_barrier(self, order: Order, report: StepReport, say: Callable[[str], None]) -> StepBarrier:
        """Return the barrier of a step, with which this trainer's report travels.

        Args:
            order: The step's last minibatch.
            report: Of this trainer; in a step in which one trainer has sums, all have.
            say: Shows what this trainer is at.
        """
        if self.network is None:
            return StepBarrier(self._group, order, report, say)
        return HostsStepBarrier(_row_of_host, self._group, order, report, say)

    def outcome(self, step_barrier: StepBarrier) -> StepOutcome:
        """Return what all trainers agreed on in a step; nothing if the step ended without a barrier."""
        reports: list[StepReport] | None = step_barrier.all_payloads
        if reports is None:
            return StepOutcome()
        if isinstance(step_barrier, HostsStepBarrier):
            assert step_barrier.rows is not None, "every barrier sums over the network"
            rows = step_barrier.rows
            stops, saves, copies = zip(*(row[:_N_WISHES] for row in rows), strict=True)
            return StepOutcome(any(stops), any(saves), [row[_N_WISHES:] for row in rows], all(copies))
        sums = [report.sums for report in reports if report.sums]
        stop, save = any(report.stop for report in reports), any(report.save for report in reports)
        return StepOutcome(stop, save, sums, any(report.copy for report in reports))

    def hierarchical(self, transport: Transport, flat: torch.Tensor) -> Transport:
        """Return a transport over all hosts, made of one over this host.

        Args:
            transport: Over the blocks of this host.
            flat: This trainer's block, (n,).
        """
        return HierarchicalTransport(transport, flat, self.network) if self.network else transport

    def take_bytes(self) -> int:
        """Return the bytes sent to other hosts since the last call."""
        if self.network is None:
            return 0
        n_bytes, self.network.n_bytes = self.network.n_bytes, 0
        return n_bytes

    @property
    def has_cost(self) -> bool:
        """True until `cost` has returned its line."""
        return self._cost is not None

    def cost(self, n_bytes: float, compute_seconds: float) -> str:
        """Return, once, a line on what a step's exchange over the network costs; '' on one host.

        Args:
            n_bytes: That this trainer sends to other hosts in a step.
            compute_seconds: Of a step.
        """
        cost, self._cost = self._cost, None
        return cost.describe(n_bytes, compute_seconds) if cost else ""

    def any(self, point: str, wish: bool) -> bool:
        """Return whether any trainer has the wish. Raises PeerProblem naming one that has not arrived."""
        ours = any(self._group.all_gather(point, wish))
        return any(wish for (wish,) in self.network.gather_row([float(ours)])) if self.network else ours

    def barrier(self, point: str) -> None:
        """Wait for all trainers of this host. Raises as `any`."""
        self._group.barrier(point)

    def all_gather(self, point: str, number: float) -> list[float]:
        """Return the numbers of all trainers of this host, in rank order. Raises as `any`."""
        return self._group.all_gather(point, number)

    def sums(self, point: str, row: Row) -> Row:
        """Return the sum of all trainers' rows, element by element. Raises as `any`."""
        ours = _added(self._group.all_gather(point, row))
        return _added(self.network.gather_row(ours)) if self.network else ours

    def rows(self, point: str, row: Row) -> list[Row]:
        """Return every trainer's row, by rank; all rows have one length. Raises as `any`."""
        ours = self._group.all_gather(point, row)
        if self.network is None:
            return ours
        joined = self.network.gather_row([number for each in ours for number in each])
        n = len(row)
        return [host[first : first + n] for host in joined for first in range(0, len(host), n)]

    def concatenated(self, point: str, rows: np.ndarray) -> np.ndarray:
        """Return the rows of all trainers' tables, (n, width), one after another. Raises as `any`."""
        ours = np.concatenate(self._group.all_gather(point, rows))
        if self.network is None:
            return ours
        lengths = [int(length) for (length,) in self.network.gather_row([float(len(ours))])]
        padded = np.zeros((max(lengths), ours.shape[1]), ours.dtype)
        padded[: len(ours)] = ours
        tables = self.network.gather(torch.from_numpy(padded))
        return np.concatenate([t.cpu().numpy()[:n] for t, n in zip(tables, lengths, strict=True)])

    def of_first(self, point: str, numbers: torch.Tensor) -> torch.Tensor:
        """Return trainer 0's numbers, (n,), uint8; every trainer gives as many. Raises as `any`."""
        first, *_ = self._group.all_gather(point, None if self._group.world.rank else numbers.numpy())
        ours = torch.from_numpy(first)
        return self.network.gather(ours)[0].cpu() if self.network else ours

    def all_sums(self, point: str, sums: Sums) -> list[Sums]:
        """Return the sums of every trainer, or of every host. Raises as `any`."""
        ours = self._group.all_gather(point, sums)
        return self.network.gather_row(_sums_of_host(ours)) if self.network else ours

    @property
    def alike(self) -> Callable[[str, str], None] | None:
        """A function that compares a replica's digest over all hosts; None for a run of one host.

        Its arguments are the digest and when it was taken. It raises RuntimeError if hosts differ.
        """
        return self._compare if self.network else None

    def _compare(self, digest: str, when: str) -> None:
        assert self.network
        digests = self.network.gather(torch.tensor(list(digest.encode()), dtype=torch.uint8))
        for host, theirs in enumerate(digests):
            if not torch.equal(theirs, digests[0]):
                raise RuntimeError(f"replicas differ at {when}: host {host} has not what host 0 has")


class NetworkCost:
    """An estimate of what a sum over the network costs, timed once before the first step.

    All trainers of all hosts make one at once.

    Args:
        network: The network whose sums are timed.
        dtype: Of the values that are summed later.
        device: Of these values.
        advice: What would reduce the cost.
    """

    def __init__(self, network: HostNetwork, dtype: torch.dtype, device: torch.device, advice: str) -> None:
        self._advice = advice
        self._latency, _ = _time_sum(network, torch.zeros(1, dtype=dtype, device=device))
        seconds, n_bytes = _time_sum(network, torch.zeros(_TRIAL_ELEMENTS, dtype=dtype, device=device))
        self._seconds_per_byte = max(0.0, seconds - self._latency) / n_bytes
        network.n_bytes = 0

    def describe(self, n_bytes: float, compute_seconds: float) -> str:
        """Return a line for people. Arguments are those of `Coordinator.cost`."""
        seconds = self._latency + n_bytes * self._seconds_per_byte
        text = (
            f"network: {n_bytes / 1e6:,.2f} MB a step from each trainer take about {1e3 * seconds:,.1f} ms, "
            f"beside {1e3 * compute_seconds:,.1f} ms of compute"
        )
        if seconds <= _WORTH_CHANGING * compute_seconds:
            return text
        return f"{text}: {self._advice}"


def what_reduces(config: Config) -> str:
    """Return the keys that reduce the cost of the network, of those that go with the run's rule."""
    if config.logical_ranks is not None:
        return "a larger global_batch_size makes that a smaller share"
    if config.rule in ("local", "outer"):
        return "a larger `every` in rule_args or a larger accumulate make that less"
    if config.rule == "weights":
        return "rule: gradients, rule: local or a larger accumulate make that less"
    keys = "network_dtype: bfloat16, rule: gradients with factors: true, rule: local or a larger accumulate"
    return f"{keys} make that less"


def _time_sum(network: HostNetwork, tensor: torch.Tensor) -> tuple[float, int]:
    """Return the seconds and bytes of the second of two sums; the first one opens connections."""
    for _ in range(2):
        network.n_bytes = 0
        begin = time.perf_counter()
        network.sum([tensor], rounded=True)
        seconds = time.perf_counter() - begin
    return seconds, max(1, network.n_bytes)


def _row_of_host(reports: list[Any]) -> Row:
    """Return one row of N_NUMBERS for all reports of a host's trainers."""
    each = [(report.stop, report.save, report.copy) for report in reports]
    wishes = [float(any(column)) for column in zip(*each, strict=True)]
    return [*wishes, *_sums_of_host([report.sums for report in reports if report.sums])]


def _sums_of_host(sums: list[Sums]) -> Sums:
    """Return the sums over a host's trainers; zeros in a step in which nothing is printed."""
    if not sums:
        return [0.0] * (N_NUMBERS - _N_WISHES)
    *added, n_finite = zip(*sums, strict=True)
    return [*map(sum, added), min(n_finite)]


def _added(rows: list[Row]) -> Row:
    return [sum(column) for column in zip(*rows, strict=True)]
