"""Outputs of a call: their way to the caller, in the message or a block per rank, and their reduction."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.exchange import Op
from lockstep.exchange.reduction import combine_into, reduce_arrays
from lockstep.synk.blocks import ArrayLocation, BlockTable, arrange

INLINE_BYTES = 1 << 13
NARROW_PARTS = 64  # more slices are added in float64: rounding in float32 would add up to more than 1e-5

# Names of Synkhronos for the reductions of lockstep/exchange.
REDUCE_OPS: dict[str, Op] = {"avg": "mean", "sum": "sum", "max": "max", "min": "min", "prod": "prod"}
MODES = (*REDUCE_OPS, "gather")


@dataclass(frozen=True)
class DeviceOutput:
    """A placeholder for an output on its rank's GPU, to be reduced or fetched later (calling.py)."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a call.

    Attributes:
        rows: Number of rows; 0 if the rank had none, 1 if nothing is divided.
        outputs: The requested outputs; None for those that the caller does not need from this rank.
    """

    rows: int
    outputs: list[Any]


def normalise_mode(mode: Any, what: str) -> str | None:
    """Return a mode without Synkhronos's prefix 'c_' for the host; raise ValueError if it is unknown."""
    if mode is None:
        return None
    bare = mode.removeprefix("c_") if isinstance(mode, str) else mode
    if bare not in MODES:
        raise ValueError(f"{what}: unknown mode {mode!r}; modes are {', '.join(MODES)} and None")
    return str(bare)


def normalise_op(op: Any, what: str) -> str:
    """Return a collective's op without the prefix 'c_'; raise ValueError if it is unknown."""
    bare = op.removeprefix("c_") if isinstance(op, str) else op
    if bare not in REDUCE_OPS:
        raise ValueError(f"{what}: unknown op {op!r}; they are {', '.join(REDUCE_OPS)}")
    return str(bare)


def check_reducible(mode: str | None, dtype: Any, what: str, where: str = "") -> None:
    """Raise TypeError for meaningless reductions: the mean of integers, sums of booleans.

    Args:
        where: How the user gives a mode, for the message, if that is not obvious.
    """
    kind = np.dtype(dtype).kind
    if kind == "b" and mode in ("avg", "sum", "prod"):
        raise TypeError(f"{what} is bool, which has no {mode}: cast it, or use max (any) or min (all){where}")
    if kind in "iu" and mode == "avg":
        raise TypeError(
            f"{what} is {dtype}, which has no avg: cast it to a float, or use sum, max, min or prod{where}"
        )


def fractions(rows: Sequence[int]) -> list[float] | None:
    """Return the weight of each part by its number of rows, or None if all are equal."""
    if all(number == rows[0] for number in rows):
        return None
    return [number / sum(rows) for number in rows]


def pack(part: RankPart, get_room: Callable[[int], tuple[int, np.ndarray]]) -> RankPart:
    """Move large outputs into the rank's block, and replace them by their locations.

    Args:
        get_room: Returns the number and the bytes of a block of at least the requested size.
    """
    outputs = list(part.outputs)
    large = [i for i, value in enumerate(outputs) if _is_large(value)]
    if not large:
        return part
    offsets, n_bytes = arrange(outputs[i].nbytes for i in large)
    number, room = get_room(n_bytes)
    for i, offset in zip(large, offsets, strict=True):
        value = outputs[i]
        room[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)[...] = value
        outputs[i] = ArrayLocation(number, value.dtype.str, value.shape, offset)
    return RankPart(part.rows, outputs)


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes > INLINE_BYTES


def unpack(part: RankPart, blocks: BlockTable) -> RankPart:
    """Return the part with locations replaced by arrays, which are not copied."""
    outputs = [blocks.array(value) if isinstance(value, ArrayLocation) else value for value in part.outputs]
    return RankPart(part.rows, outputs)


def combine(parts: Sequence[RankPart], caller: int, number: int, mode: str | None, what: str) -> Any:
    """Return output `number` of a call, reduced over all ranks. It shares no memory with other ranks."""
    if mode is None:
        return parts[caller].outputs[number]
    taking_part = [part for part in parts if part.rows]
    values = [part.outputs[number] for part in taking_part]
    if len(values) == 1:
        return values[0] if taking_part[0] is parts[caller] else values[0].copy()
    if mode == "gather":
        return _concatenate(values, what)
    check_same_shape([value.shape for value in values], what, mode)
    dtype = np.result_type(*(value.dtype for value in values))  # a rank may return 0 where others have floats
    result = np.empty(values[0].shape, dtype)
    rows = [part.rows for part in taking_part]
    flat = [np.ascontiguousarray(value, dtype).reshape(-1) for value in values]
    reduce_arrays(flat, [result.reshape(-1)], REDUCE_OPS[mode], fractions(rows) if mode == "avg" else None)
    return result


def _concatenate(values: list[np.ndarray], what: str) -> np.ndarray:
    filled = [value for value in values if value.size] or values  # an empty one may be torch.tensor([])
    dtype = np.result_type(*(value.dtype for value in filled))
    try:
        return np.concatenate(values, dtype=dtype, casting="unsafe")
    except ValueError as error:
        shapes = ", ".join(str(shape) for shape in dict.fromkeys(value.shape for value in values))
        raise ValueError(
            f"{what} has parts of the shapes {shapes}: gather needs ones that differ in their rows only"
        ) from error


def check_same_shape(shapes: Sequence[tuple[int, ...]], what: str, mode: str) -> None:
    """Raise ValueError if the parts cannot be reduced element by element."""
    if any(shape != shapes[0] for shape in shapes):
        described = ", ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{what} has parts of different shapes ({described}): {mode} needs equal ones; use gather"
        )


class PartReducer:
    """A running reduction of one output over the slices of a call. Mode None collects them in a list."""

    def __init__(self, mode: str | None, n_rows: int, what: str) -> None:
        self.mode, self.n_rows, self.what = mode, n_rows, what
        self._parts: list[Any] = []
        self._n_parts = 0
        self._dtype: Any = None  # of all parts so far

    @np.errstate(all="ignore")
    def add(self, value: Any, n_rows: int) -> None:
        """Add a copy of the result of a slice with n_rows rows."""
        if self.mode in (None, "gather"):
            self._parts.append(np.array(value))
            return
        value = np.asarray(value)
        self._dtype = value.dtype if self._dtype is None else np.promote_types(self._dtype, value.dtype)
        if self.mode == "avg":
            dtype = np.promote_types(value.dtype, np.float32)  # float16 is summed in float32
            value = np.multiply(value, n_rows / self.n_rows, dtype=dtype)
        self._n_parts += 1
        if not self._parts:
            self._parts.append(np.array(value))
            return
        check_same_shape([self._parts[0].shape, value.shape], self.what, str(self.mode))
        dtype = np.promote_types(self._parts[0].dtype, value.dtype)
        if dtype.kind in "fc" and self._n_parts > NARROW_PARTS:
            dtype = np.promote_types(dtype, np.float64)
        self._parts[0] = self._parts[0].astype(dtype, copy=False)
        combine_into(self._parts[0], value, REDUCE_OPS[str(self.mode)])

    @np.errstate(all="ignore")
    def result(self) -> Any:
        """Return the reduction of all parts; the list of them if the mode is None."""
        if self.mode is None:
            return self._parts
        if self.mode == "gather":
            return _concatenate(self._parts, self.what)
        return self._parts[0].astype(self._dtype, copy=False)
