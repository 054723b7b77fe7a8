"""Gradients of fully connected layers as two factors: the layer's inputs and its output errors (`factors`).

The gradient of a weight (out, in) is errors^T inputs, a product of (n, out) and (n, in). Where a minibatch is
small beside the weight, the factors are smaller than the gradient. So trainers share factors, and each
computes the rows of the product that it updates. In Poseidon (Zhang et al. 2017, arXiv 1706.03292) every
trainer computes all rows.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.comm.group import World
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.exchange import Span, padded
from lockstep.exchange.transport import Transport
from lockstep.memory import Block
from lockstep.network import low_precision
from lockstep.network.arena import Arena, restoring


@dataclass(frozen=True)
class FactoredLayer:
    """A fully connected layer whose gradient is exchanged as factors.

    Attributes:
        name: Name of its weight (n_outputs, n_inputs).
        n_rows: Most rows of one trainer's factors in a step.
        dtype: Type of its products in training, which autocast may have lowered.
    """

    name: str
    n_outputs: int
    n_inputs: int
    n_rows: int
    dtype: torch.dtype


def factored_layers(model: nn.Module, config: Config, size: tuple[int, int]) -> list[FactoredLayer]:
    """Return the layers whose factors, summed over all trainers, are smaller than their weight.

    Empty unless `factors` is set. Layers keep their gradients if they share a weight, run several times, see
    several rows of one image, or are frozen.

    Args:
        size: Rows and columns of the model's images.
    """
    if not config.factors:
        return []
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    uses: Counter[torch.Tensor] = Counter(each for _, each in model.named_parameters(remove_duplicate=False))
    layers = []
    for module, calls in _try_out(model, config, size).items():
        n_outputs, n_inputs = module.weight.shape
        name, n_rows = names.get(id(module.weight)), sum(n for n, _ in calls)
        if name is None or uses[module.weight] > 1 or len(calls) != 1 or n_rows % _N_TRIED:
            continue
        n_rows = n_rows // _N_TRIED * config.batch_size * config.accumulate
        if _pays(config, n_rows, n_inputs, n_outputs):
            layers.append(FactoredLayer(name, n_outputs, n_inputs, n_rows, calls[0][1]))
    return layers


def _pays(config: Config, n_rows: int, n_inputs: int, n_outputs: int) -> bool:
    """Return whether factors of n_rows per trainer are smaller than the gradient.

    Between hosts, a gradient is sent and received, except for the part of one host.
    """
    of_host = len(config.devices) * n_rows * (n_inputs + n_outputs)
    if config.n_hosts > 1:
        return of_host < 2 * n_inputs * n_outputs / config.n_hosts
    return of_host < n_inputs * n_outputs


_N_TRIED = 2  # images; normalisation of a single one would have no variance


def _try_out(
    model: nn.Module, config: Config, size: tuple[int, int]
) -> dict[nn.Linear, list[tuple[int, torch.dtype]]]:
    """Return the fully connected layers that training runs: rows and dtype of each call's output."""
    calls: dict[nn.Linear, list[tuple[int, torch.dtype]]] = {}

    def record(module: nn.Linear, inputs: Any, output: torch.Tensor) -> None:
        calls.setdefault(module, []).append((output.shape[:-1].numel(), output.dtype))

    dtype, training = next(model.parameters()).dtype, model.training
    with ExitStack() as stack:
        for module in model.modules():
            if type(module) is nn.Linear:
                stack.callback(module.register_forward_hook(record).remove)
        for context in (torch.no_grad(), torch.random.fork_rng([]), restoring(model.buffers())):
            stack.enter_context(context)
        stack.enter_context(low_precision.autocast(config, torch.device("cpu")))
        model.train()(torch.zeros(_N_TRIED, config.n_channels or 3, *size, dtype=dtype))
    model.train(training)
    return calls


@dataclass(frozen=True)
class _GradientRows:
    """The rows of a layer's gradient that cover a span, and the memory (rows, in) for them."""

    number: int
    rows: slice
    out: torch.Tensor


