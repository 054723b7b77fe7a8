"""Sharing of a program's modules and tensors, and the vectors that stand for modules in collectives."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.synk.slots import find_memory, make_slots
from lockstep.synk.storage import make_storage
from lockstep.synk.team import Team
from lockstep.synk.tensors import (
    SharedBuffers,
    SharedGradients,
    SharedTensor,
    SharedWeights,
    TensorShared,
    Vector,
)

# With references to teams that do not keep them in use: the functions of a team hold its modules.
_Places = dict[tuple[int, str], str]  # the buffers of a module: id of the layer, and the name there
_Variables = tuple[SharedWeights, SharedGradients, list[SharedBuffers], _Places]
_Shared = tuple[weakref.ref[Team], _Variables]
_modules: weakref.WeakKeyDictionary[torch.nn.Module, _Shared] = weakref.WeakKeyDictionary()


def share(team: Team, thing: Any) -> Any:
    """Share a module or tensor; see lockstep.synk.share."""
    with team.exclusive_call("share()"):
        _share(team, thing)
    return thing


def _share(team: Team, thing: Any) -> None:
    if isinstance(thing, torch.nn.Module):
        if _find(team, thing) is None:
            _modules[thing] = weakref.ref(team), _share_module(team, thing)
    elif isinstance(thing, torch.Tensor):
        if team.registry.label(thing) is None:
            _check("a tensor", [thing])
            if name := _owner(find_memory(team), thing):
                raise ValueError(f"share(): a tensor is a view of {name!r}. Make the view in the callable")
            _add(team, SharedTensor(f"tensor {len(team.context.shareds)}", thing, make_storage(team.context)))
    else:
        raise TypeError(f"share() takes a module or a tensor of torch, not {type(thing).__name__}")


def vectors(team: Team, module: torch.nn.Module, what: str) -> tuple[Vector, Vector]:
    """Return a shared module's weights and gradients; `what` names the call in errors."""
    weights, gradients, *_ = _variables(team, module, what)
    return weights.parts[0], gradients.parts[0]


def buffers(team: Team, module: torch.nn.Module) -> list[Vector]:
    """Return a shared module's buffers, a vector for each dtype."""
    *_, shareds, places = _variables(team, module, "buffers()")
    _check_buffers(module, places)
    return [shared.parts[0] for shared in shareds]


def _variables(team: Team, module: torch.nn.Module, what: str) -> _Variables:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"{what} takes a module, not {type(module).__name__}: give collectives the tensor. To reduce its "
            "gradient, share a module that has it (torch.nn.ParameterList)"
        )
    found = _find(team, module)
    if found is None:
        raise ValueError(f"{what}: {type(module).__name__} is not shared: call share() on it first")
    return found


def _check_buffers(module: torch.nn.Module, known: _Places) -> None:
    """Raise ValueError if the module has got a buffer since it was shared."""
    added = next((name for place, name in _places(module).items() if place not in known), None)
    if added is not None:
        raise ValueError(
            f"{type(module).__name__} has got the buffer {added!r} since it was shared, which is in no "
            "vector, and which the ranks may lack. Register it before share()"
        )


def _find(team: Team, module: torch.nn.Module) -> _Variables | None:
    """Return the variables of a module that is shared in this team, else None."""
    if module not in _modules:
        return None
    owner, variables = _modules[module]
    if owner() is not team:
        return None
    parameters = list(module.parameters())
    if [id(parameter) for parameter in parameters] != [id(parameter) for parameter in variables[0].params]:
        raise ValueError(
            f"{type(module).__name__} has other parameters than when it was shared, which the ranks lack. "
            "Change their values instead: load_state_dict without assign=True"
        )
    return variables


