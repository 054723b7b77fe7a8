"""The rule `outer`: as `local`, and the mean of what trainers have learned apart is taken with momentum.

With w_0 the weights of the last meeting and w the mean of all trainers' now,

    d = w_0 - w      u = momentum u + d      w_0 = w_0 - learning_rate (d + momentum u)

which is Nesterov's step with d for a gradient: DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
Each trainer keeps w_0 and u of its shard only.
"""

from typing import Any

import torch

from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync import Meeting, assembling
from lockstep.sync.local import Local

KIND = "outer"  # of u, in checkpoints


class Outer(Local):
    """args: every and from_epoch as of Local, learning_rate and momentum as above."""

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena, args)
        self._rate, self._momentum = args["learning_rate"], args["momentum"]
        self._span = 0, transport.n_elements
        first, last = transport.shard(self._span)
        self._mine = min(first, arena.n_weights), min(last, arena.n_weights)
        self._start = arena.flat[slice(*self._mine)].clone()
        self._u = torch.zeros_like(self._start)

    def average(self, meeting: Meeting) -> None:
        self._transport.update(self._transport, self._span, "mean", self._step, meeting.barrier)

    def state(self) -> dict[str, torch.Tensor]:
        """u, assembled in the arena's own block, whose content comes back."""
        flat = self._arena.flat
        kept = assembling.in_host_memory(flat)
        u = assembling.assemble(self._transport, [self._span], flat, {self._mine: self._u})
        flat.copy_(kept)
        return self._arena.views(KIND, u[: self._arena.n_weights])

    def load(self, state: dict[str, torch.Tensor]) -> None:
        whole = torch.zeros(self._arena.n_weights, dtype=self._arena.flat.dtype)
        for name, view in self._arena.views(KIND, whole).items():
            if name in state:
                view.copy_(state[name])
        self._u.copy_(whole[slice(*self._mine)])

    def _step(self, piece: Span) -> None:
        first, last = max(piece[0], self._mine[0]), min(piece[1], self._mine[1])
        if first >= last:
            return
        mine = slice(first - self._mine[0], last - self._mine[0])
        weights, start, u = self._arena.flat[first:last], self._start[mine], self._u[mine]
        if self._apart:
            d = start - weights
            u.mul_(self._momentum).add_(d)
            torch.sub(start, d.add_(u, alpha=self._momentum), alpha=self._rate, out=weights)
        start.copy_(weights)
