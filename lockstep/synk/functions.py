"""Functions that all ranks run at once: their arguments, calls and results."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.synk import delivery, rows
from lockstep.synk.bindings import Bindings, Uses
from lockstep.synk.blocks import ArrayLocation, arrange
from lockstep.synk.calling import Call, CallInput, collect_device_outputs
from lockstep.synk.data import Data, as_array, condition, make_data
from lockstep.synk.interrupts import interruptible
from lockstep.synk.programs import RankProgram
from lockstep.synk.results import RankPart, check_reducible, combine, unpack
from lockstep.synk.team import Team


class RowNumbers:
    """The row numbers of the current call, in memory that all ranks can read."""

    def __init__(self, team: Team) -> None:
        self._data = Data(team, "u1", 1, name="row numbers")

    def put(self, arrays: Iterable[Any]) -> list[Any]:
        """Copy arrays to shared memory and return their locations, valid until the next call.

        Other objects are returned unchanged.
        """
        placed = list(arrays)
        numbers = [i for i, array in enumerate(placed) if isinstance(array, np.ndarray)]
        offsets, n_bytes = arrange(placed[i].nbytes for i in numbers)
        if numbers:
            self._data.set_length(max(1, n_bytes), oversize=1.5)  # the location of no rows needs a block
        for i, offset in zip(numbers, offsets, strict=True):
            array = placed[i]
            self._data[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            placed[i] = ArrayLocation(self._data.location().block, array.dtype.str, array.shape, offset)
        return placed


@dataclass(frozen=True)
class CallArguments:
    """The unchecked arguments of a call; see Function.__call__."""

    inputs: Sequence[Any] = ()
    inputs_by_name: dict[str, Any] = field(default_factory=dict)
    output_subset: Any = None
    batch: Any = None
    batch_s: Any = None
    num_slices: Any = 1


class Function:
    """A function on all ranks, made by lockstep.synk.function. Call it after distribute()."""

    def __init__(self, team: Team, number: int, program: RankProgram, row_numbers: RowNumbers) -> None:
        self._team, self.number, self._program, self._row_numbers = team, number, program, row_numbers
        self._input_data: dict[int, Data] = {}
        self._called = False
        self.distributed = False
        self.settings_group = 0  # number of the group in settings.py, set by distribute()
        self._copies: Mapping[int, Any] = {}  # what the same distribute() copied, by id
        self._imports: delivery.Imports = ()  # and what ranks imported for it
        self._uses = Uses()
        self._n_checked = 0  # number of shared variables when `_copies` was searched for them

    def __repr__(self) -> str:
        return f"<lockstep.synk function {self.name!r}>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled. Call it in this process, not in a callable")

    @property
    def name(self) -> str:
        """The name of the function, as messages show it."""
        return self._program.name

    @property
    def output_modes(self) -> list[str | None]:
        """The reduction of each output over the ranks; None leaves the parts in a list."""
        return list(self._program.output_modes)

    @property
    def update_modes(self) -> list[str | None]:
        """The reduction of each updated variable over the slices of a call."""
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
        """Run on all ranks, each on its share of the rows, and return the outputs reduced by their modes.

        docs/synk.md describes the arguments in full.

        Args:
            inputs, inputs_by_name: Data, or arrays, which are copied.
            output_subset: Numbers of the outputs to return.
            batch: Rows of the inputs to use.
            batch_s: Rows to use of each rank's own stored variables.
            num_slices: Number of slices that each rank computes one after another.

        Raises:
            RuntimeError: distribute() was not called, or another call of this thread is under way.
            TypeError, ValueError: An argument does not fit the function.
            RankLost: A worker died or did not answer in time.
        """
        team = self._team
        with team.exclusive_call(f"function {self.name!r}"):
            call = self.prepare(
                CallArguments(inputs, inputs_by_name, output_subset, batch, batch_s, num_slices)
            )
            try:
                parts = team.ask(f"calling {self.name!r}", call, own_first=not self._called)[0]
            finally:
                self.accept_bindings()
            return self.finish(call, parts)

    def alone(self, *inputs: Any, output_subset: Sequence[int] | None = None, **inputs_by_name: Any) -> Any:
        """Run in this process only, on all rows, and update this process's variables."""
        # A second Ctrl-C leaves the workers alone, which do not compute.
        with self._team.exclusive_call(f"function {self.name!r}", on_second_interrupt=lambda: None):
            values = self._order(inputs, inputs_by_name)
            plain = [value.data if isinstance(value, Data) else value for value in values]
            n_rows = self._program.count_rows(plain)
            for shared in self._program.updated:
                shared.rows = n_rows
            outputs = interruptible(lambda: self._program.call_locally(plain))
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
        """Return Data for each input, in order, or a single Data if there is one input.

        Args:
            minibatch: As in lockstep.synk.data, for all inputs or for each.
        """
        values = self._order(arrays, arrays_by_name)
        flags = [minibatch] * len(values) if isinstance(minibatch, bool) else list(minibatch)
        if len(flags) != len(values):
            raise TypeError(f"{self.name}: minibatch has {len(flags)} entries for {len(values)} inputs")
        created = []
        for spec, value, flag in zip(self._program.inputs, values, flags, strict=True):
            try:
                created.append(
                    make_data(
                        self._team,
                        value,
                        dtype=spec.dtype,
                        ndim=spec.ndim,
                        minibatch=flag,
                        force_cast=force_cast,
                        oversize=oversize,
                        name=spec.name,
                    )
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self.name}: input {error}") from None
        return created[0] if len(created) == 1 else tuple(created)

    def mark_distributed(
        self, settings_group: int, copies: Mapping[int, Any], imports: delivery.Imports, found: Bindings
    ) -> None:
        """Record that the ranks have the function; `copies` and `imports` are from `delivery.pack`."""
        self.distributed, self.settings_group, self._imports = True, settings_group, imports
        self._copies, self._n_checked = copies, len(self._team.context.shareds)
        self._uses = found.find(self._program.source)

    def accept_bindings(self) -> None:
        """Record that a call is over, which changed on all ranks what its callable changes."""
        self._uses.accept()

    def _check_copies(self) -> None:
        """Raise RuntimeError if the ranks have a copy of what was shared after distribute()."""
        n_shareds = len(self._team.context.shareds)
        if n_shareds == self._n_checked:
            return
        name = delivery.find_copy(self._team, self._program.source, self._copies)
        if name is not None:
            raise RuntimeError(
                f"{self.name}: {name!r} was shared after this function was distributed, so the ranks have a "
                "copy of it. Create the function again, and call distribute()"
            )
        self._n_checked = n_shareds

    def prepare(self, arguments: CallArguments) -> Call:
        """Check the arguments of a call, and return its step."""
        self._team.check(f"function {self.name!r}")
        if not self.distributed:
            raise RuntimeError(f"{self.name}: call distribute() first")
        self._check_copies()
        delivery.check_imports(self._imports, self.name)
        self._uses.check(self.name)
        self._team.registry.sync_objects()
        outputs = self._subset(arguments.output_subset)
        n_slices = self._check_slices(arguments.num_slices)
        values = self._order(arguments.inputs, arguments.inputs_by_name)
        datas = [self._as_data(number, value) for number, value in enumerate(values)]
        chosen = self._choose(datas, arguments.batch)
        at, *stored = self._row_numbers.put([chosen, *self._choose_stored(arguments.batch_s)])
        return Call(
            program=self.number,
            inputs=tuple(
                CallInput(data.location(), data.minibatch, is_copy=data is not value)
                for data, value in zip(datas, values, strict=True)
            ),
            rows=at,
            stored=tuple(stored),
            n_slices=n_slices,
            outputs=outputs,
            settings=self._team.context.settings.capture(self.settings_group),
            torch_settings=self._program.capture_settings(),
        )

    def finish(self, call: Call, parts: list[RankPart]) -> Any:
        """Return the outputs, reduced over all ranks' parts."""
        self._team.context.settings.confirm(call.settings)
        if not self._called:
            self._called = True
            self._team.threads.limit()  # the first call may have loaded a library
        if not any(part.rows for part in parts):
            raise ValueError(f"{self.name}: no rank has rows")
        read = [unpack(part, self._team.context.blocks) for part in parts]
        modes, own_rank = self._program.output_modes, self._team.rank
        read, reduced = collect_device_outputs(self._team, call, modes, read)
        positions = [(output, call.outputs.index(output)) for output in call.outputs]
        return self._shape_outputs(
            [
                reduced[position]
                if position in reduced
                else combine(read, own_rank, position, modes[output], f"{self.name}: output {output}")
                for output, position in positions
            ]
        )

    def _shape_outputs(self, outputs: list[Any]) -> Any:
        if self._program.returns == "none":
            return None
        return outputs if self._program.returns == "list" or len(outputs) != 1 else outputs[0]

    def _order(self, inputs: Sequence[Any], by_name: dict[str, Any]) -> list[Any]:
        """Return the values in the order of the inputs."""
        specs = self._program.inputs
        names = [spec.name for spec in specs]
        values = dict(enumerate(inputs))
        for name, value in by_name.items():
            if names.count(name) != 1:
                problem = "is the name of several inputs" if name in names else "is the name of no input"
                raise ValueError(f"{self.name}: {name!r} {problem}")
            if names.index(name) in values:
                raise TypeError(f"{self.name}: two values for {name!r}")
            values[names.index(name)] = value
        if len(values) != len(specs) or any(number not in values for number in range(len(specs))):
            raise TypeError(f"{self.name} takes {len(specs)} inputs, {len(values)} given")
        return [values[number] for number in range(len(specs))]

    def _as_data(self, number: int, value: Any) -> Data:
        """Return Data unchanged, and copy any other value into Data that is reused for this input."""
        spec = self._program.inputs[number]
        what = f"{self.name}: input {spec.name or number}"
        given = value if isinstance(value, Data) else as_array(value, what)
        if not given.ndim and given.dtype.kind not in "biufc":
            raise TypeError(f"{what} is {type(value).__name__}: give Data or an array of numbers")
        if spec.ndim is not None and given.ndim != spec.ndim:
            raise TypeError(f"{what} has {spec.ndim} dimensions, {given.ndim} given")
        if not given.ndim and not spec.whole:
            raise TypeError(f"{what} is a scalar, which has no rows to divide: put it into bcast_inputs")
        if not spec.accepts(given.shape):
            raise ValueError(f"{what} has shape {spec.shape}, where None is any length; {given.shape} given")
        if isinstance(value, Data):
            self._check_data(what, spec.dtype, value)
            return value
        dtype = np.dtype(spec.dtype) if spec.dtype is not None else given.dtype
        data = self._input_data.get(number)
        if data is None or data.dtype != dtype or data.ndim != given.ndim:
            self._program.check_dtype(what, dtype)
            data = self._input_data[number] = Data(self._team, dtype, given.ndim, name=what)
        array = condition(value, dtype, what)
        if array.ndim and not len(array):
            raise ValueError(f"{what} has no rows")
        data.set_value(array)
        return data

    def _check_data(self, what: str, dtype: str | None, data: Data) -> None:
        if dtype is not None and data.dtype != dtype:
            raise TypeError(f"{what} is {dtype}, the data {data.name!r} is {data.dtype}")
        if data.team is not self._team:
            raise RuntimeError(f"{what}: the data {data.name!r} is of a team that is closed")
        self._program.check_dtype(what, data.dtype)
        if data.is_empty:
            raise ValueError(f"{what}: the data {data.name!r} has no memory yet: set its value")

    def _choose(self, datas: Sequence[Data], batch: Any) -> rows.Choice | None:
        """Return the rows of the inputs that `batch` chooses, or None if no input is divided."""
        divided = [data for data, spec in zip(datas, self._program.inputs, strict=True) if not spec.whole]
        if not divided:
            if batch is not None:
                raise TypeError(f"{self.name}: batch, but no input is divided; batch_s chooses stored rows")
            return None
        whole = [data for data in divided if not data.minibatch]
        if not whole and (isinstance(batch, slice) or np.ndim(batch)):
            raise TypeError(
                f"{self.name}: batch chooses rows, and all inputs are minibatch Data, which have only those "
                "of the batch: leave it out, or give the number of rows"
            )
        counted = divided if batch is None else whole or divided
        lengths = [len(data) for data in counted]
        if batch is None and len(set(lengths)) > 1:
            bare = [data.name.removeprefix(f"{self.name}: ") for data in counted]
            described = ", ".join(
                f"{name} has {length} rows" for name, length in zip(bare, lengths, strict=True)
            )
            raise ValueError(f"{self.name}: {described}: without a batch they have to have as many")
        chosen = rows.choose(batch, min(lengths), f"{self.name}: batch")
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
        """Return the choice of batch_s for each rank, or an empty list without batch_s."""
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
                raise TypeError(f"{what}: {number!r} is not an int")
            if not 0 <= number < n_outputs:
                raise ValueError(f"{what}: output {number} does not exist: there are {n_outputs} outputs")
        return tuple(int(number) for number in output_subset)

    def _check_slices(self, num_slices: Any) -> int:
        try:
            number = operator.index(int(num_slices))
        except (TypeError, ValueError, OverflowError):
            number = 0
        if number < 1 or number != num_slices:
            raise ValueError(f"{self.name}: num_slices={num_slices!r} is not a whole number from 1 on")
        if number > 1 and not self._program.divides:
            raise ValueError(f"{self.name}: num_slices={number}, but there is nothing to slice")
        if number > 1:
            for shared in self._program.default_modes:
                what = f"{self.name}: update of {shared.name!r}"
                check_reducible("avg", shared.get().dtype, what, " as its mode in updates")
        return number


def _check_stored(entry: Any, what: str) -> slice | np.ndarray:
    if isinstance(entry, slice):
        ends = [None if end is None else operator.index(end) for end in (entry.start, entry.stop, entry.step)]
        return slice(*ends)
    entry = rows.as_listed(entry)
    if not isinstance(entry, list | tuple | np.ndarray) or np.ndim(entry) != 1:
        raise TypeError(f"{what} is {entry!r}: give a slice, or a list or array of row numbers")
    array = np.asarray(entry)
    if array.dtype.kind not in "iub" and len(array):
        raise TypeError(f"{what} has dtype {array.dtype}: row numbers are integers")
    return array if array.dtype.kind in "iub" else array.astype(np.int64)
