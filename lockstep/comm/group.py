"""A process's rank among all trainers, and its group: all-gather and barrier over pipes."""

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lockstep.comm.messages import Arrived
from lockstep.comm.pipes import Pipe, send_to_all


@dataclass(frozen=True)
class World:
    """A trainer's rank among all trainers. The launcher computes it once and passes it on.

    Attributes:
        rank: From 0 to size - 1. The ranks of a host's trainers are consecutive.
        size: The number of trainers; every host has as many.
        local_rank: The rank among the trainers of its host.
        local_size: The number of trainers of its host.
        host: The rank of its host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0

    @classmethod
    def on_one_host(cls, size: int) -> "list[World]":
        """Return the worlds of `size` trainers that share a host, by rank."""
        return cls.of_host(0, 1, size)

    @classmethod
    def of_host(cls, host: int, n_hosts: int, local_size: int) -> "list[World]":
        """Return the worlds of the trainers of one of several hosts, by local rank."""
        first, size = host * local_size, n_hosts * local_size
        return [cls(first + rank, size, rank, local_size, host) for rank in range(local_size)]

    @property
    def n_hosts(self) -> int:
        """The number of hosts."""
        return self.size // self.local_size

    def inside(self) -> "World":
        """Return its world among the trainers of its own host, as if there were no other host."""
        return World(self.local_rank, self.local_size, self.local_rank, self.local_size, self.host)


class Group:
    """One process's pipes to all other processes of its host.

    Args:
        world: This process among the processes of all hosts.
        pipes: By local rank; a lone process has none.

    Attributes:
        world: This process among those of its host.
        everywhere: This process among those of all hosts.
        pipes: As above, in rank order.
    """

    def __init__(self, world: World, pipes: Mapping[int, Pipe]) -> None:
        assert len(pipes) == world.local_size - 1 and world.local_rank not in pipes
        self.world, self.everywhere = world.inside(), world
        self.pipes = dict(sorted(pipes.items()))

    @classmethod
    def connected(cls, world: World, connections: Mapping[int, Connection], deadline: float) -> "Group":
        """Return a group over connections to the other trainers of this host.

        Args:
            world: This trainer among the trainers of all hosts.
            connections: By local rank.
            deadline: Seconds that one waits for another.
        """
        pipes = {rank: Pipe(end, f"trainer {rank}", deadline) for rank, end in connections.items()}
        return cls(world, pipes)

    @classmethod
    def on_one_host(cls, rank: int, pipes: Mapping[int, Pipe]) -> "Group":
        """Return a group of processes that share a host: this one and those that the pipes lead to."""
        return cls(World.on_one_host(len(pipes) + 1)[rank], pipes)

    def all_gather(self, point: str, payload: Any = None) -> list[Any]:
        """Return all processes' payloads, in rank order, this one's included, when all have arrived.

        Args:
            point: The name of the barrier; it must be the same in all processes.
            payload: Of any size. It is copied and pickled, so keep it small in a step.

        Raises:
            PeerLost: A process has exited; the message names it.
            DeadlinePassed: A process has not arrived in time; the message names it.
        """
        send_to_all(self.pipes.values(), Arrived(point, payload))
        payloads = {self.world.rank: payload}
        for rank, pipe in self.pipes.items():
            message = pipe.receive(Arrived, f"to come to '{point}'")
            assert message.point == point, f"{pipe.peer} is at '{message.point}', not at '{point}'"
            payloads[rank] = message.payload
        return [payloads[rank] for rank in sorted(payloads)]

    def barrier(self, point: str) -> None:
        """Wait until all processes have arrived at `point`. Raises as `all_gather`."""
        self.all_gather(point)
