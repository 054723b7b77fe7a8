"""Timing in turns: what is compared takes turns in one process, and so meets the same clocks and neighbours.

A GPU works behind the host's back. A turn begins and ends with a synchronised device, with nothing that waits
for the device in between; shorter things are timed by events in their stream.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting

_HOST_STEPS = 3  # few enough for the device's queue of launches


@dataclass(frozen=True)
class Turn:
    """A step to be timed many times, after `prepare` has set the process up for it."""

    prepare: Callable[[], object]
    step: Callable[[], object]


@dataclass(frozen=True)
class _Lap:
    """Seconds a step: from device synchronised to device synchronised, and for the host to issue one."""

    seconds: float
    host_seconds: float


def try_out(turn: Turn, synchronize: Callable[[], object]) -> None:
    """A few steps, in which libraries choose their algorithms and a graph is captured; whatever is wrong is
    raised here, before turns begin."""
    turn.prepare()
    for _ in range(6):
        turn.step()
    synchronize()


def take_turns(
    turns: dict[str, Turn],
    synchronize: Callable[[], object],
    setting: Setting,
    keep: Callable[[dict[str, dict[str, float]]], object] = lambda so_far: None,
) -> dict[str, dict[str, float]]:
    """Return milliseconds a step of each: the median over the rounds, the least and the most.

    keep: Called with the results so far after each round, so that a section that is stopped keeps them.
    host_ms: what the host takes to issue a step to an idle device; where it is no less than ms, the host is
    the bottleneck. A round before those that count chooses how many steps fill a turn.
    """
    n_steps = {name: _count_steps(turn, synchronize, setting) for name, turn in turns.items()}
    laps: dict[str, list[_Lap]] = {name: [] for name in turns}
    for _ in range(setting.n_rounds):
        for name, turn in turns.items():
            laps[name].append(_lap(turn, n_steps[name], synchronize, setting))
        found = {name: {**_summary(laps[name]), "steps_a_turn": n_steps[name]} for name in turns}
        keep(found)
    return found


def add_rates(steps: dict[str, dict[str, float]], setting: Setting) -> dict[str, dict[str, float]]:
    """Return the steps with images/s beside the milliseconds."""
    rates = {name: setting.batch_size / figures["ms"] * 1e3 for name, figures in steps.items()}
    return {name: {**figures, "images_per_second": rates[name]} for name, figures in steps.items()}


def take_turns_kept(
    turns: dict[str, Turn], synchronize: Callable[[], object], setting: Setting, record: Record
) -> dict[str, dict[str, float]]:
    """Return `take_turns` with images/s, kept as the record's "steps" after each round."""

    def keep(so_far: dict[str, dict[str, float]]) -> None:
        record.keep("steps", add_rates(so_far, setting))

    return add_rates(take_turns(turns, synchronize, setting, keep), setting)


def _count_steps(turn: Turn, synchronize: Callable[[], object], setting: Setting) -> int:
    seconds = _lap(turn, setting.least_steps, synchronize, setting).seconds
    return max(setting.least_steps, round(setting.turn_seconds / seconds))


def _lap(turn: Turn, n_steps: int, synchronize: Callable[[], object], setting: Setting) -> _Lap:
    turn.prepare()
    for _ in range(setting.warm_steps):
        turn.step()
    synchronize()
    begin = time.perf_counter()
    for _ in range(n_steps):
        turn.step()
    synchronize()
    seconds = (time.perf_counter() - begin) / n_steps
    begin = time.perf_counter()
    for _ in range(_HOST_STEPS):
        turn.step()
    host_seconds = (time.perf_counter() - begin) / _HOST_STEPS
    synchronize()
    return _Lap(seconds, host_seconds)


def _summary(laps: list[_Lap]) -> dict[str, float]:
    milliseconds = [lap.seconds * 1e3 for lap in laps]
    return {
        "ms": statistics.median(milliseconds),
        "least_ms": min(milliseconds),
        "most_ms": max(milliseconds),
        "host_ms": statistics.median(lap.host_seconds * 1e3 for lap in laps),
    }


def device_turns(
    functions: dict[str, Callable[[], object]],
    driver: Any,
    stream: Any,
    n_calls: int,
    n_rounds: int,
    occupy: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Seconds a call on the device: n_calls of each, one after the other in `stream`, between two events.

    Medians over rounds in which all take turns, after one that does not count. driver: pycuda.driver.
    occupy: Gives the device work before the clock starts, during which the host launches the calls. Without
    it short calls take as long as their launches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(n_rounds + 1):
        for name, function in functions.items():
            begin, end = driver.Event(), driver.Event()
            occupy()
            begin.record(stream)
            for _ in range(n_calls):
                function()
            end.record(stream)
            end.synchronize()
            if number:
                seconds[name].append(end.time_since(begin) / 1e3 / n_calls)
    return {name: statistics.median(values) for name, values in seconds.items()}


def matrix_product(setting: Setting, place: Any) -> Callable[[], object]:
    """Return a function that multiplies two random bfloat16 matrices of the setting's size on a device."""
    size = (setting.matrix, setting.matrix)
    left, right = (torch.randn(size, device=place).to(torch.bfloat16) for _ in range(2))
    return partial(torch.matmul, left, right, out=torch.empty_like(left))


def stage_milliseconds(
    turn: Turn, model: Any, optimizer: Any, new_event: Callable[[], Any], stream: Any, n_steps: int
) -> dict[str, float]:
    """Milliseconds of a step's stages on the device: medians, by events that hooks record in `stream`.

    before: what comes before the forward pass; backward: loss and backward pass; after: sums, barriers. Not
    for a captured step, whose hooks ran once. stream: None for the default stream.
    """
    steps: list[list[Any]] = []

    def mark(*_: Any) -> None:
        event = new_event()
        event.record(stream)
        steps[-1].append(event)

    update = optimizer.step

    def marked_update() -> None:
        mark()
        update()
        mark()

    handles = [model.register_forward_pre_hook(mark), model.register_forward_hook(mark)]
    optimizer.step = marked_update  # not every optimizer has hooks
    try:
        turn.prepare()
        for _ in range(n_steps):
            steps.append([])
            mark()
            turn.step()
            mark()
    finally:
        optimizer.step = update
        for handle in handles:
            handle.remove()
    steps[-1][-1].synchronize()
    names = ("before", "forward", "backward", "update", "after")
    return {
        name: statistics.median(marks[place + 1].time_since(marks[place]) for marks in steps)
        for place, name in enumerate(names)
    }
