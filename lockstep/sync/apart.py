"""What rules share whose replicas differ between meetings and after them: `elastic` and `gossip`.

What such a run answers with is one set of tensors all the same, the centre or the mean: in validation and in
checkpoints the arenas hold that. Checkpoints hold each replica beside it, as 'replica<rank>/...'.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.arena import Arena
from lockstep.sync.assembling import in_host_memory
from lockstep.sync.local import Local


class Apart(Local):
    """There is a second block as large as the arena (`_place`, over which `_among` is), for exchanging."""

    equal = False
    n_copies = 1  # of the arena, that the second block has room for

    def __init__(self, transport: Transport, arena: Arena, args: dict[str, Any], memory: Memory) -> None:
        super().__init__(transport, arena, args)
        self._world, self._whole = transport.group.world, (0, transport.n_elements)
        self._block = memory.allocate(self.n_copies * arena.flat.nbytes, "the exchange of replicas")
        self._place = self._block.tensor(arena.flat.dtype, (self.n_copies * len(arena.flat),))
        self._among = transport.another(self._block, self._place)
        self._among.clock = transport.clock
        self._own: torch.Tensor | None = None

    def answer(self) -> torch.Tensor:
        """What the arenas hold in validation and checkpoints; alike in all ranks, who call it at once."""
        return self.mean()

    def mean(self) -> torch.Tensor:
        """Of all replicas, until the next exchange."""
        mean = self._place[: len(self._arena.flat)]
        mean.copy_(self._arena.flat)
        self._among.all_reduce(self._whole, "mean")
        return mean

    @contextmanager
    def as_one(self) -> Iterator[None]:
        answer = self.answer()
        self._own = self._arena.flat.clone()
        self._arena.flat.copy_(answer)
        yield
        self._arena.flat.copy_(self._own)
        self._own = None

    def state(self) -> dict[str, torch.Tensor]:
        assert self._own is not None, "checkpoints are written as one"
        found: dict[str, torch.Tensor] = {}
        span: Span = 0, len(self._own)
        for rank in range(self._world.size):
            self._place[slice(*span)].copy_(self._own)
            self._among.broadcast(span, rank)
            views = self._arena.views_of_all(in_host_memory(self._place)[slice(*span)])
            found |= {f"replica{rank}/{name}": view.clone() for name, view in views.items()}
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """With as many replicas as trainers each goes on with its own; else all with what the arenas hold."""
        replicas = {name.partition("/")[0] for name in state if name.startswith("replica")}
        if len(replicas) == self._world.size:
            for name, tensor in self._arena.tensors.items():
                tensor.copy_(state[f"replica{self._world.rank}/{name}"])

    def promise(self, config: Config, model: nn.Module) -> str:
        return super().promise(config, model) + ", and replicas are never equal"

    def close(self) -> None:
        self._among.close()
        self._block.close()
