"""Delivery of graphs and closures to the ranks.

The source is pickled, never a compiled function. Pickling a graph as a whole would recurse as deep as the
graph, so its nodes are pickled one by one in topological order by one pickler, which keeps its memo. Shared
variables are pickled as numbers and arrays out of band, and all bytes lie in one block.
"""

import functools
import io
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

from lockstep.synk import imported, pickling, settings
from lockstep.synk.blocks import ArrayLocation, arrange
from lockstep.synk.context import CommandStep, RankContext
from lockstep.synk.shareds import SharedRegistry
from lockstep.synk.team import Team


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that replaces a shared variable by its number and that of its part, e.g. a parameter."""

    def __init__(self, file: io.BytesIO, buffers: list[Any], registry: SharedRegistry) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._registry = registry
        self._kinds, self._with_settings = settings.kinds(), dict[int, Any]()
        self._with_hooks = pickling.kinds()

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if issubclass(type(obj), self._kinds):
            self._with_settings[id(obj)] = obj
        if issubclass(type(obj), self._with_hooks):
            pickling.check_hooks(obj, self._registry.name_of(obj))
        return self._registry.label(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Pickle optimizers in full, and refuse a function or class that uses state of an imported module.

        Raises:
            TypeError: Each rank would import other state.
        """
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType | type):
            name = imported.find_state(obj, self._is_state, by_value=reduced is not NotImplemented)
            if name:
                raise TypeError(
                    f"{obj.__qualname__} uses {name}, and each rank would import another one. Define the "
                    "function in the program, with what it uses, or call cloudpickle.register_pickle_by_value"
                    f"({name.rpartition('.')[0]}) before distribute()"
                )
        return pickling.reduce_optimizer(obj) if reduced is NotImplemented else reduced

    def _is_state(self, obj: Any) -> bool:
        return issubclass(type(obj), self._kinds) or self._registry.label(obj) is not None

    def explain(self, error: Exception) -> str:
        """Return the text of an error of `dump`, which names the attribute of an optimizer that caused it."""
        text = f"{type(error).__name__}: {error}"
        for obj in self.with_settings():
            name = pickling.find_unpicklable(obj, functools.partial(self._can_pickle, obj))
            if name is not None:
                kind = type(obj).__name__
                return (
                    f"attribute {name!r} of the optimizer {kind} can't be pickled: {text}. Delete it before "
                    f"distribute(), or give {kind} a __getstate__ that leaves it out"
                )
        return text

    def _can_pickle(self, owner: Any, value: Any) -> bool:
        """Return True if an attribute of an object can be pickled; the attribute may refer to the object."""
        pickler = _Pickler(io.BytesIO(), [], self._registry)
        pickler.memo = {id(owner): (0, owner)}
        try:
            pickler.dump(value)
        except Exception:  # whatever a user's __reduce__ raises
            return False
        return True

    def with_settings(self) -> list[Any]:
        """Return the pickled objects that have settings."""
        return list(self._with_settings.values())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Iterable[Any], context: RankContext) -> None:
        super().__init__(file, buffers=buffers)
        self._context = context

    def persistent_load(self, label: tuple[int, int]) -> Any:
        number, part = label
        return self._context.shareds[number].parts[part]


def pack(team: Team, pieces: Iterable[tuple[str, Any]]) -> "DeliverPrograms":
    """Pickle objects one after another into a new block.

    Args:
        pieces: A description for error messages, and the object.

    Raises:
        TypeError: An object cannot be pickled.
    """
    file = io.BytesIO()
    buffers: list[Any] = []
    pickler = _Pickler(file, buffers, team.registry)
    for what, piece in pieces:
        try:
            pickler.dump(piece)
        except Exception as error:  # whatever a user's __reduce__ raises
            raise TypeError(f"{what} can't go to the ranks: {pickler.explain(error)}") from error
    number = 0
    if objects := pickler.with_settings():
        number = next(team.numbers)
        pickler.dump(settings.receive)
        pickler.dump((number, objects))
        team.context.settings.add(number, objects)
    raw = [np.frombuffer(file.getbuffer(), np.uint8)]
    raw += [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    offsets, n_bytes = arrange(len(part) for part in raw)
    block = team.allocate(n_bytes, "functions")
    locations = []
    for part, offset in zip(raw, offsets, strict=True):
        locations.append(ArrayLocation(block, "|u1", (len(part),), offset))
        team.context.blocks.array(locations[-1])[:] = part
    return DeliverPrograms(locations[0], tuple(locations[1:]), number)


def unpack(context: RankContext, pickles: ArrayLocation, buffers: tuple[ArrayLocation, ...]) -> Iterator[Any]:
    """Yield the objects one after another. Their arrays are copies: every rank may write to its own."""
    file = io.BytesIO(context.blocks.array(pickles).tobytes())
    unpickler = _Unpickler(file, [context.blocks.array(location).copy() for location in buffers], context)
    while file.tell() < pickles.shape[0]:
        yield unpickler.load()


@dataclass(frozen=True)
class DeliverPrograms(CommandStep):
    """Step: the workers build the pickled programs.

    Each program is preceded by a function, receive(context, objects), which builds it from the next objects.

    Attributes:
        settings: Number of the group of objects with settings (settings.py); 0 if there are none.
    """

    pickles: ArrayLocation
    buffers: tuple[ArrayLocation, ...]
    settings: int

    def blocks(self) -> Iterable[int]:
        return (self.pickles.block,)

    def run(self, context: RankContext) -> None:
        if not context.is_caller:
            objects = unpack(context, self.pickles, self.buffers)
            for receive in objects:
                receive(context, objects)
