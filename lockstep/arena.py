"""The arena: weights, momenta and float buffers of one trainer in one contiguous block.

The model's parameters and buffers and the optimizer's momenta become views into it, so that training writes
where the exchange reads, and a checkpoint is a list of views. Integer buffers stay outside; every trainer
computes the same ones.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.memory import Block, Memory

ALIGNMENT = 16  # elements; every tensor starts on a cache line


class Arena:
    """Moves a model's tensors into a new block. Names are 'weights/conv1.weight', 'momenta/...',
    'buffers/...'.

    flat: the whole arena as one tensor (n,), padding between tensors zero.
    tensors: the views by name, in the order in which they lie there.
    """

    def __init__(self, model: nn.Module, memory: Memory, with_momenta: bool) -> None:
        sources = dict(_named_sources(model, with_momenta))
        dtypes = {source.dtype for source in sources.values()}
        if len(dtypes) != 1:
            raise UserError(f"the model's floating-point tensors must be of one dtype, not {dtypes}")
        dtype = dtypes.pop()
        n_elements = sum(_padded(source.numel()) for source in sources.values())
        self.block: Block = memory.allocate(n_elements * dtype.itemsize, "weights, momenta and buffers")
        self.flat = self.block.tensor(dtype, (n_elements,))
        self._spans = _spans(sources)
        self.tensors = {
            name: _view(self.flat[start:stop], sources[name]) for name, (start, stop) in self._spans.items()
        }
        for name, tensor in self.tensors.items():
            tensor.copy_(sources[name])
        self.integer_buffers: dict[str, torch.Tensor] = {}
        self._bind(model)

    def momentum(self, parameter_name: str) -> torch.Tensor:
        """The view that holds a parameter's momentum, of the parameter's shape."""
        return self.tensors[f"momenta/{parameter_name}"]

    def digests(self) -> dict[str, str]:
        """A digest of each tensor's bytes: equal digests, equal bits."""
        flat = self.flat.cpu().numpy()
        return {
            name: hashlib.blake2b(flat[start:stop].data, digest_size=8).hexdigest()
            for name, (start, stop) in self._spans.items()
        }

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint holds, by name; views, not copies. Some lie channels last."""
        return {**self.tensors, **self.integer_buffers}

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

    def _bind(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = self.tensors[f"weights/{name}"]
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                full_name = f"buffers/{prefix}.{name}".replace("/.", "/")
                if full_name in self.tensors:
                    module._buffers[name] = self.tensors[full_name]
                elif buffer is not None:
                    module._buffers[name] = self.integer_buffers[full_name] = buffer.to(self.flat.device)


def _named_sources(model: nn.Module, with_momenta: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield f"weights/{name}", parameter.detach()
    if with_momenta:
        for name, parameter in model.named_parameters():
            yield f"momenta/{name}", torch.zeros_like(parameter)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            yield f"buffers/{name}", buffer


def _spans(sources: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """The elements [start, stop) of the arena that each tensor takes."""
    spans, start = {}, 0
    for name, source in sources.items():
        spans[name] = (start, start + source.numel())
        start += _padded(source.numel())
    return spans


def _view(elements: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`elements`, (n,), in the shape of `source`, and channels last in memory where that is."""
    if source.is_contiguous():
        return elements.view(source.shape)
    assert source.is_contiguous(memory_format=torch.channels_last), "neither contiguous nor channels last"
    outputs, inputs, rows, columns = source.shape
    return elements.view(outputs, rows, columns, inputs).permute(0, 3, 1, 2)


def _padded(n_elements: int) -> int:
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
