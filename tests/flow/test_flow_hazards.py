"""The engine computes what running a program line by line computes, without conflicting accesses."""

import threading
import time
from collections.abc import Iterator

import pytest
from flow_machine import N_DEVICES, assert_in_order, lines
from hypothesis import given, settings
from limits import limit

from lockstep import flow
from lockstep.flow import graph


@pytest.fixture(scope="module")
def engine() -> Iterator[flow.Engine]:
    with flow.Engine(flow.cpus(N_DEVICES)) as engine:
        yield engine


@settings(deadline=None, max_examples=60)
@given(lines)
def test_any_program_gives_what_its_lines_give_in_order(engine: flow.Engine, program: list) -> None:
    assert_in_order(engine, program)


def second_runs_before_first(engine: flow.Engine, first: dict, second: dict) -> bool:
    """Return whether the second of two operations runs while the first waits for it."""
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
    monkeypatch.setattr(graph, kind, lambda uses: [])
    assert second_runs_before_first(engine, first, second)


def test_readers_run_side_by_side(engine: flow.Engine) -> None:
    x, meeting = engine.variable(), threading.Barrier(2)
    for device in engine.devices[:2]:
        engine.push(lambda: meeting.wait(limit(20)), reads=[x], device=device)
    engine.wait_all()


def test_what_is_ready_overtakes_what_waits(engine: flow.Engine) -> None:
    """A ready operation overtakes waiting ones on its lane; ready ones keep program order."""
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


def test_the_lists_of_a_push_may_be_changed_afterwards(engine: flow.Engine) -> None:
    """A worker, which may begin later, reads what they were."""
    x, ran = engine.variable(), []
    for _ in range(50):
        writes, reads, after = [x], [x], list[flow.Operation]()
        engine.push(lambda: (time.sleep(1e-3), ran.append("writer")), [], writes)
        writes.clear()
        after.append(engine.push(lambda: ran.append("reader"), reads, device=engine.devices[1]))
        reads.clear()
        engine.push(lambda: ran.append("last"), after=after, device=engine.devices[2])
        after.clear()
        engine.wait_all()
    assert ran == ["writer", "reader", "last"] * 50


def test_finished_readers_are_forgotten(engine: flow.Engine) -> None:
    x = engine.variable()
    for _ in range(3000):
        engine.push(lambda: None, reads=[x]).wait()
    assert len(x.readers) < 100


class Number:
    """An operation to graph.order."""

    done = False


def test_edges_of_each_kind() -> None:
    x, y = graph.Uses(), graph.Uses()
    first, second, third, fourth = (Number() for _ in range(4))
    assert graph.order(first, [], [x]) == ([], [])
    assert graph.order(second, [x], [y]) == ([first], [])
    assert graph.order(third, [x], [x]) == ([first], [second, first])  # in place
    assert graph.order(fourth, [], [x, y]) == ([], [third, second])
