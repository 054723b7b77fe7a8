"""Asynchronous lanes: operations are launched and run later, behind events; the engine's order holds."""

import contextlib
import copy
import pickle
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from flow_machine import N_DEVICES, assert_in_order, lines
from hypothesis import given, settings

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import graph, lanes


class Point:
    """An event of a simulated lane."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self.synchronize: Callable[[], object] = self._passed.wait
        self.query = self._passed.is_set
        self.pass_ = self._passed.set


class Behind(flow.Device):
    """A device whose lanes run behind the host: each has a thread, which pauses before its work."""

    torch_device = torch.device("cpu")
    asynchronous = True

    def __init__(self, name: str) -> None:
        self.name = self.memory = name
        self.workers = dict.fromkeys(("compute", "communication", "fetch", "call"), 1)
        self._here = threading.local()

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        todo: queue.Queue[Callable[[], object] | None] = queue.Queue()
        pauses = random.Random(f"{self.name} {kind}")

        def work() -> None:
            while (function := todo.get()) is not None:
                if pauses.random() < 0.3:
                    time.sleep(pauses.random() * 2e-3)
                function()

        thread = threading.Thread(target=work)
        thread.start()
        stack.callback(thread.join)
        stack.callback(todo.put, None)
        self._here.todo = todo

    def launch(self, function: Callable[[], Any]) -> None:
        self._here.todo.put(function)

    def mark(self) -> Point:
        point = Point()
        self._here.todo.put(point.pass_)
        return point

    def follow(self, event: Any) -> None:
        self._here.todo.put(event.synchronize)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    fetch = put


@pytest.fixture(scope="module")
def engine() -> Iterator[flow.Engine]:
    """An engine with two asynchronous devices and a synchronous one."""
    devices = [*(Behind(f"behind:{n}") for n in range(N_DEVICES - 1)), *flow.cpus(1)]
    with flow.Engine(devices) as engine:
        yield engine


@pytest.fixture(params=["events", "host"])
def how(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield request.param
    flow.waiting("events")


@settings(deadline=None, max_examples=40)
@given(lines)
def test_any_program_gives_what_its_lines_give_in_order(engine: flow.Engine, program: list) -> None:
    for how in ("events", "host"):
        flow.waiting(how)  # type: ignore[arg-type]
        assert_in_order(engine, program)
    flow.waiting("events")


KINDS = {
    "read_after_write": ({"writes"}, {"reads"}),
    "write_after_read": ({"reads"}, {"writes"}),
    "write_after_write": ({"writes"}, {"writes"}),
}


def second_runs_before_first(engine: flow.Engine, first: set[str], second: set[str], other: int) -> bool:
    """Return whether the second runs while the first, on an asynchronous lane, waits for it."""
    ran = threading.Event()
    early: list[bool] = []
    x = engine.variable("x")
    engine.push(lambda: early.append(ran.wait(0.2)), **{key: [x] for key in first}, device=engine.devices[0])
    engine.push(ran.set, **{key: [x] for key in second}, device=engine.devices[other])
    engine.wait_all()
    return early[0]


@pytest.mark.parametrize("other", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_each_hazards_event_holds_and_is_needed(
    engine: flow.Engine, monkeypatch: pytest.MonkeyPatch, kind: str, other: int, how: Any
) -> None:
    """other: 1 is asynchronous, too; 2 is the host. The edge itself stays: only its event is left out."""
    flow.waiting(how)
    assert not second_runs_before_first(engine, *KINDS[kind], other)
    leave_out(monkeypatch, kind)
    assert second_runs_before_first(engine, *KINDS[kind], other)


def leave_out(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Leave out the events of edges that only this hazard requires."""
    kinds: dict[tuple[int, int], set[str]] = {}
    order, awaits = graph.order, lanes.awaits

    def noting(operation: Any, reads: Sequence[Any], writes: Sequence[Any]) -> Any:
        for name in KINDS:
            for uses in reads if name == "read_after_write" else writes:
                for before in getattr(graph, name)(uses):
                    kinds.setdefault((before.number, operation.number), set()).add(name)
        return order(operation, reads, writes)

    def without(operation: Any, before: Any) -> bool:
        return kinds.get((before.number, operation.number)) != {kind} and awaits(operation, before)

    monkeypatch.setattr(graph, "order", noting)
    monkeypatch.setattr(lanes, "awaits", without)


def test_on_one_lane_no_event_is_needed(engine: flow.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ran = engine.variable(), list[int]()
    first = engine.push(lambda: (time.sleep(0.02), ran.append(1)), writes=[x])
    second = engine.push(lambda: ran.append(2), writes=[x])
    assert not lanes.awaits(second, first)
    engine.wait_all()
    assert ran == [1, 2]


@pytest.mark.parametrize("way", ["fails behind its launch", "has not run"])
def test_a_failed_operation_keeps_the_order_of_those_around_it(
    engine: flow.Engine, monkeypatch: pytest.MonkeyPatch, way: str, how: Any
) -> None:
    """The last writer overwrites what a function still uses that was launched on another lane."""
    flow.waiting(how)
    device, ran, early = engine.devices[0], threading.Event(), list[bool]()
    launch = device.launch

    def failing(function: Callable[[], Any]) -> None:
        launch(function)
        if function is fail:
            raise ValueError("fork")

    def fail() -> None:
        if way == "fails behind its launch":
            early.append(ran.wait(0.2))

    monkeypatch.setattr(device, "launch", failing)
    x, missing = engine.variable("x"), engine.variable("missing")
    if way == "has not run":
        engine.push(lambda: early.append(ran.wait(0.2)), reads=[x], device=device, lane="call")
        engine.push(fail, writes=[missing], device=device)
        for _ in range(2):
            engine.push(int, reads=[missing], writes=[x], device=device)
    else:
        engine.push(fail, writes=[x], device=device, lane="call")
    engine.push(ran.set, writes=[x], device=device)
    with pytest.raises(flow.OperationError, match="fork"):
        engine.wait_all()
    assert early == [False]


def test_waiting_for_an_operation_waits_until_it_has_run(engine: flow.Engine) -> None:
    ran: list[str] = []
    operation = engine.push(lambda: (time.sleep(0.05), ran.append("it")))
    operation.wait()
    assert ran == ["it"] and operation.settled
    x = engine.variable()
    for _ in range(300):
        engine.push(lambda: None, reads=[x])
    engine.wait_all()
    engine.push(lambda: None, reads=[x])
    assert len(x.readers) <= 320


def test_ways_of_waiting_that_are_not_there() -> None:
    with pytest.raises(UserError, match=r"flow.waiting takes events or host, not 'never'"):
        flow.waiting("never")  # type: ignore[arg-type]


def test_a_device_is_copied_as_itself_and_never_pickled() -> None:
    """A device that two objects drive would have one lane and two sets of workers."""
    (device,) = flow.cpus(1)
    with flow.device(device):
        assert torch.ones(2).sum().item() == 2
    for make in (copy.copy, copy.deepcopy):
        assert make(device) is device
    with pytest.raises(UserError, match="a device can't be pickled: make one in the process that loads"):
        pickle.dumps([device])
