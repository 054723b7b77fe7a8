"""Views whose gradients would be wrong after a shape has changed in place.

After each write into an array, also after one that changes a shape only, autograd makes the array's views
anew. It takes ordinary tensors from their places in memory, but those of a subclass by the functions that
made them. These functions do not know a `t_` that has come later: such a view is stale.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from lockstep.errors import UserError
from lockstep.flow import placement

_FEW = 16  # references that are kept without looking whether their views exist
# Torch itself refuses the gradients of such a view after a write.
_SQUEEZES = "squeeze_", "unsqueeze_"


class Views:
    """The views of one memory that still exist."""

    __slots__ = ("_look_at", "_references")

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._look_at = _FEW

    def __iter__(self) -> Iterator[Any]:
        return iter([view for reference in self._references if (view := reference()) is not None])

    def add(self, views: Iterable[Any]) -> None:
        """Add views, and drop references to those that no longer exist."""
        if len(self._references) >= self._look_at:
            self._references = [reference for reference in self._references if reference() is not None]
            self._look_at = max(_FEW, 2 * len(self._references))
        self._references += map(weakref.ref, views)


def note_views(name: str, source: Any, made: Sequence[Any]) -> None:
    """Note the views that an operation has made of an array, unless autograd does not know them."""
    if not torch.is_grad_enabled() or name.startswith(("detach", "unsafe_", "_unsafe_")):
        return
    memory = source.memory
    if memory.views is None:
        memory.views = Views()
    memory.views.add(made)
    if memory.stale is not None and any(source is view for view in memory.stale):
        memory.stale.add(made)


def begin_change_of_shape(name: str, array: Any) -> None:
    """Note that an operation changes the shape of an array in place.

    Raises:
        UserError: The gradients of a view would be wrong.
    """
    if name == "squeeze_" and 1 not in array.shape:
        return
    memory = array.memory
    stale = [view for view in memory.views or () if view._base is array]
    if any(view.requires_grad for view in stale):
        _refuse(name, "an array that has views")
    if array._base is not None and name not in _SQUEEZES:
        if array.requires_grad and not torch.is_grad_enabled():
            _refuse(name, "a view while gradients are off")
        stale = [array]
    if stale:
        memory.stale = memory.stale or Views()
        memory.stale.add(stale)
    placement.note_place(array)


def _refuse(name: str, what: str) -> NoReturn:
    new = f"make a new view ({name.removesuffix('_')})"
    raise UserError(f"{placement.user_line()}: {name} of {what}, whose gradients would be wrong: {new}")


def check_write(name: str, written: Any, inputs: Sequence[Any], changes_shape: bool = False) -> None:
    """Raise UserError if an operation on these inputs makes a stale view anew that needs gradients."""
    for view in written.memory.stale or ():
        gets_gradient = torch.is_grad_enabled() and any(array.requires_grad for array in inputs)
        if (view.requires_grad or gets_gradient) and not (changes_shape and view is written):
            raise UserError(
                f"{placement.user_line()}: {name} writes the memory of a view of shape {tuple(view.shape)} "
                "that has changed its shape in place, so that its gradients would be wrong: make a new view "
                "there (view.t() and not view.t_())"
            )
