"""The steps of a call: each rank selects rows, computes in slices, and reduces the slices' results.

Large outputs that a rank holds on its GPU are then reduced on the devices where possible, or copied to host
memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.synk import rows
from lockstep.synk.blocks import ArrayLocation
from lockstep.synk.context import CommandStep, RankContext
from lockstep.synk.results import REDUCE_OPS, DeviceOutput, PartReducer, RankPart, fractions, unpack
from lockstep.synk.shareds import Shared, sync_objects
from lockstep.synk.team import Team


@dataclass(frozen=True)
class CallInput:
    """An input of one call: its location, and whether its rows are those of the batch."""

    location: ArrayLocation
    minibatch: bool
    is_copy: bool  # copied from an array for this call, and not the user's Data


@dataclass(frozen=True)
class Call(CommandStep):
    """Step: every rank calls the program on its rows.

    Attributes:
        program: Number of the program.
        rows: Rows of the inputs: a slice, or the location of row numbers; None if no input is divided.
        stored: The choice of batch_s for each rank: a slice, or the location of row numbers or of a mask;
            None for all rows.
        outputs: Numbers of the requested outputs.
        settings: Settings for the workers, or None to leave theirs as they are (settings.py).
        torch_settings: The caller's settings of torch (torch_settings.py); None for a graph.
    """

    program: int
    inputs: tuple[CallInput, ...]
    rows: slice | ArrayLocation | None
    stored: tuple[slice | ArrayLocation | None, ...]
    n_slices: int
    outputs: tuple[int, ...]
    settings: bytes | None
    torch_settings: Any

    def blocks(self) -> Iterable[int]:
        locations = [call_input.location for call_input in self.inputs]
        locations += [at for at in (self.rows, *self.stored) if isinstance(at, ArrayLocation)]
        return {location.block for location in locations}

    def run(self, context: RankContext) -> RankPart:
        if self.settings is not None and not context.is_caller:
            context.settings.apply(self.settings)
        with context.programs[self.program].use_settings(self.torch_settings):
            try:
                return _Part(self, context).compute()
            finally:  # a buffer may be a view of an input now, and the next call overwrites that
                sync_objects(context.shareds.values())


class _Part:
    """The part of a call that one rank performs."""

    def __init__(self, call: Call, context: RankContext) -> None:
        self._call, self._context = call, context
        self._program = context.programs[call.program]
        self._arrays = [context.blocks.array(call_input.location) for call_input in call.inputs]
        self._chosen, self._first = self._choose_rows()
        self._stored = self._choose_stored()

    def compute(self) -> RankPart:
        program, n_rows = self._program, self._count_rows()
        for shared in program.updated:
            shared.rows = n_rows
        if n_rows == 0:
            return RankPart(0, [None] * len(self._call.outputs))
        slices = rows.cut_into_slices(n_rows, self._call.n_slices)
        if self._call.n_slices == 1:
            with self._stored_rows(*slices[0]):
                inputs = self._excerpt(*slices[0])
                outputs = program.call_whole(inputs)
            self._check_unwritten(inputs)
            return RankPart(n_rows, self._for_caller([outputs[i] for i in self._call.outputs]))
        return RankPart(n_rows, self._for_caller(self._call_in_slices(slices, n_rows)))

    def _choose_rows(self) -> tuple[rows.Choice | None, int]:
        """Return this rank's rows of the inputs, and the index of the first of them in the batch."""
        at = self._call.rows
        if at is None:
            return None, 0
        chosen = self._context.blocks.array(at) if isinstance(at, ArrayLocation) else at
        first, last = rows.divide(rows.count(chosen), self._context.rank, self._context.size)
        return rows.part(chosen, first, last), first

    def _choose_stored(self) -> list[rows.Choice]:
        at = self._call.stored[self._context.rank] if self._call.stored else None
        batch = self._context.blocks.array(at) if isinstance(at, ArrayLocation) else at
        choices = []
        for shared in self._program.sliceable:
            what = f"{self._program.name}, rank {self._context.rank}: batch_s in {shared.name!r}"
            choices.append(rows.choose(batch, shared.shape[0], what))
        return choices

    def _count_rows(self) -> int:
        """Return this rank's number of rows, 1 if nothing is divided; raise ValueError if they differ."""
        counts = {
            shared.name: rows.count(c)
            for shared, c in zip(self._program.sliceable, self._stored, strict=True)
        }
        if self._chosen is not None:
            counts["its inputs"] = rows.count(self._chosen)
        if len(set(counts.values())) > 1:
            described = ", ".join(f"{number} of {name}" for name, number in counts.items())
            raise ValueError(
                f"{self._program.name}: rank {self._context.rank} has unequal numbers of rows: {described}"
            )
        return next(iter(counts.values())) if counts else 1

    def _excerpt(self, first: int, last: int) -> list[Any]:
        """Return the inputs for this rank's rows [first, last)."""
        choices: list[rows.Choice | None] = []
        for call_input, spec in zip(self._call.inputs, self._program.inputs, strict=True):
            if spec.whole:
                choices.append(None)
            elif call_input.minibatch:
                choices.append(slice(self._first + first, self._first + last))
            else:
                assert self._chosen is not None
                choices.append(rows.part(self._chosen, first, last))
        return self._program.excerpt(self._arrays, choices)

    def _check_unwritten(self, inputs: list[Any]) -> None:
        """Raise RuntimeError if the program wrote into memory that other ranks or later calls read."""
        for number in self._program.find_written(inputs):
            call_input, spec = self._call.inputs[number], self._program.inputs[number]
            is_view = spec.whole or call_input.minibatch or isinstance(self._chosen, slice)
            if is_view and (spec.whole or not call_input.is_copy):
                raise RuntimeError(
                    f"{self._program.name} writes into its input {spec.name or number}, which other ranks or "
                    "later calls read, and has changed it. Make a copy first: x = x.clone()"
                )

    @contextmanager
    def _stored_rows(self, first: int, last: int) -> Iterator[None]:
        """Make the chosen stored rows the values of the program's variables inside of the `with` block."""
        stored = [(shared, shared.save()) for shared in self._program.sliceable]
        try:
            for (shared, saved), choice in zip(stored, self._stored, strict=True):
                chosen = rows.part(choice, first, last)
                if not isinstance(chosen, slice) or chosen != slice(0, shared.shape[0]):
                    shared.select_rows(saved, chosen)
            yield
        finally:
            for shared, saved in stored:
                shared.restore(saved)

    def _call_in_slices(self, slices: list[tuple[int, int]], n_rows: int) -> list[Any]:
        """Compute slice by slice, each from the variables' old values, and assign the reduced new values."""
        program, name = self._program, self._program.name
        before = {shared: (shared.get(), shared.parts_without_value()) for shared in program.updated}
        missing: dict[Shared, list[frozenset[int]]] = {shared: [] for shared in program.updated}
        outputs = [program.make_reducer(i, n_rows) for i in self._call.outputs]
        updates = {s: PartReducer(mode, n_rows, f"{name}: {s.name!r}") for s, mode in program.updated.items()}
        try:
            for first, last in slices:
                for shared, (value, absent) in before.items():
                    shared.put(value.copy())
                    shared.set_parts_without_value(absent)
                with self._stored_rows(first, last):
                    versions = program.versions()
                    inputs = self._excerpt(first, last)
                    results = program.call_part(inputs)
                    program.check_unchanged(versions)
                self._check_unwritten(inputs)
                for reducer, i in zip(outputs, self._call.outputs, strict=True):
                    reducer.add(results[i], last - first)
                for shared, reducer in updates.items():
                    reducer.add(shared.get(), last - first)
                    missing[shared].append(shared.parts_without_value())
        finally:
            for shared, (value, absent) in before.items():
                shared.put(value)
                shared.set_parts_without_value(absent)
        for shared, mode in program.updated.items():
            reduced, counted = updates[shared].result(), missing[shared][-1 if mode is None else 0 :]
            new = reduced[-1] if mode is None else reduced
            shared.check_shape(new.shape)
            shared.assign(new)
            shared.set_parts_without_value(frozenset.intersection(*counted))
        return [reducer.result() for reducer in outputs]

    def _for_caller(self, outputs: list[Any]) -> list[Any]:
        if self._context.is_caller:
            return outputs
        modes = self._program.output_modes
        return [
            value if modes[i] is not None else None
            for i, value in zip(self._call.outputs, outputs, strict=True)
        ]


