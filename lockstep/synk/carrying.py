"""Graphs and closures on their way to the ranks.

What the user wrote goes over, never a compiled function. Pickling a graph as a whole recurses as deep as the
graph is, so its nodes go one by one, in topological order, through one pickler, whose memory stays from one
to the next. Shared variables go as numbers, arrays out of band, and all of it in one block.
"""

import io
import pickle
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import numpy as np

from lockstep.synk.blocks import Span, align
from lockstep.synk.commands import Meeting
from lockstep.synk.shareds import Known

if TYPE_CHECKING:
    from lockstep.synk.here import Here
    from lockstep.synk.team import Team


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Shared variables go as numbers: of the variable, and of its part (a parameter of a module, say)."""

    def __init__(self, file: io.BytesIO, buffers: list[Any], known: Known) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._known = known

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        return self._known.label(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Iterable[Any], here: "Here") -> None:
        super().__init__(file, buffers=buffers)
        self._here = here

    def persistent_load(self, label: tuple[int, int]) -> Any:
        number, part = label
        return self._here.shareds[number].parts[part]


def pack(team: "Team", pieces: Iterable[tuple[str, Any]]) -> "Carry":
    """Pickles objects one after another into a new block.

    pieces: what each is, for errors, and the object. Raises TypeError for one that can't be pickled.
    """
    file = io.BytesIO()
    buffers: list[Any] = []
    pickler = _Pickler(file, buffers, team.known)
    for what, piece in pieces:
        try:
            pickler.dump(piece)
        except Exception as error:  # whatever a user's __reduce__ raises
            raise TypeError(f"{what} can't go to the ranks: {type(error).__name__}: {error}") from error
    raw = [np.frombuffer(file.getbuffer(), np.uint8)]
    raw += [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    block = team.allocate(max(1, sum(align(len(part)) for part in raw)), "functions")
    spans, offset = [], 0
    for part in raw:
        spans.append(Span(block, "|u1", (len(part),), offset))
        team.here.blocks.array(spans[-1])[:] = part
        offset += align(len(part))
    return Carry(spans[0], tuple(spans[1:]))


def unpack(here: "Here", pickles: Span, buffers: tuple[Span, ...]) -> Iterator[Any]:
    """The objects, one after another. Their arrays lie in the block."""
    file = io.BytesIO(here.blocks.array(pickles).tobytes())
    unpickler = _Unpickler(file, [here.blocks.array(span) for span in buffers], here)
    while file.tell() < pickles.shape[0]:
        yield unpickler.load()


@dataclass(frozen=True)
class Carry:
    """Step: the workers make the programs that are packed here.

    For each there is a function, and what follows is for that function: receive(here, objects).
    """

    pickles: Span
    buffers: tuple[Span, ...]
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        return (self.pickles.block,)

    def run(self, here: "Here") -> Generator[Meeting, Any, None]:
        if not here.is_caller:
            objects = unpack(here, self.pickles, self.buffers)
            for receive in objects:
                receive(here, objects)
        return
        yield  # a step is a generator, also where it meets nobody
