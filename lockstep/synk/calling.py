"""One rank's part of a call: excerpts of inputs and stored rows, slices, and the fold of what they give."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.synk import rows
from lockstep.synk.blocks import Span
from lockstep.synk.commands import Meeting
from lockstep.synk.folded import Folded
from lockstep.synk.results import RankPart

if TYPE_CHECKING:
    from lockstep.synk.here import Here

Parts = list[tuple[int, int]]


@dataclass(frozen=True)
class Given:
    """An input of one call: where it lies, and whether its rows are those of the batch."""

    span: Span
    minibatch: bool


@dataclass(frozen=True)
class Call:
    """Step: every rank calls the program on its rows.

    rows: of the whole, a slice or where row numbers lie; None where no input is divided. stored: what batch_s
    chooses, by rank: a slice, or where row numbers or a mask lie; None for all rows. outputs: those asked
    for.
    """

    program: int
    inputs: tuple[Given, ...]
    rows: slice | Span | None
    stored: tuple[slice | Span | None, ...]
    n_slices: int
    outputs: tuple[int, ...]
    writes_to_others: ClassVar[bool] = False

    def blocks(self) -> Iterable[int]:
        spans = [given.span for given in self.inputs]
        spans += [at for at in (self.rows, *self.stored) if isinstance(at, Span)]
        return {span.block for span in spans}

    def run(self, here: "Here") -> Generator[Meeting, Any, RankPart]:
        return _Part(self, here).compute()
        yield  # a step is a generator, also where it meets nobody


class _Part:
    """This rank's part."""

    def __init__(self, call: Call, here: "Here") -> None:
        self._call, self._here = call, here
        self._program = here.programs[call.program]
        self._arrays = [here.blocks.array(given.span) for given in call.inputs]
        self._chosen, self._first = self._choose_rows()
        self._stored = self._choose_stored()

    def compute(self) -> RankPart:
        program, n_rows = self._program, self._count_rows()
        for shared in program.updated:
            shared.rows = n_rows
        if n_rows == 0:
            return RankPart(0, [None] * len(self._call.outputs))
        n_slices = self._call.n_slices
        parts = [rows.share(n_rows, number, n_slices) for number in range(n_slices)]
        parts = [(first, last) for first, last in parts if last > first]
        if n_slices == 1:
            with self._stored_rows(*parts[0]):
                outputs = program.call_whole(self._excerpt(*parts[0]))
            return RankPart(n_rows, self._for_caller([outputs[i] for i in self._call.outputs]))
        return RankPart(n_rows, self._for_caller(self._call_in_slices(parts, n_rows)))

    def _choose_rows(self) -> tuple[rows.Choice | None, int]:
        """Which rows of the whole are this rank's, and the number of the first in the batch."""
        at = self._call.rows
        if at is None:
            return None, 0
        chosen = self._here.blocks.array(at) if isinstance(at, Span) else at
        first, last = rows.share(rows.count(chosen), self._here.rank, self._here.size)
        return rows.part(chosen, first, last), first

    def _choose_stored(self) -> list[rows.Choice]:
        at = self._call.stored[self._here.rank] if self._call.stored else None
        batch = self._here.blocks.array(at) if isinstance(at, Span) else at
        choices = []
        for shared in self._program.sliceable:
            what = f"{self._program.name}, rank {self._here.rank}: batch_s in {shared.name!r}"
            choices.append(rows.choose(batch, shared.shape[0], what))
        return choices

    def _count_rows(self) -> int:
        """How many rows this rank has; 1 where none are divided. Raises ValueError where they differ."""
        counts = {
            shared.name: rows.count(c)
            for shared, c in zip(self._program.sliceable, self._stored, strict=True)
        }
        if self._chosen is not None:
            counts["its inputs"] = rows.count(self._chosen)
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{number} of {name}" for name, number in counts.items())
            raise ValueError(
                f"{self._program.name}: rank {self._here.rank} has unequal numbers of rows: {found}"
            )
        return next(iter(counts.values())) if counts else 1

    def _excerpt(self, first: int, last: int) -> list[Any]:
        """The inputs for rows first to last of this rank's."""
        choices: list[rows.Choice | None] = []
        for given, spec in zip(self._call.inputs, self._program.inputs, strict=True):
            if spec.whole:
                choices.append(None)
            elif given.minibatch:
                choices.append(slice(self._first + first, self._first + last))
            else:
                assert self._chosen is not None
                choices.append(rows.part(self._chosen, first, last))
        return self._program.excerpt(self._arrays, choices)

    @contextmanager
    def _stored_rows(self, first: int, last: int) -> Iterator[None]:
        """Gives the program the chosen stored rows as its variables' values; the old values come back."""
        stored = [(shared, shared.keep()) for shared in self._program.sliceable]
        try:
            for (shared, kept), choice in zip(stored, self._stored, strict=True):
                chosen = rows.part(choice, first, last)
                if not isinstance(chosen, slice) or chosen != slice(0, shared.shape[0]):
                    shared.show(kept, chosen)
            yield
        finally:
            for shared, kept in stored:
                shared.restore(kept)

    def _call_in_slices(self, parts: Parts, n_rows: int) -> list[Any]:
        """Every part starts from the values before; the variables get the fold of what the parts gave."""
        program, name = self._program, self._program.name
        before = {shared: shared.get() for shared in program.updated}
        outputs = [program.folded(i, n_rows) for i in self._call.outputs]
        updates = {s: Folded(mode, n_rows, f"{name}: {s.name!r}") for s, mode in program.updated.items()}
        try:
            for first, last in parts:
                for shared, value in before.items():
                    shared.put(value.copy())
                marks = program.marks()
                with self._stored_rows(first, last):
                    results = program.call_part(self._excerpt(first, last))
                program.check_marks(marks)
                for folded, i in zip(outputs, self._call.outputs, strict=True):
                    folded.add(results[i], last - first)
                for shared, folded in updates.items():
                    folded.add(shared.get(), last - first)
        finally:
            for shared, value in before.items():
                shared.put(value)
        for shared, mode in program.updated.items():
            folded_value = updates[shared].result()
            shared.assign(folded_value[-1] if mode is None else folded_value)
        return [folded.result() for folded in outputs]

    def _for_caller(self, outputs: list[Any]) -> list[Any]:
        if self._here.is_caller:
            return outputs
        modes = self._program.output_modes
        return [
            value if modes[i] is not None else None
            for i, value in zip(self._call.outputs, outputs, strict=True)
        ]
