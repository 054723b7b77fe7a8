"""Gradients of fully connected layers as factors: what went in, and what errors came back.

The gradient of a weight (out, in) is errors^T inputs, a product of (n, out) and (n, in). Where a minibatch is
small beside the weight, these are too. So trainers show each other factors, and each makes the rows of the
product that it updates. Poseidon (Zhang et al. 2017, arXiv 1706.03292) has every trainer make all rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.group import World
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT, Span
from lockstep.exchange.transport import Transport
from lockstep.memory import Block, Memory
from lockstep.network import precision
from lockstep.network.arena import Arena


@dataclass(frozen=True)
class FactoredLayer:
    """name: of a weight, (n_outputs, n_inputs). n_rows: of a trainer's factors in a step, at most.

    dtype: of its products in training, which autocast may have lowered.
    """

    name: str
    n_outputs: int
    n_inputs: int
    n_rows: int
    dtype: torch.dtype


def factored_layers(model: nn.Module, config: Config, size: int) -> list[FactoredLayer]:
    """Layers whose factors, those of all trainers, are smaller than their weight; none without `factors`.

    size: rows and columns of the model's pictures. Layers that share a weight, that are used several times or
    not for each picture by itself, and those that are not trained keep their gradients.
    """
    if not config.factors:
        return []
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    n_uses = [value for _, value in model.named_parameters(remove_duplicate=False)]
    found = []
    for module, calls in _try_out(model, config, size).items():
        n_outputs, n_inputs = module.weight.shape
        name, n_rows = names.get(id(module.weight)), sum(n for n, _ in calls)
        shared = sum(value is module.weight for value in n_uses) > 1
        if name is None or shared or len(calls) != 1 or n_rows % _N_TRIED:
            continue
        n_rows = n_rows // _N_TRIED * config.batch_size * config.accumulate
        if _pays(config, n_rows, n_inputs, n_outputs):
            found.append(FactoredLayer(name, n_outputs, n_inputs, n_rows, calls[0][1]))
    return found


def _pays(config: Config, n_rows: int, n_inputs: int, n_outputs: int) -> bool:
    """Whether factors of n_rows a trainer are smaller than what else would go: the gradient, which between
    hosts goes out and comes back, all but the part of one of them."""
    of_host = len(config.devices) * n_rows * (n_inputs + n_outputs)
    if config.hosts > 1:
        return of_host < 2 * n_inputs * n_outputs / config.hosts
    return of_host < n_inputs * n_outputs


_N_TRIED = 2  # pictures; of one, norms would have no variance


def _try_out(model: nn.Module, config: Config, size: int) -> dict[nn.Linear, list[tuple[int, torch.dtype]]]:
    """Fully connected layers that training two pictures uses: rows and type of what each call gives."""
    calls: dict[nn.Linear, list[tuple[int, torch.dtype]]] = {}

    def note(module: nn.Linear, given: Any, made: torch.Tensor) -> None:
        calls.setdefault(module, []).append((made.numel() // made.shape[-1], made.dtype))

    dtype, training = next(model.parameters()).dtype, model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) is nn.Linear:
                stack.callback(module.register_forward_hook(note).remove)
        for context in (torch.no_grad(), torch.random.fork_rng([])):
            stack.enter_context(context)
        stack.enter_context(precision.autocast(config, torch.device("cpu")))
        model.train()(torch.zeros(_N_TRIED, 3, size, size, dtype=dtype))
    model.train(training)
    for buffer, before in buffers:
        buffer.copy_(before)
    return calls


@dataclass(frozen=True)
class _Product:
    """Rows of a layer's gradient that cover a span, and where they are made: (rows, in)."""

    number: int
    rows: slice
    made: torch.Tensor