@dataclass(frozen=True)
class ReduceDeviceOutput(CommandStep):
    """Step: reduce output `number` of the last call on the ranks' GPUs, and return it in the caller.

    Attributes:
        weights: Weight of each rank in a mean; None for equal weights and for other modes.
    """

    number: int
    mode: str
    weights: tuple[float, ...] | None

    def run(self, context: RankContext) -> np.ndarray | None:
        assert context.gpu is not None
        weight = None if self.weights is None else self.weights[context.rank]
        reduced = context.gpu.outputs.reduce(self.number, REDUCE_OPS[self.mode], weight)
        return context.gpu.fetch(reduced) if context.is_caller else None


@dataclass(frozen=True)
class FetchDeviceOutputs(CommandStep):
    """Step: copy outputs of the last call to host memory: their numbers, each with the ranks that hold it."""

    outputs: tuple[tuple[int, tuple[int, ...]], ...]

    def run(self, context: RankContext) -> RankPart:
        assert context.gpu is not None
        fetch, rank = context.gpu.outputs.fetch, context.rank
        return RankPart(0, [fetch(number) if rank in ranks else None for number, ranks in self.outputs])


def collect_device_outputs(
    team: Team, call: Call, modes: Sequence[str | None], parts: list[RankPart]
) -> tuple[list[RankPart], dict[int, np.ndarray]]:
    """Reduce the outputs that the ranks hold on GPUs, or fetch them where they cannot be reduced there.

    Returns:
        The parts with the fetched outputs, and the reduced outputs by position in the call. An output that is
        requested twice is at its first position.
    """
    reduced: dict[int, np.ndarray] = {}
    fetches: dict[int, tuple[int, tuple[int, ...]]] = {}
    for position, number in enumerate(call.outputs):
        values = [part.outputs[position] for part in parts]
        holders = tuple(rank for rank, value in enumerate(values) if isinstance(value, DeviceOutput))
        if not holders or number in call.outputs[:position]:
            continue
        mode = modes[number]
        assert mode is not None
        if len(holders) == team.size and len({value.shape for value in values}) == 1:
            weights = fractions([part.rows for part in parts]) if mode == "avg" else None
            step = ReduceDeviceOutput(number, mode, None if weights is None else tuple(weights))
            reduced[position] = team.ask("reducing an output", step)[0][team.rank]
        else:  # a rank without rows, or shapes that `combine` will reject
            fetches[position] = number, holders
    return _fetch(team, fetches, parts) if fetches else parts, reduced


def _fetch(
    team: Team, fetches: dict[int, tuple[int, tuple[int, ...]]], parts: list[RankPart]
) -> list[RankPart]:
    """Return the parts with the outputs at these positions in host memory."""
    # The other outputs are copied, because the answers use their memory.
    kept = [[np.array(v) if isinstance(v, np.ndarray) else v for v in part.outputs] for part in parts]
    answers = team.ask("fetching outputs", FetchDeviceOutputs(tuple(fetches.values())))[0]
    for outputs, answer in zip(kept, answers, strict=True):
        for position, value in zip(fetches, unpack(answer, team.context.blocks).outputs, strict=True):
            outputs[position] = outputs[position] if value is None else value
    return [RankPart(part.rows, outputs) for part, outputs in zip(parts, kept, strict=True)]
