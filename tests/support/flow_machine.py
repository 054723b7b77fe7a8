"""Random programs for flow's engine, and a machine that runs them and detects conflicting accesses."""

import threading
import time
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from lockstep import flow

N_VARIABLES = 5
N_DEVICES = 3
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
    """The number of operations that use a variable at the moment."""

    readers: int = 0
    writers: int = 0


class Machine:
    """Variables with values; it records concurrent accesses that conflict."""

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
    """Execute a line. The order of lines that use the same variables changes the values."""
    total = sum((values[n] for n in reads), np.zeros(4, dtype=np.int64))
    for n in writes:
        values[n] = (total * 31 + number + n) % 1_000_003


def assert_in_order(engine: flow.Engine, program: list) -> None:
    """Run a program; assert that no accesses conflict and that the result is that of sequential execution."""
    machine = Machine(engine)
    expected = [np.full(4, n, dtype=np.int64) for n in range(N_VARIABLES)]
    for number, line in enumerate(program):
        machine.push(number, line)
        compute(expected, number, line[0], line[1])
    engine.wait_all()
    assert not machine.conflicts
    np.testing.assert_array_equal(machine.values, expected)
