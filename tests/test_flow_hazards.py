"""The engine: any program gives what running it line by line gives, and nobody writes what another uses."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit

from lockstep import flow
from lockstep.flow import hazards

N_VARIABLES, N_DEVICES = 5, 3
numbers = st.integers(0, N_VARIABLES - 1)
lines = st.lists(
    st.tuples(
        st.lists(numbers, max_size=3, unique=True),
        st.lists(numbers, min_size=1, max_size=2, unique=True),
        st.integers(0, N_DEVICES - 1),
        st.sampled_from(["compute", "communication"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@dataclass
class Watch:
    """Who uses a variable at the moment."""

    readers: int = 0
    writers: int = 0


class Machine:
    """Variables with values, whose every use is watched."""

    def __init__(self, engine: flow.Engine) -> None:
        self.engine, self.lock = engine, threading.Lock()
        self.variables = [engine.variable(f"x{n}") for n in range(N_VARIABLES)]
        self.values = [np.full(4, n, dtype=np.int64) for n in range(N_VARIABLES)]
        self.watches = [Watch() for _ in range(N_VARIABLES)]
        self.conflicts: list[str] = []

    def push(self, number: int, line: tuple[list[int], list[int], int, str, int]) -> None:
        reads, writes, device, lane, pause = line

        def function() -> None:
            self._count(reads, writes, 1)
            if pause:
                time.sleep(pause * 2e-4)
            compute(self.values, number, reads, writes)
            self._count(reads, writes, -1)

        variables = self.variables
        self.engine.push(
            function,
            [variables[n] for n in reads],
            [variables[n] for n in writes],
            self.engine.devices[device],
            lane=lane,
        )

    def _count(self, reads: list[int], writes: list[int], step: int) -> None:
        with self.lock:
            for n in reads:
                if n not in writes:
                    self.watches[n].readers += step
            for n in writes:
                self.watches[n].writers += step
            for n, watch in enumerate(self.watches):
                if watch.writers > 1 or (watch.writers and watch.readers):
                    self.conflicts.append(f"x{n}: {watch}")


def compute(values: list[np.ndarray], number: int, reads: list[int], writes: list[int]) -> None:
    """What a line does: the order of lines that touch the same variables shows in the values."""
    total = sum((values[n] for n in reads), np.zeros(4, dtype=np.int64))
    for n in writes:
        values[n] = (total * 31 + number + n) % 1_000_003


def assert_in_order(engine: flow.Engine, program: list) -> None:
    """Pushes the lines of a program: none meets another, and what comes out is what they give in order."""
    machine = Machine(engine)
    expected = [np.full(4, n, dtype=np.int64) for n in range(N_VARIABLES)]
    for number, line in enumerate(program):
        machine.push(number, line)
        compute(expected, number, line[0], line[1])
    engine.wait_all()
    assert not machine.conflicts
    np.testing.assert_array_equal(machine.values, expected)


@pytest.fixture(scope="module")
def engine() -> Iterator[flow.Engine]:
    with flow.Engine(flow.cpus(N_DEVICES)) as engine:
        yield engine


@settings(deadline=None, max_examples=60)
@given(lines)
def test_any_program_gives_what_its_lines_give_in_order(engine: flow.Engine, program: list) -> None:
    assert_in_order(engine, program)


def second_runs_before_first(engine: flow.Engine, first: dict, second: dict) -> bool:
    """Pushes two operations on two devices; the first waits a while for the second to run."""
    ran = threading.Event()
    early: list[bool] = []
    x = engine.variable("x")
    uses = [{key: [x] for key in operation} for operation in (first, second)]
    engine.push(lambda: early.append(ran.wait(0.2)), **uses[0], device=engine.devices[0])
    engine.push(ran.set, **uses[1], device=engine.devices[1])
    engine.wait_all()
    return early[0]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("read_after_write", {"writes"}, {"reads"}),
        ("write_after_read", {"reads"}, {"writes"}),
        ("write_after_write", {"writes"}, {"writes"}),
    ],
)
def test_each_hazard_holds_and_is_needed(
    engine: flow.Engine, monkeypatch: pytest.MonkeyPatch, kind: str, first: dict, second: dict
) -> None:
    assert not second_runs_before_first(engine, first, second)
    monkeypatch.setattr(hazards, kind, lambda uses: [])
    assert second_runs_before_first(engine, first, second)


def test_readers_run_side_by_side(engine: flow.Engine) -> None:
    x, meeting = engine.variable(), threading.Barrier(2)
    for device in engine.devices[:2]:
        engine.push(lambda: meeting.wait(limit(20)), reads=[x], device=device)
    engine.wait_all()


def test_what_is_ready_overtakes_what_waits(engine: flow.Engine) -> None:
    """On one lane, though it was pushed later; among those that are ready, the first comes first."""
    slow, x, ran = threading.Event(), engine.variable(), []
    engine.push(lambda: slow.wait(limit(20)), writes=[x], device=engine.devices[0])
    engine.push(lambda: ran.append("behind"), reads=[x], device=engine.devices[1])
    overtaking = [engine.push(lambda n=n: ran.append(n), device=engine.devices[1]) for n in range(5)]
    for operation in overtaking:
        operation.wait()
    slow.set()
    engine.wait_all()
    assert ran == [0, 1, 2, 3, 4, "behind"]


def test_explicit_predecessors(engine: flow.Engine) -> None:
    ran: list[str] = []
    first = engine.push(lambda: (time.sleep(0.02), ran.append("first")), device=engine.devices[0])
    engine.push(lambda: ran.append("second"), device=engine.devices[1], after=[first]).wait()
    assert ran == ["first", "second"]


def test_finished_readers_are_forgotten(engine: flow.Engine) -> None:
    x = engine.variable()
    for _ in range(3000):
        engine.push(lambda: None, reads=[x]).wait()
    assert len(x.readers) < 100


class Number:
    """An operation to hazards.order."""

    done = False


def test_edges_of_each_kind() -> None:
    x, y = hazards.Uses(), hazards.Uses()
    first, second, third, fourth = (Number() for _ in range(4))
    assert hazards.order(first, [], [x]) == ([], [])
    assert hazards.order(second, [x], [y]) == ([first], [])
    assert hazards.order(third, [x], [x]) == ([first], [second, first])  # in place
    assert hazards.order(fourth, [], [x, y]) == ([], [third, second])