class Factors:
    """The factors of all trainers, in one shared table.

    Where a trainer has had fewer images than the maximum, its factors end with zeros.

    Attributes:
        table: (local rank, host, n). Each trainer writes its own factors.
        spans: Spans of the arena that hold the layers' weights.
    """

    def __init__(self, layers: Sequence[FactoredLayer], arena: Arena, world: World) -> None:
        self.layers, self._arena, self._size = layers, arena, world.size
        self._numbers = {layer.name: number for number, layer in enumerate(layers)}
        n_elements = padded(sum(layer.n_rows * (layer.n_inputs + layer.n_outputs) for layer in layers))
        dtype = arena.flat.dtype
        n_bytes = self._size * n_elements * dtype.itemsize
        self.block: Block = arena.memory.allocate(n_bytes, "factors of gradients")
        self.table = self.block.tensor(dtype, (world.local_size, world.n_hosts, n_elements))
        self._of_ranks = [_views(row, layers) for host in self.table.unbind(1) for row in host]
        self._own = self._of_ranks[world.rank]
        self._of_all: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._products: dict[Span, _GradientRows] = {}
        self.spans = [arena.span_of(layer.name) for layer in layers]
        self.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def add(self, name: str, errors: torch.Tensor, inputs: torch.Tensor) -> None:
        """Append rows (n, out) and (n, in) to this trainer's factors of a weight.

        Raises:
            UserError: There are more rows than the trial before training has shown.
        """
        number = self._numbers[name]
        first, most = self._n_filled[number], self.layers[number].n_rows
        last = first + len(errors)
        if last > most:
            raise UserError(
                f"factors: {name} has had {last} rows in a step, and {most} at most when it was tried out: "
                "the network does not use it alike in every pass. Set factors: false."
            )
        for own, rows in zip(self._own[number], (errors, inputs), strict=True):
            own[first:last].copy_(rows)
        self._n_filled[number] = last

    def complete(self) -> None:
        """Zero the unused rows at the end of backward."""
        for views, n_filled in zip(self._own, self._n_filled, strict=True):
            for view in views:
                view[n_filled:].zero_()

    def clear(self) -> None:
        """Start a new step, whose factors replace these."""
        self._n_filled = [0] * len(self.layers)

    def plan(self, transport: Transport, keep: bool) -> list[Span]:
        """Return the pieces of this trainer's shards; `make` computes their gradients one at a time.

        Args:
            keep: Gives each piece memory of its own, so that all gradients exist at once, as norms need.
                Otherwise each gradient replaces the last one.
        """
        spans, first = {}, 0
        for number, layer in enumerate(self.layers):
            for span, rows in _pieces(layer, self.spans[number], transport):
                n_elements = (rows.stop - rows.start) * layer.n_inputs
                spans[span] = number, rows, first, n_elements
                first += n_elements if keep else 0
        n_most = max((first + n_elements for _, _, first, n_elements in spans.values()), default=0)
        memory = self._arena.flat.new_empty(n_most)
        for span, (number, rows, first, n_elements) in spans.items():
            out = memory[first : first + n_elements].view(-1, self.layers[number].n_inputs)
            self._products[span] = _GradientRows(number, rows, out)
        return list(spans)

    def gradient_of(self, span: Span) -> torch.Tensor:
        """Return the memory (n,) into which `make` writes the gradient of a piece."""
        product = self._products[span]
        begin = product.rows.start * self.layers[product.number].n_inputs
        first = span[0] - self.spans[product.number][0] - begin
        return product.out.view(-1)[first : first + span[1] - span[0]]

    def collect(self) -> None:
        """Concatenate the rows of all trainers in rank order, once they are in the table."""
        self._of_all = []
        for layer, *of_ranks in zip(self.layers, *self._of_ranks, strict=True):
            errors, inputs = (torch.cat(views).to(layer.dtype) for views in zip(*of_ranks, strict=True))
            self._of_all.append((errors, inputs))

    def make(self, span: Span) -> None:
        """Compute the gradient of a piece: the mean of all trainers'."""
        product = self._products[span]
        errors, inputs = self._of_all[product.number]
        columns, share = errors[:, product.rows].t(), 1 / self._size
        if errors.dtype == product.out.dtype:
            torch.addmm(product.out, columns, inputs, beta=0, alpha=share, out=product.out)
        else:
            product.out.copy_(columns @ inputs).mul_(share)


def _views(row: torch.Tensor, layers: Sequence[FactoredLayer]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of a trainer's row: errors (rows, out) and inputs (rows, in) of each layer."""
    views, first = [], 0
    for layer in layers:
        middle = first + layer.n_rows * layer.n_outputs
        last = middle + layer.n_rows * layer.n_inputs
        views.append((row[first:middle].view(layer.n_rows, -1), row[middle:last].view(layer.n_rows, -1)))
        first = last
    return views


def _pieces(layer: FactoredLayer, span: Span, transport: Transport) -> Iterator[tuple[Span, slice]]:
    """Yield the pieces of this rank's shard of a weight, cut between rows, and the rows that cover each."""
    first, last = transport.shard(span)
    n_rows = max(1, transport.chunk // layer.n_inputs) if transport.chunk else layer.n_outputs
    while first < last:
        row = (first - span[0]) // layer.n_inputs
        stop = min(last, span[0] + (row + n_rows) * layer.n_inputs)
        yield (first, stop), slice(row, -(-(stop - span[0]) // layer.n_inputs))
        first = stop