class Factors:
    """table: the factors of all trainers: (local rank, host, n). This one writes its own.

    spans: of the arena, the weights that they are for. Where a trainer has had fewer pictures than it may,
    its factors end with zeros.
    """

    def __init__(self, layers: Sequence[FactoredLayer], arena: Arena, memory: Memory, world: World) -> None:
        self.layers, self._arena, self._size = layers, arena, world.size
        self._numbers = {layer.name: number for number, layer in enumerate(layers)}
        n_elements = sum(layer.n_rows * (layer.n_inputs + layer.n_outputs) for layer in layers)
        n_elements = -(-n_elements // ALIGNMENT) * ALIGNMENT
        dtype = arena.flat.dtype
        self.block: Block = memory.allocate(self._size * n_elements * dtype.itemsize, "factors of gradients")
        self.table = self.block.tensor(dtype, (world.local_size, world.n_hosts, n_elements))
        self._of_ranks = [_views(row, layers) for host in self.table.unbind(1) for row in host]
        self._own = self._of_ranks[world.rank]
        self._of_all: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._products: dict[Span, _Product] = {}
        self.spans = [arena.span_of(layer.name) for layer in layers]
        self.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def add(self, name: str, errors: torch.Tensor, inputs: torch.Tensor) -> None:
        """Adds rows, (n, out) and (n, in), to this trainer's factors of a weight.

        Raises UserError where there are more than were to be expected.
        """
        number = self._numbers[name]
        first, most = self._n_filled[number], self.layers[number].n_rows
        last = first + len(errors)
        if last > most:
            raise UserError(
                f"factors: {name} has had {last} rows in a step, and {most} at most when it was tried out: "
                "the network does not use it alike in every pass; set factors: false"
            )
        for kept, new in zip(self._own[number], (errors, inputs), strict=True):
            kept[first:last].copy_(new)
        self._n_filled[number] = last

    def complete(self) -> None:
        """At the end of backward: what is not filled becomes zero."""
        for views, n_filled in zip(self._own, self._n_filled, strict=True):
            for view in views:
                view[n_filled:].zero_()

    def clear(self) -> None:
        """The next factors replace these."""
        self._n_filled = [0] * len(self.layers)

    def plan(self, transport: Transport, keep: bool) -> list[Span]:
        """Pieces of what this trainer updates, whose gradients `make` will be asked for.

        keep: the gradients of all pieces are there at once, for norms; else each takes the place of the last.
        """
        spans, first = {}, 0
        for number, layer in enumerate(self.layers):
            for span, rows in _pieces(layer, self.spans[number], transport):
                n_elements = (rows.stop - rows.start) * layer.n_inputs
                spans[span] = number, rows, first, n_elements
                first += n_elements if keep else 0
        n_room = max((first + n_elements for _, _, first, n_elements in spans.values()), default=0)
        room = self._arena.flat.new_empty(n_room)
        for span, (number, rows, first, n_elements) in spans.items():
            made = room[first : first + n_elements].view(-1, self.layers[number].n_inputs)
            self._products[span] = _Product(number, rows, made)
        return list(spans)

    def place(self, span: Span) -> torch.Tensor:
        """Where `make` leaves the gradient of a piece: (n,)."""
        product = self._products[span]
        first = (
            span[0]
            - self.spans[product.number][0]
            - product.rows.start * self.layers[product.number].n_inputs
        )
        return product.made.view(-1)[first : first + span[1] - span[0]]

    def collect(self) -> None:
        """When the rows of all trainers are in the table: puts them together, in rank order."""
        self._of_all = []
        for layer, *of_ranks in zip(self.layers, *self._of_ranks, strict=True):
            errors, inputs = (torch.cat(views).to(layer.dtype) for views in zip(*of_ranks, strict=True))
            self._of_all.append((errors, inputs))

    def make(self, span: Span) -> None:
        """The gradient of a piece, the mean of all trainers'."""
        product = self._products[span]
        errors, inputs = self._of_all[product.number]
        columns, share = errors[:, product.rows].t(), 1 / self._size
        if errors.dtype == product.made.dtype:
            torch.addmm(product.made, columns, inputs, beta=0, alpha=share, out=product.made)
        else:
            product.made.copy_(columns @ inputs).mul_(share)


def _views(row: torch.Tensor, layers: Sequence[FactoredLayer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer, errors (rows, out) and inputs (rows, in)."""
    found, first = [], 0
    for layer in layers:
        middle = first + layer.n_rows * layer.n_outputs
        last = middle + layer.n_rows * layer.n_inputs
        found.append((row[first:middle].view(layer.n_rows, -1), row[middle:last].view(layer.n_rows, -1)))
        first = last
    return found


def _pieces(layer: FactoredLayer, span: Span, transport: Transport) -> Iterator[tuple[Span, slice]]:
    """This rank's shard of a weight, cut between rows, and the rows that cover each piece."""
    first, last = transport.shard(span)
    n_rows = max(1, transport.chunk // layer.n_inputs) if transport.chunk else layer.n_outputs
    while first < last:
        row = (first - span[0]) // layer.n_inputs
        stop = min(last, span[0] + (row + n_rows) * layer.n_inputs)
        yield (first, stop), slice(row, -(-(stop - span[0]) // layer.n_inputs))
        first = stop
