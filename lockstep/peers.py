"""The other trainers of a run, and meeting them."""

from collections.abc import Mapping
from typing import Any

from lockstep.messages import Meet
from lockstep.pipes import Pipe


class Peers:
    """One trainer's pipes to all the others, keyed by rank. A lone trainer has none, and meets itself."""

    def __init__(self, rank: int, pipes: Mapping[int, Pipe]) -> None:
        self.rank = rank
        self.pipes = dict(sorted(pipes.items()))

    @property
    def n_trainers(self) -> int:
        return len(self.pipes) + 1

    def meet(self, point: str, payload: Any = None) -> list[Any]:
        """Waits until every trainer has come to `point`; returns their payloads in rank order, own included.

        Raises PeerLost or DeadlinePassed naming the trainer that has not come.
        """
        for pipe in self.pipes.values():
            pipe.send(Meet(point, payload))
        payloads = {self.rank: payload}
        for rank, pipe in self.pipes.items():
            message = pipe.receive(Meet, f"to meet at '{point}'")
            assert message.point == point, f"{pipe.peer} is at '{message.point}', not at '{point}'"
            payloads[rank] = message.payload
        return [payloads[rank] for rank in sorted(payloads)]