def _share_module(team: Team, module: torch.nn.Module) -> _Variables:
    name, params, buffers = type(module).__name__, list(module.parameters()), list(module.buffers())
    if not params:
        raise ValueError(f"share(): {name} has no parameters")
    _check_unshared(team, name, [*params, *buffers])
    if len(_check(name, params)) != 1:
        dtypes = ", ".join(sorted({str(param.dtype) for param in params}))
        raise TypeError(f"share(): {name} has parameters of {dtypes}: one dtype is needed")
    dtypes_of_buffers = _check(f"a buffer of {name}", buffers)
    _check_separate(name, [*params, *buffers])  # the last check: what is shared now stays shared
    weights = SharedWeights(f"weights of {name}", params, make_storage(team.context))
    _add(team, weights)
    gradients = SharedGradients(f"gradients of {name}", weights, make_storage(team.context))
    _add(team, gradients)
    vectors_of_buffers = []
    for dtype in dtypes_of_buffers:
        label = f"{str(dtype).removeprefix('torch.')} buffers of {name}"
        alike = [buffer for buffer in buffers if buffer.dtype == dtype]
        shared = SharedBuffers(label, alike, make_storage(team.context))
        shared.add_owners(module.modules())
        _add(team, shared)
        vectors_of_buffers.append(shared)
    return weights, gradients, vectors_of_buffers, _places(module)


def _places(module: torch.nn.Module) -> _Places:
    """Return the places of a module's buffers, with their names in the module."""
    return {
        (id(layer), name): f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        for name, buffer in layer._buffers.items()
        if buffer is not None
    }


def _check_unshared(team: Team, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if a tensor belongs to another shared variable, which would lose its memory."""
    memory = find_memory(team)
    for tensor in tensors:
        if other := team.registry.name_of(tensor) or _owner(memory, tensor):
            raise ValueError(
                f"share(): {name} has a tensor of shape {tuple(tensor.shape)} in common with {other!r}, "
                "which is shared already. Share one module that has all of them"
            )


def _owner(memory: dict[range, str], tensor: torch.Tensor) -> str | None:
    """Return the name of the shared variable whose memory a tensor has, e.g. as a view."""
    address = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return next((name for slot, name in memory.items() if address in slot), None)


def _check_separate(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if two tensors lie in one memory (`a.data = b.data`), which sharing would separate."""
    tensors = sorted((tensor for tensor in tensors if tensor.numel()), key=torch.Tensor.data_ptr)
    arrays = [tensor.detach().numpy() for tensor in tensors]
    if any(np.shares_memory(*pair) for pair in itertools.pairwise(arrays)):
        raise ValueError(
            f"share(): tensors of {name} lie in the same memory. Make them one object: "
            "module.a.weight = module.b.weight"
        )


def _check(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Return the tensors' dtypes; raise TypeError for tensors that cannot lie in a block."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.layout != torch.strided:
            kind = f"on {tensor.device}" if tensor.layout == torch.strided else tensor.layout
            raise TypeError(f"share(): {name} is {kind}: give dense tensors on the CPU; they are moved")
        if tensor.is_conj() or tensor.is_neg():
            raise TypeError(f"share(): {name} is a conjugate view: give tensor.resolve_conj().resolve_neg()")
        if tensor.is_inference():  # with other memory, torch could neither slice nor train it
            raise TypeError(f"share(): {name} was made in inference_mode: make it, or clone() it, outside")
        try:
            torch.empty(0, dtype=tensor.dtype, device="cpu").numpy()
        except TypeError:
            raise TypeError(f"share(): {name} is {tensor.dtype}, a dtype that NumPy lacks") from None
    return list(dict.fromkeys(tensor.dtype for tensor in tensors))


def _add(team: Team, shared: TensorShared) -> None:
    """Register a variable, and move it to a slot in blocks of all ranks."""
    value = shared.get()
    shared.slot = make_slots(team, [value.nbytes], shared.name)[0]
    registered = team.registry.add(shared)
    mine = registered.view(team.context.blocks, team.rank, value.shape)
    mine[...] = value
    registered.put(mine)
