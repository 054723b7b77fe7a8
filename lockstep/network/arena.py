"""The arena: all weights, optimizer state, float buffers and moving averages of one trainer in one block.

The model's parameters and buffers become views into the arena, and so does the optimizer's state. Training
thus writes where the exchange reads, and a checkpoint is a list of views. Integer buffers stay outside: every
trainer computes the same ones.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.exchange import padded
from lockstep.memory import Block, Memory
from lockstep.memory.digest import digest_of

_FLOATS = (torch.float32, torch.float64)


class Arena:
    """One trainer's tensors in one contiguous block, by name: 'weights/conv1.weight', 'momenta/...'.

    Args:
        states: Kinds of optimizer state, one tensor for each trained parameter; {'momenta'} for SGD. Zero at
            first.
        with_ema: Adds exponential moving averages of weights and buffers, which start equal to them.
        states_on_host: Keeps the optimizer state in `host_states` instead of in the block.
        leading: Names of weights that lie before all others but the frozen ones.
        with_low_precision: Adds a bfloat16 copy of the weights behind everything else.
        frozen: Names of weights and buffers that no step changes. The weights lie before all others and have
            no averages; the buffers are in `local`.
        unfreezes: Whether steps change them after `unfreeze`. They then have states and averages from the
            start, and the buffers lie behind all others.

    Attributes:
        memory: Has allocated the block, and allocates other blocks on the same device.
        flat: The whole arena as one tensor (n,); padding between tensors is zero.
        tensors: The views by name, in memory order.
        local: Tensors that checkpoints hold but trainers do not average: integer buffers, frozen buffers,
            optimizer step counts.
        host_states: Kind of state to tensor (n_weights,) in host memory, laid out as the weights. A rule that
            shards the optimizer takes it over.
        low_precision: bfloat16 (n_weights,), laid out as the weights, or None.
        n_frozen: Elements of the weights that are frozen at present, with their padding.
        n_leading: Elements of the weights that never have gradients in a block: frozen for the whole run, or
            leading; with their padding.
        n_weights: Elements of all weights with their padding; they come first in the block.
        n_exchanged: Leading elements that trainers must exchange: weights, state and buffers; with
            states_on_host, weights and buffers.

    Raises:
        UserError: A tensor of the model cannot be averaged, for example because of its dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Memory,
        states: tuple[str, ...] = (),
        with_ema: bool = False,
        states_on_host: bool = False,
        leading: Sequence[str] = (),
        with_low_precision: bool = False,
        frozen: Collection[str] = (),
        unfreezes: bool = False,
    ) -> None:
        assert not (unfreezes and leading), "leading weights begin where the frozen ones end for good"
        never = () if unfreezes else frozen
        sources = dict(_named_sources(model, () if states_on_host else states, never))
        first = [name for name, _ in model.named_parameters() if name in frozen]
        in_front = {f"weights/{name}": sources[f"weights/{name}"] for name in (*first, *leading)}
        behind = _in_the_end(sources, frozen)
        between = {name: source for name, source in sources.items() if name not in behind}
        sources = {**in_front, **between, **behind}
        self.n_frozen = _count(sources[f"weights/{name}"] for name in first)
        self.n_leading = 0 if unfreezes else _count(in_front.values())
        self.n_exchanged = _count(sources.values())
        self.n_weights = _count(source for name, source in sources.items() if name.startswith("weights/"))
        if with_ema:
            sources |= _averages_of(sources, never)
        dtype, n_elements = _common_dtype(sources), _count(sources.values())
        n_bytes, low = n_elements * dtype.itemsize, torch.bfloat16
        n_more = self.n_weights * low.itemsize if with_low_precision else 0
        self.memory = memory
        self.block: Block = memory.allocate(n_bytes + n_more, "weights, momenta and buffers")
        self.flat = self.block.tensor(dtype, (n_elements,))
        self.low_precision = (
            self.block.tensor(low, (self.n_weights,), n_bytes) if with_low_precision else None
        )
        self._spans = _spans(sources)
        # `data`: else autograd takes a change of one buffer for a change of all others.
        self.tensors = {
            name: _view(self.flat[start:stop], sources[name]).data
            for name, (start, stop) in self._spans.items()
        }
        for name, tensor in self.tensors.items():
            if name.partition("/")[0] in states:
                tensor.zero_()
            else:
                tensor.copy_(sources[name])
        self._unfreezes, self._frozen = unfreezes, frozenset(frozen)
        self._trained = [name for name, value in model.named_parameters() if value.requires_grad]
        self.host_states = {
            kind: torch.zeros(self.n_weights, dtype=dtype) for kind in states if states_on_host
        }
        self.local = self._move_integers(model)
        self.bind(model)

    def bind(self, model: nn.Module, weights: str = "weights", buffers: str = "buffers") -> None:
        """Make the model use the tensors of these kinds: its own, or ('ema', 'ema') for their averages."""
        for name, parameter in model.named_parameters():
            own = self.tensors[f"weights/{name}"]
            parameter.data = self.tensors.get(f"{weights}/{name}", own)
        for name, buffer in model.named_buffers():
            local = self.local.get(f"buffers/{name}")
            buffer.data = self.tensors[f"{buffers}/{name}"] if local is None else local

    def check_bound(self, model: nn.Module) -> None:
        """Check that the model still uses the arena's tensors.

        Raises:
            UserError: A module has replaced a tensor, which trainers would then not average.
        """
        current = {tensor.data_ptr() for tensor in self.state().values()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel() and tensor.data_ptr() not in current:
                raise UserError(
                    f"the model's {name} has been replaced by another tensor, which trainers can't average. "
                    "Change it in place (copy_, add_)."
                )

    def untrained(self, model: nn.Module) -> str:
        """Return the first parameter that has a gradient now, and had none at first; '' without one."""
        named = (name for name, value in model.named_parameters() if value.requires_grad)
        return next((name for name in named if name not in self._trained), "")

    def views(
        self, kind: str, flat: torch.Tensor, names: Iterable[str] | None = None, shift: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return views of `flat` for trained parameters, as 'kind/name', laid out as the weights.

        Args:
            kind: Prefix of the names.
            flat: Tensor (n,) whose element 0 is the arena's element `shift`.
            names: Parameters to include; all trained ones by default.
        """
        views = {}
        for name in self._trained if names is None else names:
            start, stop = self.span_of(name)
            elements = flat[start - shift : stop - shift]
            views[f"{kind}/{name}"] = _view(elements, self.tensors[f"weights/{name}"])
        return views

    def views_of_all(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tensor of `flat`, which is laid out as the whole arena, by name."""
        return {
            name: _view(flat[start:stop], self.tensors[name]) for name, (start, stop) in self._spans.items()
        }

    @property
    def counts(self) -> list[torch.Tensor]:
        """The integer buffers, such as counts of steps, which trainers do not average."""
        return [value for name, value in self.local.items() if name.startswith("buffers/")]

    @property
    def buffers_span(self) -> tuple[int, int]:
        """Elements [first, last) of the float buffers and the padding behind them."""
        return self._span("buffers")

    @property
    def trained_buffers_span(self) -> tuple[int, int]:
        """Elements [first, last) of the float buffers that are not frozen at present."""
        return self._span("buffers", self._frozen)

    def span_of(self, parameter_name: str) -> tuple[int, int]:
        """Return the elements [start, stop) of the arena that hold a parameter."""
        return self._spans[f"weights/{parameter_name}"]

    def state_of(self, kind: str, parameter_name: str) -> torch.Tensor:
        """Return the view that holds one kind of optimizer state, in the parameter's shape."""
        if kind in self.host_states:
            return self.views(kind, self.host_states[kind])[f"{kind}/{parameter_name}"]
        return self.tensors[f"{kind}/{parameter_name}"]

    def unfreeze(self) -> None:
        """Have the frozen weights and buffers exchanged and averaged from now on."""
        assert self._unfreezes
        self.n_frozen, self._frozen = 0, frozenset()

    def spans_to_average(self) -> list[tuple[int, int]]:
        """Return the elements [first, last) that trained tensors have in the block, padding included.

        The mean of equal numbers may be rounded, so nothing that is frozen may be averaged.
        """
        if not (self._unfreezes and self._frozen):
            return [(self.n_frozen, len(self.flat))]
        ends: list[tuple[int, int]] = []
        for name, (start, stop) in self._spans.items():
            if name.partition("/")[2] in self._frozen:
                continue
            last = start + padded(stop - start)
            if ends and ends[-1][1] == start:
                ends[-1] = ends[-1][0], last
            else:
                ends.append((start, last))
        return ends

    def move_averages(self, decay: float) -> None:
        """Update the moving averages: ema = decay * ema + (1 - decay) * current value.

        That of an unchanged value keeps its bits.
        """
        spans = [self._span(kind) for kind in ("weights", "buffers", "ema")]
        weights, buffers, averages = (self.flat[first:last] for first, last in spans)
        weights = weights[0 if self._unfreezes else self.n_frozen :]
        averages[: len(weights)].lerp_(weights, 1 - decay)
        averages[len(weights) :].lerp_(buffers, 1 - decay)

    def restoring(self) -> AbstractContextManager[None]:
        """Restore weights, buffers and averages after the block, in which forward passes may change them."""
        kinds = ("weights/", "buffers/", "ema/")
        return restoring(each for name, each in self.state().items() if name.startswith(kinds))

    def digests(self) -> dict[str, str]:
        """Return a digest of each tensor's bytes, in which any differing bit shows."""
        flat = self.flat.cpu().numpy()
        return {
            name: digest_of(flat[start:stop].view(np.uint8)) for name, (start, stop) in self._spans.items()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors that a checkpoint holds, by name. They are views; some lie channels last."""
        on_host: dict[str, torch.Tensor] = {}
        for kind, flat in self.host_states.items():
            on_host |= self.views(kind, flat)
        return {**self.tensors, **on_host, **self.local}

    def outside(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors that do not lie in `flat`."""
        return {name: value for name, value in self.state().items() if name not in self.tensors}

    def load(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Copy a checkpoint's tensors into the arena.

        Args:
            state: Tensors by name.
            source: The checkpoint's name, for errors.

        Raises:
            UserError: A tensor is missing, unknown, or of another shape or dtype. Nothing has been changed
                then.
        """
        current = self.state()
        for name in current.keys() | state.keys():
            difference = _difference(name, current.get(name), state.get(name))
            if difference:
                raise UserError(
                    f"{source}: is of another model: {difference}. Use the model, the model_args and as many "
                    "classes as it was made with"
                )
        for name, tensor in current.items():
            tensor.copy_(state[name])

    def _span(self, kind: str, without: Collection[str] = ()) -> tuple[int, int]:
        """Return the elements [first, last) of all tensors of one kind and the padding behind them."""
        spans = [
            span
            for name, span in self._spans.items()
            if name.startswith(f"{kind}/") and name.partition("/")[2] not in without
        ]
        return (spans[0][0], spans[-1][0] + padded(spans[-1][1] - spans[-1][0])) if spans else (0, 0)

    def _move_integers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"buffers/{name}": buffer.clone().to(self.flat.device)
            for name, buffer in model.named_buffers()
            if f"buffers/{name}" not in self.tensors
        }


def _named_sources(
    model: nn.Module, states: tuple[str, ...], frozen: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors by arena name. A shared tensor appears once, by its first name.

    For the optimizer's state, which begins with zeros, that is the parameter of the same layout.
    """
    for name, parameter in model.named_parameters():
        yield f"weights/{name}", parameter.detach()
    for state in states:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield f"{state}/{name}", parameter.detach()
    for name, buffer in model.named_buffers():
        if (buffer.is_floating_point() or buffer.is_complex()) and name not in frozen:
            yield f"buffers/{name}", buffer


def _in_the_end(sources: dict[str, torch.Tensor], frozen: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the frozen buffers, then the states of frozen weights, which unfreeze later."""
    later = {name: source for name, source in sources.items() if name.partition("/")[2] in frozen}
    buffers = {name: source for name, source in later.items() if name.startswith("buffers/")}
    states = {name: s for name, s in later.items() if not name.startswith(("weights/", "buffers/"))}
    return {**buffers, **states}


def _averages_of(sources: dict[str, torch.Tensor], never: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the initial values of the moving averages: the weights and buffers, but for those of `never`."""
    names = {name: name.partition("/")[2] for name in sources if name.startswith(("weights/", "buffers/"))}
    return {f"ema/{own}": sources[name] for name, own in names.items() if own not in never}


def _common_dtype(sources: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype that all tensors share, or raise a UserError that names the first exception."""
    if not any(name.startswith("weights/") for name in sources):
        raise UserError("the model has no parameters")
    dtype = next(iter(sources.values())).dtype
    expected = dtype if dtype in _FLOATS else torch.float32
    for name, source in sources.items():
        if source.dtype != expected:
            raise UserError(
                f"the model's {name} is {source.dtype}, and trainers average {expected} only. "
                "Convert it where the model is made (precision: bf16 computes in bfloat16 all the same)."
            )
    return expected


def _spans(sources: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return the elements [start, stop) of the arena for each tensor."""
    spans, start = {}, 0
    for name, source in sources.items():
        spans[name] = (start, start + source.numel())
        start += padded(source.numel())
    return spans


def _view(elements: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Return elements (n,) in the source's shape and memory format (channels last or contiguous)."""
    is_channels_last = source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)
    if source.is_contiguous() or not is_channels_last:
        return elements.view(source.shape)
    outputs, inputs, rows, columns = source.shape
    return elements.view(outputs, rows, columns, inputs).permute(0, 3, 1, 2)


def _count(sources: Iterable[torch.Tensor]) -> int:
    """Return the elements that the tensors take in the arena, with their padding."""
    return sum(padded(source.numel()) for source in sources)


def _difference(name: str, own: torch.Tensor | None, loaded: torch.Tensor | None) -> str:
    """Return in words how a checkpoint's tensor differs from the arena's; '' if not. None: it is missing."""
    if loaded is None:
        return f"it has no '{name}'"
    if own is None:
        return f"this one has no '{name}'"
    if own.shape == loaded.shape and own.dtype == loaded.dtype:
        return ""
    theirs, ours = (f"{each.dtype} {tuple(each.shape)}" for each in (loaded, own))
    return f"its '{name}' is {theirs}, this one's is {ours}"


@contextmanager
def restoring(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Give tensors back the values after the block that they had before it."""
    before = [(each, each.clone()) for each in tensors]
    try:
        yield
    finally:
        for each, value in before:
            each.copy_(value)
