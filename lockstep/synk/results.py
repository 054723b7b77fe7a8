"""Outputs on their way to the caller: in the message, or through a block per rank; and their fold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.exchange import Op
from lockstep.exchange.fold import fold_all
from lockstep.synk.blocks import Blocks, Span, align

INLINE_BYTES = 1 << 13

FOLD_OPS: dict[str, Op] = {"avg": "mean", "sum": "sum", "max": "max", "min": "min", "prod": "prod"}
MODES = ("avg", "sum", "max", "min", "prod", "gather")


@dataclass(frozen=True)
class Kept:
    """An output that stays on its rank's device until the caller has it folded or fetched (kept.py)."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a call. rows: 0 where it was passed over; 1 where there is nothing to divide.

    outputs: those that were asked for; None where the caller has no use for this rank's.
    """

    rows: int
    outputs: list[Any]


def normalise_mode(mode: Any, what: str) -> str | None:
    """A mode without the 'c_' that Synkhronos has for the host. Raises ValueError for an unknown one."""
    if mode is None:
        return None
    bare = mode.removeprefix("c_") if isinstance(mode, str) else mode
    if bare not in MODES:
        raise ValueError(f"{what}: unknown mode {mode!r}; modes are {', '.join(MODES)} and None")
    return str(bare)


def normalise_op(op: Any, what: str) -> str:
    """The same for the operation of a collective."""
    bare = op.removeprefix("c_") if isinstance(op, str) else op
    if bare not in FOLD_OPS:
        raise ValueError(f"{what}: unknown op {op!r}; they are {', '.join(FOLD_OPS)}")
    return str(bare)


def check_foldable(mode: str | None, dtype: Any, what: str) -> None:
    """Raises TypeError for what has no meaning: the mean of integers, sums of booleans."""
    kind = np.dtype(dtype).kind
    if mode == "avg" and kind in "iub":
        raise TypeError(
            f"{what} is {dtype}, which has no avg: cast it to a float, or give a mode: (variable, mode)"
        )
    if mode in ("sum", "prod") and kind == "b":
        raise TypeError(f"{what} is bool, which has no {mode}: cast it, or use max (any) or min (all)")


def fractions(rows: Sequence[int]) -> list[float] | None:
    """The shares of parts that stand for so many rows each; None where they are equal."""
    if all(number == rows[0] for number in rows):
        return None
    return [number / sum(rows) for number in rows]


def pack(part: RankPart, get_room: Callable[[int], tuple[int, np.ndarray]]) -> RankPart:
    """Puts large outputs into the rank's block; a Span says where. get_room: a block with so many bytes."""
    large = [value for value in part.outputs if _is_large(value)]
    if not large:
        return part
    number, room = get_room(sum(align(value.nbytes) for value in large))
    outputs, offset = [], 0
    for value in part.outputs:
        if not _is_large(value):
            outputs.append(value)
            continue
        flat = room[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)
        flat[...] = value
        outputs.append(Span(number, value.dtype.str, value.shape, offset))
        offset += align(value.nbytes)
    return RankPart(part.rows, outputs)


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes > INLINE_BYTES


def unpack(part: RankPart, blocks: Blocks) -> RankPart:
    """The caller's side; arrays in the rank's block are not copied."""
    outputs = [blocks.array(value) if isinstance(value, Span) else value for value in part.outputs]
    return RankPart(part.rows, outputs)


def combine(parts: Sequence[RankPart], caller: int, number: int, mode: str | None, what: str) -> Any:
    """Output `number` of a call, from all ranks' parts; shares no memory with other ranks."""
    if mode is None:
        return parts[caller].outputs[number]
    taking_part = [part for part in parts if part.rows]
    values = [part.outputs[number] for part in taking_part]
    if len(values) == 1:
        return values[0] if taking_part[0] is parts[caller] else values[0].copy()
    if mode == "gather":
        return np.concatenate(values)
    check_same_shape([value.shape for value in values], what, mode)
    result = np.empty(values[0].shape, values[0].dtype)
    rows = [part.rows for part in taking_part]
    flat = [np.ascontiguousarray(value).reshape(-1) for value in values]
    fold_all(flat, [result.reshape(-1)], FOLD_OPS[mode], fractions(rows) if mode == "avg" else None)
    return result


def check_same_shape(shapes: Sequence[tuple[int, ...]], what: str, mode: str) -> None:
    """Raises ValueError where parts can't be folded element by element."""
    if any(shape != shapes[0] for shape in shapes):
        found = ", ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise ValueError(
            f"{what} has parts of different shapes ({found}): {mode} needs equal ones; use gather"
        )
