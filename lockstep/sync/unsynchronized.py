"""The base of the rules whose replicas differ even after a synchronization: `elastic` and `gossip`.

Such a run still has one answer: the centre or the mean. The arenas hold it in validation and in checkpoints.
Checkpoints also hold each replica, as 'replica<rank>/...'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.network.arena import Arena
from lockstep.sync.assembling import in_host_memory
from lockstep.sync.local import LocalRule


class UnsynchronizedRule(LocalRule):
    """A rule with a second block (`_buffer`) as large as the arena, and a transport over these blocks.

    Arguments are those of LocalRule.
    """

    equal = False
    n_copies = 1  # of the arena, in the second block

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any]) -> None:
        super().__init__(transport, arena, args)
        self._world, self._whole = transport.group.world, (0, transport.n_elements)
        self._block = arena.memory.allocate(self.n_copies * arena.flat.nbytes, "the exchange of replicas")
        self._buffer = self._block.tensor(arena.flat.dtype, (self.n_copies * len(arena.flat),))
        self._buffer_transport = transport.another(self._block, self._buffer)
        self._buffer_transport.clock = transport.clock
        self._own: torch.Tensor | None = None

    def answer(self) -> torch.Tensor:
        """Return what the arenas hold in validation and checkpoints: equal in all ranks, who call it at once.

        Here it is the mean of all replicas. The tensor is valid until the next exchange.
        """
        mean = self._buffer[: len(self._arena.flat)]
        mean.copy_(self._arena.flat)
        self._buffer_transport.all_reduce(self._whole, "mean")
        return mean

    @contextmanager
    def averaged(self) -> Iterator[None]:
        answer = self.answer()
        self._own = self._arena.flat.clone()
        self._arena.flat.copy_(answer)
        try:
            yield
        finally:
            self._arena.flat.copy_(self._own)
            self._own = None

    def state(self) -> dict[str, torch.Tensor]:
        assert self._own is not None, "checkpoints are written inside `averaged`"
        tensors: dict[str, torch.Tensor] = {}
        span: Span = 0, len(self._own)
        for rank in range(self._world.size):
            self._buffer[slice(*span)].copy_(self._own)
            self._buffer_transport.broadcast(span, rank)
            views = self._arena.views_of_all(in_host_memory(self._buffer)[slice(*span)])
            tensors |= {f"replica{rank}/{name}": view.clone() for name, view in views.items()}
        return tensors

    def state_bytes(self) -> int:
        return self._world.size * self._arena.flat.nbytes

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Restore this rank's replica if there is one for each trainer; else keep what the arenas hold."""
        replicas = {name.partition("/")[0] for name in state if name.startswith("replica")}
        if len(replicas) == self._world.size:
            for name, tensor in self._arena.tensors.items():
                tensor.copy_(state[f"replica{self._world.rank}/{name}"])

    def promise(self, config: Config, model: nn.Module) -> str:
        return super().promise(config, model) + ", and replicas are never equal"

    def close(self) -> None:
        self._buffer_transport.close()
        self._block.close()
