"""The rule `outer`: as `local`, and the mean of what trainers have learned is applied with momentum.

With w_0 the weights of the last synchronization and w the mean of all trainers' now,

    d = w_0 - w      u = momentum u + d      w_0 = w_0 - learning_rate (d + momentum u)

This is Nesterov's step with d as the gradient: DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).
Each trainer stores w_0 and u of its shard only.
"""

from functools import partial
from typing import Any

import torch

from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync import StepBarrier, assembling
from lockstep.sync.local import LocalRule

KIND = "outer"  # u's name in checkpoints


class OuterRule(LocalRule):
    """Local SGD with outer momentum.

    Args:
        transport: Over the arenas of all trainers.
        arena: This trainer's.
        args: `every` and `from_epoch` as of LocalRule; `learning_rate` and `momentum` of the outer step.
    """

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena, args)
        self._rate, self._momentum = args["learning_rate"], args["momentum"]
        self._span = 0, transport.n_elements
        first, last = transport.shard(self._span)
        self._mine = min(first, arena.n_weights), min(last, arena.n_weights)
        self._start = arena.flat[slice(*self._mine)].clone()
        self._u = torch.zeros_like(self._start)

    def average(self, step_barrier: StepBarrier) -> None:
        step = partial(self._step, not self.is_exact(step_barrier.order))
        self._transport.update(self._transport, self._span, "mean", step, step_barrier)

    def state(self) -> dict[str, torch.Tensor]:
        """Return u, assembled in the arena's block, whose content is restored."""
        flat = self._arena.flat
        saved = assembling.in_host_memory(flat)
        u = assembling.assemble(self._transport, [self._span], flat, {self._mine: self._u})
        flat.copy_(saved)
        return self._arena.views(KIND, u[: self._arena.n_weights])

    def state_bytes(self) -> int:
        return self._arena.n_weights * self._arena.flat.itemsize

    def load(self, state: dict[str, torch.Tensor]) -> None:
        whole = torch.zeros(self._arena.n_weights, dtype=self._arena.flat.dtype)
        for name, view in self._arena.views(KIND, whole).items():
            if name in state:
                view.copy_(state[name])
        self._u.copy_(whole[slice(*self._mine)])

    def _step(self, outer: bool, piece: Span) -> None:
        """Take the outer step on a piece of the shard; without `outer`, keep its mean."""
        first, last = max(piece[0], self._mine[0]), min(piece[1], self._mine[1])
        if first >= last:
            return
        mine = slice(first - self._mine[0], last - self._mine[0])
        weights, start, u = self._arena.flat[first:last], self._start[mine], self._u[mine]
        if outer:
            d = start - weights
            u.mul_(self._momentum).add_(d)
            torch.sub(start, d.add_(u, alpha=self._momentum), alpha=self._rate, out=weights)
        start.copy_(weights)
