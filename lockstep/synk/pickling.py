"""Objects of torch that torch's own pickling leaves incomplete: optimizers, and tensors with hooks.

torch need not be imported: without it, there are no such objects.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any


def kinds() -> tuple[type, ...]:
    """Return the classes for `check_hooks`, or none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    return () if torch is None else (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


def is_optimizer(obj: Any) -> bool:
    """Return whether an object is an optimizer. A module may have `param_groups`, too."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.optim.Optimizer)


def check_hooks(obj: Any, shared: str | None) -> None:
    """Raise TypeError for a hook of a tensor or a step, which torch does not pickle.

    Args:
        obj: A tensor, module or optimizer.
        shared: Name of the shared variable to which the tensor belongs, for the message.
    """
    for what, hooked in _find_hooks(obj, shared):
        if hooked:
            raise TypeError(
                f"{what} has hooks, which only this process would run. Do in the callable what they do, or "
                "register them there"
            )


def _find_hooks(obj: Any, shared: str | None) -> Iterator[tuple[str, Any]]:
    """Yield pairs for an optimizer, a tensor, or each parameter of a module: a description, and its hooks."""
    name = type(obj).__name__
    if is_optimizer(obj):
        kinds_of_hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        yield f"the optimizer {name}", any(getattr(obj, kind, None) for kind in kinds_of_hooks)
    elif hasattr(obj, "named_parameters"):
        for parameter, tensor in obj.named_parameters():
            yield f"parameter {parameter!r} of {name}", _hooks_of(tensor)
    else:
        owner = f" in {shared!r}" if shared else ""
        yield f"a tensor of shape {tuple(obj.shape)}{owner}", _hooks_of(obj)


def _hooks_of(tensor: Any) -> Any:
    """Return the hooks of a tensor, or an empty value."""
    return tensor._backward_hooks or tensor._post_accumulate_grad_hooks


def reduce_optimizer(obj: Any) -> Any:
    """Return the reduction with which a pickler pickles all attributes of an optimizer.

    torch pickles the parameter groups and the state only, and LBFGS, for instance, needs more. The `step` of
    a scheduler is left out: it counts the steps of the caller's optimizer.

    Returns:
        A tuple as of `__reduce_ex__`, or NotImplemented for other objects and for an optimizer whose class
        has its own `__getstate__`.
    """
    if not is_optimizer(obj):
        return NotImplemented
    if type(obj).__getstate__ is not sys.modules["torch"].optim.Optimizer.__getstate__:
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if len(reduced) < 3 or not isinstance(reduced[2], dict):
        return NotImplemented
    others = {
        name: value
        for name, value in vars(obj).items()
        if not name.endswith("_hooks") and not hasattr(value, "_wrapped_by_lr_sched")
    }
    return (*reduced[:2], {**others, **reduced[2]}, *reduced[3:])


def find_unpicklable(obj: Any, can_pickle: Callable[[Any], bool]) -> str | None:
    """Return the name of the attribute of an optimizer that fails first; None if torch itself pickles it."""
    reduced = reduce_optimizer(obj)
    if reduced is NotImplemented:
        return None
    failed = next((name for name, value in reduced[2].items() if not can_pickle(value)), None)
    return None if failed in obj.__getstate__() else failed
