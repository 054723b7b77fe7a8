"""Stopwatches: seconds by phase, in all and for each step, on the host and by events of a device."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lockstep.network.recorder import HostStopwatch, Recorder, Stopwatch, StreamStopwatch
from lockstep.runs.stragglers import PHASES


@dataclass
class Device:
    """A device whose clock advances with its work, and which works only when it is waited for."""

    queue: list[Any] = field(default_factory=list)
    now: float = 0.0  # in ms

    def work(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def finish(self, event: "Event") -> None:
        while event.time is None:
            item = self.queue.pop(0)
            if isinstance(item, Event):
                item.time = self.now
            else:
                self.now += item


@dataclass(eq=False)
class Event:
    device: Device
    time: float | None = None

    def record(self, stream: Any) -> None:
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.time is not None

    def synchronize(self) -> None:
        self.device.finish(self)

    def time_since(self, event: "Event") -> float:
        assert self.time is not None and event.time is not None, "both events must have been reached"
        return self.time - event.time


def take_step(recorder: Recorder, device: Device, compute: float, synchronized: bool = True) -> None:
    watch = recorder.stopwatch
    for phase, milliseconds in (
        ("load-wait", 1.0),
        ("compute", compute),
        ("barrier", 5.0),
        ("exchange", 3.0),
    ):
        watch.enter(phase)
        device.work(milliseconds)
    watch.enter("barrier")
    device.work(2.0)
    recorder.count_step(0, synchronized=synchronized)
    device.work(50.0)  # between the steps: of no phase


def test_events_give_each_step_its_own_times_however_far_the_host_runs_ahead() -> None:
    device = Device()
    watch = StreamStopwatch(lambda: Event(device), stream=None)
    recorder = Recorder(torch.device("cpu"), watch)
    for compute in (10.0, 20.0, 40.0):
        take_step(recorder, device, compute)
    assert device.now == 0.0  # nothing has waited for the device so far
    steps = watch.take_steps()
    assert [step["compute"] for step in steps] == pytest.approx([0.01, 0.02, 0.04])
    assert [step["barrier"] for step in steps] == pytest.approx([0.007] * 3)
    sums = {phase: sum(step[phase] for step in steps) for phase in PHASES}
    assert watch.seconds() == pytest.approx(sums)
    assert watch.take_steps() == []


def test_a_step_without_a_meeting_counts_for_the_next_one() -> None:
    device = Device()
    watch = StreamStopwatch(lambda: Event(device), stream=None)
    recorder = Recorder(torch.device("cpu"), watch)
    for number in range(1, 7):
        take_step(recorder, device, 10.0, synchronized=number % 3 == 0)
    assert [step["compute"] for step in watch.take_steps()] == pytest.approx([0.03, 0.03])


def test_a_reset_forgets_all_steps() -> None:
    recorder = Recorder(torch.device("cpu"), HostStopwatch())
    take_step(recorder, Device(), 1.0)
    recorder.stopwatch.enter("compute")
    recorder.reset()
    assert recorder.stopwatch.take_steps() == []
    take_step(recorder, Device(), 1.0)
    assert len(recorder.stopwatch.take_steps()) == 1


def test_old_steps_are_forgotten_so_that_long_intervals_take_bounded_memory() -> None:
    watch: Stopwatch = HostStopwatch()
    for _ in range(5000):
        watch.end_step()
    assert len(watch.take_steps()) == 1024
