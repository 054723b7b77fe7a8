"""The arena: weights, the optimizer's state, float buffers and moving averages of one trainer in one
contiguous block.

The model's parameters and buffers and the optimizer's state become views into it, so that training writes
where the exchange reads, and a checkpoint is a list of views. Integers stay outside: every trainer computes
the same ones.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.memory import Block, Memory

ALIGNMENT = 16  # elements; every tensor starts on a cache line
_ROW_BYTES = 4096  # of the table of which a digest is made
_FLOATS = (torch.float32, torch.float64)


class Arena:
    """Moves a model's tensors into a new block. Names are 'weights/conv1.weight', 'momenta/...',
    'buffers/...', 'ema/...'.

    states: what the optimizer keeps for each parameter that is trained, {'momenta'} say; zero at first.
    with_ema: has exponential moving averages of weights and buffers; equal to them at first.
    flat: the whole arena as one tensor (n,), padding between tensors zero.
    tensors: the views by name, in the order in which they lie there.
    local: what is kept with them in checkpoints but not averaged: integer buffers, an optimizer's counts.
    apart: with states_apart, the optimizer's state: in host memory until a rule takes it over, each kind as
    one tensor (weights,) laid out as the weights are.
    working: with has_working, bfloat16 (n_weights,), laid out as the weights are, behind all else.
    leading: weights that lie before all others, n_leading elements with their padding.
    n_weights: elements of all weights and the padding behind them, the block's first.
    n_exchanged: elements from the first on that trainers can't compute for themselves without states: weights
    and buffers. With states_apart these come before all others.

    Raises UserError where a tensor of the model can't be averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Memory,
        states: tuple[str, ...] = (),
        with_ema: bool = False,
        states_apart: bool = False,
        leading: Sequence[str] = (),
        has_working: bool = False,
    ) -> None:
        sources = dict(_named_sources(model, () if states_apart else states))
        sources = {**{f"weights/{name}": sources[f"weights/{name}"] for name in leading}, **sources}
        self.n_leading = sum(_padded(sources[f"weights/{name}"].numel()) for name in leading)
        self.n_exchanged = sum(_padded(source.numel()) for source in sources.values())
        if with_ema:
            ours = ("weights/", "buffers/")
            averaged = {name: source for name, source in sources.items() if name.startswith(ours)}
            sources |= {f"ema/{name.partition('/')[2]}": source for name, source in averaged.items()}
        dtype = _common_dtype(sources)
        n_elements = sum(_padded(source.numel()) for source in sources.values())
        n_bytes, low = n_elements * dtype.itemsize, torch.bfloat16
        self.n_weights = sum(
            _padded(sources[name].numel()) for name in sources if name.startswith("weights/")
        )
        n_more = self.n_weights * low.itemsize if has_working else 0
        self.block: Block = memory.allocate(n_bytes + n_more, "weights, momenta and buffers")
        self.flat = self.block.tensor(dtype, (n_elements,))
        self.working = self.block.tensor(low, (self.n_weights,), n_bytes) if has_working else None
        self._spans = _spans(sources)
        self.tensors = {
            name: _view(self.flat[start:stop], sources[name]) for name, (start, stop) in self._spans.items()
        }
        for name, tensor in self.tensors.items():
            tensor.copy_(sources[name])
        self._trained = [name for name, value in model.named_parameters() if value.requires_grad]
        self.apart = {kind: torch.zeros(self.n_weights, dtype=dtype) for kind in states if states_apart}
        self._buffer_places = _buffer_places(model)
        self.local = self._move_integers(model)
        self.bind(model)

    def bind(self, model: nn.Module, weights: str = "weights", buffers: str = "buffers") -> None:
        """Makes the model use the tensors of that name: its own, or ('ema', 'ema') their averages."""
        for name, parameter in model.named_parameters():
            parameter.data = self.tensors[f"{weights}/{name}"]
        for module, key, name in self._buffer_places:
            local = self.local.get(f"buffers/{name}")
            module._buffers[key] = self.tensors[f"{buffers}/{name}"] if local is None else local

    def check_bound(self, model: nn.Module) -> None:
        """Raises UserError where a module has replaced one of its tensors, which then isn't averaged."""
        ours = {tensor.data_ptr() for tensor in self.state().values()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel() and tensor.data_ptr() not in ours:
                raise UserError(
                    f"the model's {name} has been replaced by another tensor, which trainers can't average: "
                    "change it in place (copy_, add_)"
                )

    def views(
        self, kind: str, flat: torch.Tensor, names: Iterable[str] | None = None, shift: int = 0
    ) -> dict[str, torch.Tensor]:
        """'kind/name' of each parameter that is trained: views of `flat`, laid out as the weights.

        names: of these only. shift: elements of the arena before the first of `flat`.
        """
        found = {}
        for name in self._trained if names is None else names:
            start, stop = self.span_of(name)
            found[f"{kind}/{name}"] = _view(
                flat[start - shift : stop - shift], self.tensors[f"weights/{name}"]
            )
        return found

    def views_of_all(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of `flat`, which is laid out as the whole arena, by name."""
        return {
            name: _view(flat[start:stop], self.tensors[name]) for name, (start, stop) in self._spans.items()
        }

    @property
    def buffers_span(self) -> tuple[int, int]:
        """The elements [first, last) in which the float buffers and the padding behind them lie."""
        spans = [span for name, span in self._spans.items() if name.startswith("buffers/")]
        return (spans[0][0], spans[-1][0] + _padded(spans[-1][1] - spans[-1][0])) if spans else (0, 0)

    def span_of(self, parameter_name: str) -> tuple[int, int]:
        """The elements [start, stop) of the arena in which a parameter lies."""
        return self._spans[f"weights/{parameter_name}"]

    def state_of(self, kind: str, parameter_name: str) -> torch.Tensor:
        """The view that holds what the optimizer keeps of a parameter, of the parameter's shape."""
        if kind in self.apart:
            return self.views(kind, self.apart[kind])[f"{kind}/{parameter_name}"]
        return self.tensors[f"{kind}/{parameter_name}"]

    def move_averages(self, decay: float) -> None:
        """ema = decay * ema + (1 - decay) * what weights and buffers are now."""
        weights, buffers, averages = (self._span(kind) for kind in ("weights", "buffers", "ema"))
        averages[: len(weights)].lerp_(weights, 1 - decay)
        averages[len(weights) :].lerp_(buffers, 1 - decay)

    def digests(self) -> dict[str, str]:
        """A digest of each tensor's bytes, which shows every single bit (see `_digest`)."""
        flat = self.flat.cpu().numpy()
        return {name: _digest(flat[start:stop].view(np.uint8)) for name, (start, stop) in self._spans.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, by name; views, not copies. Some lie channels last."""
        apart = [self.views(kind, flat) for kind, flat in self.apart.items()]
        return {**self.tensors, **{name: view for each in apart for name, view in each.items()}, **self.local}

    def copies_outside(self) -> dict[str, torch.Tensor]:
        """What of the state does not lie in `flat`, copied into host memory."""
        outside = {name: value for name, value in self.state().items() if name not in self.tensors}
        return {name: torch.empty_like(value, device="cpu").copy_(value) for name, value in outside.items()}

    def load(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Copies a checkpoint's tensors in.

        Raises UserError naming the first that doesn't fit; then nothing is changed.
        """
        ours = self.state()
        for name in ours.keys() | state.keys():
            if name not in state:
                raise UserError(f"{source}: is of another model: it has no '{name}'")
            if name not in ours:
                raise UserError(f"{source}: is of another model: this one has no '{name}'")
            if ours[name].shape != state[name].shape or ours[name].dtype != state[name].dtype:
                raise UserError(
                    f"{source}: is of another model: its '{name}' is {state[name].dtype} "
                    f"{tuple(state[name].shape)}, this one's is {ours[name].dtype} {tuple(ours[name].shape)}"
                )
        for name, tensor in ours.items():
            tensor.copy_(state[name])

    def _span(self, kind: str) -> torch.Tensor:
        """All tensors of one kind, and the padding behind them, as one tensor (n,); they are neighbours."""
        spans = [span for name, span in self._spans.items() if name.startswith(f"{kind}/")]
        if not spans:
            return self.flat[:0]
        return self.flat[spans[0][0] : spans[-1][0] + _padded(spans[-1][1] - spans[-1][0])]

    def _move_integers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {
            f"buffers/{name}": buffer.clone().to(self.flat.device)
            for name, buffer in model.named_buffers()
            if f"buffers/{name}" not in self.tensors
        }


def _named_sources(model: nn.Module, states: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that several modules share appears once, by its first name."""
    for name, parameter in model.named_parameters():
        yield f"weights/{name}", parameter.detach()
    for state in states:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                yield f"{state}/{name}", torch.zeros_like(parameter)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() or buffer.is_complex():
            yield f"buffers/{name}", buffer


def _common_dtype(sources: dict[str, torch.Tensor]) -> torch.dtype:
    """That of all of them. Raises UserError naming a tensor of another one."""
    if not any(name.startswith("weights/") for name in sources):
        raise UserError("the model has no parameters")
    dtype = next(iter(sources.values())).dtype
    wanted = dtype if dtype in _FLOATS else torch.float32
    for name, source in sources.items():
        if source.dtype != wanted:
            raise UserError(
                f"the model's {name} is {source.dtype}, and trainers average {wanted} only: "
                "convert it where the model is made (precision: bf16 computes in bfloat16 all the same)"
            )
    return wanted


def _buffer_places(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Every module that has a buffer, its key there, and the buffer's name (the first, of a shared one)."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    return [
        (module, key, names[id(buffer)])
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _spans(sources: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """The elements [start, stop) of the arena that each tensor takes."""
    spans, start = {}, 0
    for name, source in sources.items():
        spans[name] = (start, start + source.numel())
        start += _padded(source.numel())
    return spans


def _view(elements: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`elements`, (n,), in the shape of `source`, channels last in memory where that is, else contiguous."""
    if source.is_contiguous() or not _is_channels_last(source):
        return elements.view(source.shape)
    outputs, inputs, rows, columns = source.shape
    return elements.view(outputs, rows, columns, inputs).permute(0, 3, 1, 2)


def _is_channels_last(source: torch.Tensor) -> bool:
    return source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last)


def _digest(content: np.ndarray) -> str:
    """Of bytes, (n,), nearly as fast as memory is read; BLAKE2 of all of them takes ten times as long.

    They are laid out as a table of 64-bit numbers, of which BLAKE2 gets the sums of rows and of columns, and
    what is left behind the table. A number that differs shows in both sums, two that have changed places in
    one of them. It is for errors, not for adversaries.
    """
    in_table = len(content) // _ROW_BYTES * _ROW_BYTES
    table = content[:in_table].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(content[in_table:].data, digest_size=8)
    for axis in (0, 1):
        digest.update(table.sum(axis).data)
    return digest.hexdigest()


def _padded(n_elements: int) -> int:
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
