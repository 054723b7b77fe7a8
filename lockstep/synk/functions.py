"""Functions that all ranks run at once: how they are made, called, and brought to the ranks."""

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.synk import rows
from lockstep.synk.blocks import Span, align
from lockstep.synk.calling import Call, Given
from lockstep.synk.data import Data, condition, make_data
from lockstep.synk.kept import collect
from lockstep.synk.programs import Program
from lockstep.synk.results import RankPart, check_foldable, combine, unpack

if TYPE_CHECKING:
    from lockstep.synk.team import Team


class RowNumbers:
    """Row numbers of the current call, where all ranks can read them."""

    def __init__(self, team: "Team") -> None:
        self._data = Data(team, "u1", 1, name="row numbers")

    def put(self, arrays: Iterable[Any]) -> list[Any]:
        """Where arrays lie now, until the next call. What is no array stays what it is."""
        listed = list(arrays)
        n_bytes = sum(align(array.nbytes) for array in listed if isinstance(array, np.ndarray))
        if n_bytes:
            self._data.set_length(n_bytes, oversize=1.5)
        placed, offset = [], 0
        for array in listed:
            if not isinstance(array, np.ndarray):
                placed.append(array)
                continue
            at = self._data.span()
            placed.append(Span(at.block, array.dtype.str, array.shape, offset))
            self._data[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            offset += align(array.nbytes)
        return placed


class Function:
    """A function on all ranks, made by lockstep.synk.function. Call it after distribute().

    output_modes, update_modes: how outputs, and new values of variables in sliced calls, are folded.
    """

    def __init__(self, team: "Team", number: int, program: Program, row_numbers: RowNumbers) -> None:
        self._team, self.number, self._program, self._row_numbers = team, number, program, row_numbers
        self._kept: dict[int, Data] = {}
        self._called = False
        self.distributed = False

    def __repr__(self) -> str:
        return f"<lockstep.synk function {self.name!r}>"

    @property
    def name(self) -> str:
        return self._program.name

    @property
    def output_modes(self) -> list[str | None]:
        return list(self._program.output_modes)

    @property
    def update_modes(self) -> list[str | None]:
        return list(self._program.updated.values())

    def __call__(
        self,
        *inputs: Any,
        output_subset: Sequence[int] | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        **inputs_by_name: Any,
    ) -> Any:
        """Runs on all ranks, each on its share of the rows, and returns the outputs, folded by their modes.

        inputs, inputs_by_name: Data, or arrays, which are copied. output_subset: the numbers of the outputs
        that are wanted. batch: which rows. batch_s: which rows of each rank's own stored variables.
        num_slices: in how many parts each rank computes. docs/synk.md has them all, and what is raised when.
        """
        team = self._team
        with team.lock:
            call = self.prepare(inputs, inputs_by_name, output_subset, batch, batch_s, num_slices)
            parts = team.ask(f"calling {self.name!r}", call, own_first=not self._called)[0]
            return self.finish(call, parts)

    def alone(self, *inputs: Any, output_subset: Sequence[int] | None = None, **inputs_by_name: Any) -> Any:
        """Runs in this process only, on all rows of plain arrays; updates this process's variables."""
        self._team.check(f"function {self.name!r}")
        values = self._order(inputs, inputs_by_name)
        plain = [value.data if isinstance(value, Data) else value for value in values]
        outputs = self._program.call_alone(plain)
        return self._shape_outputs([outputs[i] for i in self._subset(output_subset)])

    as_theano = alone

    def build_inputs(
        self,
        *arrays: Any,
        force_cast: bool = False,
        oversize: float = 1,
        minibatch: bool | Sequence[bool] = False,
        **arrays_by_name: Any,
    ) -> Any:
        """Data for each input, in order; one alone where there is one. minibatch: for all, or for each."""
        values = self._order(arrays, arrays_by_name)
        flags = [minibatch] * len(values) if isinstance(minibatch, bool) else list(minibatch)
        if len(flags) != len(values):
            raise TypeError(f"{self.name}: minibatch has {len(flags)} entries for {len(values)} inputs")
        made = []
        for spec, value, flag in zip(self._program.inputs, values, flags, strict=True):
            kind = spec.dtype, spec.ndim, None, flag, force_cast, oversize, spec.name
            try:
                made.append(make_data(self._team, value, None, *kind))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.name}: input {error}") from None
        return made[0] if len(made) == 1 else tuple(made)

    def prepare(
        self, inputs: Any, by_name: Any, output_subset: Any, batch: Any, batch_s: Any, num_slices: Any
    ) -> Call:
        """The command's step, checked."""
        self._team.check(f"function {self.name!r}")
        if not self.distributed:
            raise RuntimeError(f"{self.name}: call distribute() first")
        wanted = self._subset(output_subset)
        n_slices = self._check_slices(num_slices)
        values = self._order(inputs, by_name)
        datas = [self._as_data(number, value) for number, value in enumerate(values)]
        chosen = self._choose(datas, batch)
        at, *stored = self._row_numbers.put([chosen, *self._choose_stored(batch_s)])
        given = tuple(Given(data.span(), data.minibatch) for data in datas)
        return Call(self.number, given, at, tuple(stored), n_slices, wanted)

    def finish(self, call: Call, parts: list[RankPart]) -> Any:
        """The outputs, from all ranks' parts."""
        if not self._called:
            self._called = True
            self._team.threads.limit()  # the first call may have loaded a library
        if not any(part.rows for part in parts):
            raise ValueError(f"{self.name}: no rank has rows")
        read = [unpack(part, self._team.here.blocks) for part in parts]
        modes, me = self._program.output_modes, self._team.rank
        read, folded = collect(self._team, call, modes, read)
        return self._shape_outputs(
            [
                folded[place]
                if place in folded
                else combine(read, me, place, modes[output], f"{self.name}: output {output}")
                for place, output in enumerate(call.outputs)
            ]
        )

    def _shape_outputs(self, outputs: list[Any]) -> Any:
        if self._program.returns == "none":
            return None
        return outputs if self._program.returns == "list" or len(outputs) != 1 else outputs[0]

    def _order(self, inputs: Sequence[Any], by_name: dict[str, Any]) -> list[Any]:
        """The values in the order of the inputs."""
        specs = self._program.inputs
        names = [spec.name for spec in specs]
        found = dict(enumerate(inputs))
        for name, value in by_name.items():
            if names.count(name) != 1:
                problem = "is the name of several inputs" if name in names else "is the name of no input"
                raise ValueError(f"{self.name}: {name!r} {problem}")
            if names.index(name) in found:
                raise TypeError(f"{self.name}: two values for {name!r}")
            found[names.index(name)] = value
        if len(found) != len(specs) or any(number not in found for number in range(len(specs))):
            raise TypeError(f"{self.name} takes {len(specs)} inputs, {len(found)} given")
        return [found[number] for number in range(len(specs))]

    def _as_data(self, number: int, value: Any) -> Data:
        """The value as it is where it is Data; else a copy in memory that is kept for this input."""
        spec = self._program.inputs[number]
        what = f"{self.name}: input {spec.name or number}"
        ndim = value.ndim if isinstance(value, Data) else np.ndim(value)
        if spec.ndim is not None and ndim != spec.ndim:
            raise TypeError(f"{what} has {spec.ndim} dimensions, {ndim} given")
        if not ndim and not spec.whole:
            raise TypeError(f"{what} is a scalar, which has no rows to divide: put it into bcast_inputs")
        if isinstance(value, Data):
            self._check_data(what, spec.dtype, value)
            return value
        dtype = np.dtype(spec.dtype) if spec.dtype is not None else np.asarray(value).dtype
        kept = self._kept.get(number)
        if kept is None or kept.dtype != dtype or kept.ndim != ndim:
            kept = self._kept[number] = Data(self._team, dtype, ndim, name=what)
        array = condition(value, dtype, what)
        if array.ndim and not len(array):
            raise ValueError(f"{what} has no rows")
        kept.set_value(array)
        return kept

    def _check_data(self, what: str, dtype: str | None, data: Data) -> None:
        if dtype is not None and data.dtype != dtype:
            raise TypeError(f"{what} is {dtype}, the data {data.name!r} is {data.dtype}")
        if data.team is not self._team:
            raise RuntimeError(f"{what}: the data {data.name!r} is of a team that is closed")
        if data.is_empty:
            raise ValueError(f"{what}: the data {data.name!r} has no memory yet: set its value")

    def _choose(self, datas: Sequence[Data], batch: Any) -> rows.Choice | None:
        """The rows of the whole that `batch` chooses; None where no input is divided."""
        divided = [data for data, spec in zip(datas, self._program.inputs, strict=True) if not spec.whole]
        if not divided:
            if batch is not None:
                raise TypeError(f"{self.name}: batch, but no input is divided; batch_s chooses stored rows")
            return None
        whole = [data for data in divided if not data.minibatch]
        lengths = {data.name: len(data) for data in (divided if batch is None else whole or divided)}
        if batch is None and len(set(lengths.values())) > 1:
            bare = {name.removeprefix(f"{self.name}: "): length for name, length in lengths.items()}
            found = ", ".join(f"{name} has {length} rows" for name, length in bare.items())
            raise ValueError(f"{self.name}: {found}: without a batch they have to have as many")
        chosen = rows.choose(batch, min(lengths.values()), f"{self.name}: batch")
        n_rows = rows.count(chosen)
        if n_rows == 0:
            raise ValueError(f"{self.name}: the batch has no rows")
        for data in divided:
            if data.minibatch and len(data) < n_rows:
                raise ValueError(
                    f"{self.name}: minibatch {data.name!r} has {len(data)} rows, the batch {n_rows}"
                )
        return chosen if whole else slice(0, n_rows)

    def _choose_stored(self, batch_s: Any) -> list[Any]:
        """What batch_s chooses, for each rank: slices and arrays as they are; nothing without it."""
        if batch_s is None:
            return []
        what, n_ranks = f"{self.name}: batch_s", self._team.size
        if not self._program.sliceable:
            raise TypeError(f"{what}, but the function has no sliceable_shareds")
        if isinstance(batch_s, list | tuple) and any(isinstance(e, slice) or np.ndim(e) for e in batch_s):
            if len(batch_s) != n_ranks:
                raise TypeError(f"{what} has {len(batch_s)} entries for {n_ranks} ranks")
            return [_check_stored(entry, f"{what}[{rank}]") for rank, entry in enumerate(batch_s)]
        return [_check_stored(batch_s, what)] * n_ranks

    def _subset(self, output_subset: Any) -> tuple[int, ...]:
        n_outputs = len(self._program.output_modes)
        if output_subset is None:
            return tuple(range(n_outputs))
        what = f"{self.name}: output_subset"
        if not isinstance(output_subset, list | tuple):
            raise TypeError(f"{what} is {type(output_subset).__name__}, and has to be a list of ints")
        for number in output_subset:
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise TypeError(f"{what}: {number!r} is no int")
            if not 0 <= number < n_outputs:
                raise ValueError(f"{what}: there is no output {number}: there are {n_outputs}")
        return tuple(int(number) for number in output_subset)

    def _check_slices(self, num_slices: Any) -> int:
        try:
            number = operator.index(int(num_slices))
        except (TypeError, ValueError, OverflowError):
            number = 0
        if number < 1 or number != num_slices:
            raise ValueError(f"{self.name}: num_slices={num_slices!r}: it is a whole number from 1 on")
        if number > 1 and not self._program.divides:
            raise ValueError(f"{self.name}: num_slices={number}, but there is nothing to slice")
        if number > 1:
            for shared in self._program.default_modes:
                check_foldable("avg", shared.get().dtype, f"{self.name}: update of {shared.name!r}")
        return number


def _check_stored(entry: Any, what: str) -> slice | np.ndarray:
    if isinstance(entry, slice):
        return entry
    if not isinstance(entry, list | tuple | np.ndarray) or np.ndim(entry) != 1:
        raise TypeError(f"{what} is {entry!r}: give a slice, or a list or array of row numbers")
    array = np.asarray(entry)
    if array.dtype.kind not in "iub" and len(array):
        raise TypeError(f"{what} has dtype {array.dtype}: row numbers are integers")
    return array if array.dtype == bool else array.astype(np.int64)
