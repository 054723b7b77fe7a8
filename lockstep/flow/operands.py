"""The arguments of a torch operation, taken apart."""

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.flow.arrays import Array
from lockstep.flow.recipes import Kind, Slot, fill, fill_names


class Operands:
    """Tensors, and a template with a Slot for each. key: equal for what gives equal shapes."""

    def __init__(self, kind: Kind, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
        self._loose = kind.loose
        self.template = [self._take(part, place) for place, part in enumerate(args)]
        self.keywords = {name: self._take(part, name) for name, part in keywords.items()}
        self.key += keywords
        self.arrays = [tensor for tensor in self.tensors if type(tensor) is Array]

    def _take(self, part: Any, place: int | str) -> Any:
        kind = type(part)
        if kind is Array or isinstance(part, torch.Tensor):
            self.tensors.append(part)
            self.key += (part.size(), part.dtype)
            if part.layout is torch.strided:
                self.key.append(part.stride())
            return Slot(len(self.tensors) - 1)
        if kind is list or kind is tuple:
            self.key.append(len(part))
            return [self._take(each, place) for each in part]
        if kind is torch.Generator:
            return part  # it gives a seed, and has no part in shapes
        self.key.append(kind if kind in (int, float) and place in self._loose else (kind, part))
        return part

    def at(self, place: int | str) -> list[Any]:
        """The tensors of one argument."""
        if isinstance(place, str):
            part = self.keywords.get(place)
        else:
            part = self.template[place] if place < len(self.template) else None
        parts = part if type(part) is list else [part]
        return [self.tensors[each.number] for each in parts if type(each) is Slot]

    def run(self, function: Any) -> Any:
        return function(*fill(self.template, self.tensors), **fill_names(self.keywords, self.tensors))
