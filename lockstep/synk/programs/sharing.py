"""What users share: a module of torch, or a tensor."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.synk.programs.homes import make_home
from lockstep.synk.programs.tensors import Buffers, Gradients, SharedTensor, TensorShared, Vector, Weights
from lockstep.synk.session import current_team
from lockstep.synk.shareds import make_places

_modules: weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, Weights, Gradients]] = (
    weakref.WeakKeyDictionary()
)


def share(thing: Any) -> Any:
    """See lockstep.synk.share."""
    team = current_team("share()")
    if isinstance(thing, torch.nn.Module):
        if thing not in _modules or _modules[thing][0] is not team:
            _modules[thing] = team, *_share_module(team, thing)
    elif isinstance(thing, torch.Tensor):
        if team.known.label(thing) is None:
            _check("a tensor", [thing])
            _add(team, SharedTensor(f"tensor {len(team.here.shareds)}", thing, make_home(team.here)))
    else:
        raise TypeError(f"share() takes a module or a tensor of torch, not {type(thing).__name__}")
    return thing


def vectors(module: torch.nn.Module, what: str) -> tuple[Vector, Vector]:
    """The weights and the gradients of a shared module."""
    team = current_team(what)
    if module not in _modules or _modules[module][0] is not team:
        raise ValueError(f"{what}: {type(module).__name__} is not shared: call share() on it first")
    _, weights, gradients = _modules[module]
    return weights.parts[0], gradients.parts[0]


def _share_module(team: Any, module: torch.nn.Module) -> tuple[Weights, Gradients]:
    name, params, buffers = type(module).__name__, list(module.parameters()), list(module.buffers())
    if not params:
        raise ValueError(f"share(): {name} has no parameters")
    if len(_check(name, params)) != 1:
        found = ", ".join(sorted({str(param.dtype) for param in params}))
        raise TypeError(f"share(): {name} has parameters of {found}: one dtype is needed")
    weights = Weights(f"weights of {name}", params, make_home(team.here))
    _add(team, weights)
    gradients = Gradients(f"gradients of {name}", weights, make_home(team.here))
    _add(team, gradients)
    for dtype in _check(f"a buffer of {name}", buffers):
        label = f"{str(dtype).removeprefix('torch.')} buffers of {name}"
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        _add(team, Buffers(label, alike, make_home(team.here)))
    return weights, gradients


def _check(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """The tensors' dtypes. Raises TypeError for those that can't lie in a block."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout != torch.strided:
            raise TypeError(
                f"share(): {name} is on {tensor.device}: give dense tensors on the CPU; they are moved"
            )
        try:
            torch.empty(0, dtype=tensor.dtype).numpy()
        except TypeError:
            raise TypeError(f"share(): {name} is {tensor.dtype}, a dtype that NumPy has not") from None
    return list(dict.fromkeys(tensor.dtype for tensor in tensors))


def _add(team: Any, shared: TensorShared) -> None:
    """Moves it to a place in blocks of all ranks."""
    value = shared.get()
    shared.place = make_places(team, [value.nbytes], shared.name)[0]
    known = team.known.add(shared)
    mine = known.view(team.here, team.rank, value.shape)
    mine[...] = value
    known.put(mine)
