"""What trainers of all hosts tell each other beside what a rule exchanges: wishes to stop or save, losses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order
from lockstep.exchange.transport import Transport
from lockstep.hosts.cost import Cost
from lockstep.hosts.network import Network
from lockstep.hosts.over import OverHosts
from lockstep.hosts.riders import N_NUMBERS, Row
from lockstep.runs.plan import Plan
from lockstep.sync import Meeting

Wishes = tuple[bool, bool]  # to stop, to save a checkpoint
Sums = list[float]  # loss, wrong answers, images, minibatches before a loss that is not finite


class _MeetingOfHosts(Meeting):
    """What all trainers of this host have said goes on with its sum over the network."""

    def __init__(self, network: Network, *of_meeting: Any) -> None:
        super().__init__(*of_meeting)
        self._network, network.rows = network, []

    def take(self, payloads: list[Any]) -> None:
        super().take(payloads)
        wishes, sums = zip(*payloads, strict=True)
        self._network.rider = [*map(float, _anyone(wishes)), *_of_host([each for each in sums if each])]


class Everyone:
    """All trainers. group: those of this host. network: to the others, None where this is the only host."""

    def __init__(self, group: Group, network: Network | None) -> None:
        self._group, self.network = group, network
        self.world: World = group.everywhere
        self._cost: Cost | None = None

    @classmethod
    def joined(cls, group: Group, plan: Plan, like: torch.Tensor) -> "Everyone":
        """When all trainers are connected. like: what they will exchange, by its dtype and device.

        Raises PeerProblem naming who has not come, UserError.
        """
        if plan.joint is None:
            return cls(group, None)
        network = Network.join(group.everywhere, plan.joint, plan.config, like.device)
        everyone = cls(group, network)
        everyone._cost = Cost(network, like.dtype, like.device)
        return everyone

    def meeting(self, name: str, wishes: Wishes, sums: Sums | None, say: Callable[[str], None]) -> Meeting:
        """The end of a step. sums: of this trainer; in a step in which one has some, all have."""
        of_meeting = self._group, name, (wishes, sums), say
        return _MeetingOfHosts(self.network, *of_meeting) if self.network else Meeting(*of_meeting)

    def told(self, meeting: Meeting) -> tuple[Wishes, list[Sums]]:
        """After a step: what somebody wishes, and the sums of all trainers, or of all hosts.

        Nothing is known where no meeting was due.
        """
        if meeting.all_payloads is None:
            return (False, False), []
        if self.network is None:
            all_wishes, all_sums = zip(*meeting.all_payloads, strict=True)
            return _anyone(all_wishes), list(all_sums)
        rows = self.network.rows
        return _anyone([(bool(row[0]), bool(row[1])) for row in rows]), [row[2:] for row in rows]

    def over_hosts(self, transport: Transport, flat: torch.Tensor) -> Transport:
        """One that reaches all hosts, of one that reaches this one. flat: this trainer's block, (n,)."""
        return OverHosts(transport, flat, self.network) if self.network else transport

    def begin_step(self, order: Order) -> None:
        """Before the backward pass of a step's first minibatch."""
        if self.network:
            self.network.begin_step(order.epoch, order.start)

    def take_bytes(self) -> int:
        """Sent to other hosts since the last call."""
        if self.network is None:
            return 0
        n_bytes, self.network.n_bytes = self.network.n_bytes, 0
        return n_bytes

    @property
    def has_cost(self) -> bool:
        """Whether `cost` has a line to tell yet."""
        return self._cost is not None

    def cost(self, n_bytes: float, compute_seconds: float) -> str:
        """Once: a line on what goes over the network in a step, beside its compute; '' where nothing does."""
        cost, self._cost = self._cost, None
        return cost.describe(n_bytes, compute_seconds) if cost else ""

    def any(self, point: str, wish: bool) -> bool:
        """Whether one of all trainers has the wish. Raises PeerProblem naming who has not come."""
        ours = any(self._group.all_gather(point, wish))
        return any(wish for (wish,) in self.network.gather_row([float(ours)])) if self.network else ours

    def sums(self, point: str, row: Row) -> Row:
        """Of all trainers' rows. Raises as `any` does."""
        ours = _added(self._group.all_gather(point, row))
        return _added(self.network.gather_row(ours)) if self.network else ours

    @property
    def alike(self) -> Callable[[str, str], None] | None:
        """Of the digest of a replica, and when it is taken: raises RuntimeError where hosts differ in it."""
        return self._compare if self.network else None

    def _compare(self, digest: str, when: str) -> None:
        assert self.network
        found = self.network.gather(torch.tensor(list(digest.encode()), dtype=torch.uint8))
        for host, theirs in enumerate(found):
            if not torch.equal(theirs, found[0]):
                raise RuntimeError(f"replicas differ at {when}: host {host} has not what host 0 has")


def _anyone(wishes: Sequence[Wishes]) -> Wishes:
    stops, saves = zip(*wishes, strict=True)
    return any(stops), any(saves)


def _added(rows: list[Row]) -> Row:
    return [sum(column) for column in zip(*rows, strict=True)]


def _of_host(sums: list[Sums]) -> Sums:
    """One row for all trainers of a host; zeros in a step in which nothing is printed."""
    if not sums:
        return [0.0] * (N_NUMBERS - 2)
    *added, n_finite = zip(*sums, strict=True)
    return [*map(sum, added), min(n_finite)]
