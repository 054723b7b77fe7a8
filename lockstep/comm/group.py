"""Which process this is among all that train together, and waiting for the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lockstep.comm.messages import Arrived
from lockstep.comm.pipes import Pipe, send_to_all


@dataclass(frozen=True)
class World:
    """A trainer's place among all trainers. It is handed down from the launcher, never computed again.

    rank: from 0 to size - 1. local_rank, local_size: the same among the trainers of its host. host: its
    number; every host has as many trainers, whose ranks follow each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0

    @classmethod
    def on_one_host(cls, size: int) -> "list[World]":
        """The places of `size` trainers that share a host, by rank."""
        return cls.of_host(0, 1, size)

    @classmethod
    def of_host(cls, host: int, n_hosts: int, local_size: int) -> "list[World]":
        """The places of the trainers of one of several hosts, by local rank."""
        first, size = host * local_size, n_hosts * local_size
        return [cls(first + rank, size, rank, local_size, host) for rank in range(local_size)]

    @property
    def n_hosts(self) -> int:
        return self.size // self.local_size

    def inside(self) -> "World":
        """Its place among those of its own host, as if there were no other."""
        return World(self.local_rank, self.local_size, self.local_rank, self.local_size, self.host)


class Group:
    """One process's pipes to all the others of its host, by rank. A lone process has none.

    world: its place among these. everywhere: its place among the processes of all hosts.
    """

    def __init__(self, world: World, pipes: Mapping[int, Pipe]) -> None:
        assert len(pipes) == world.local_size - 1 and world.local_rank not in pipes
        self.world, self.everywhere = world.inside(), world
        self.pipes = dict(sorted(pipes.items()))

    @classmethod
    def connected(cls, world: World, connections: Mapping[int, Connection], deadline: float) -> "Group":
        """Over connections to the other trainers of this host, by local rank.

        deadline: seconds that one waits for another.
        """
        pipes = {rank: Pipe(end, f"trainer {rank}", deadline) for rank, end in connections.items()}
        return cls(world, pipes)

    @classmethod
    def on_one_host(cls, rank: int, pipes: Mapping[int, Pipe]) -> "Group":
        """Of processes that share a host; one that has no pipes is alone."""
        return cls(World.on_one_host(len(pipes) + 1)[rank], pipes)

    def all_gather(self, point: str, payload: Any = None) -> list[Any]:
        """Everyone's payload, in rank order, own included, when all have come to `point`.

        A payload of any size goes through, but it is copied and pickled: in a step, keep it small.
        Raises PeerLost or DeadlinePassed naming the process that has not come.
        """
        send_to_all(self.pipes.values(), Arrived(point, payload))
        payloads = {self.world.rank: payload}
        for rank, pipe in self.pipes.items():
            message = pipe.receive(Arrived, f"to come to '{point}'")
            assert message.point == point, f"{pipe.peer} is at '{message.point}', not at '{point}'"
            payloads[rank] = message.payload
        return [payloads[rank] for rank in sorted(payloads)]

    def barrier(self, point: str) -> None:
        """Waits until all have come to `point`. Raises as `all_gather` does."""
        self.all_gather(point)
