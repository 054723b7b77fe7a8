"""Failures reach the operations that need the missing value, and no others; nothing leaks."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import wait_until
from limits import limit
from torch.utils.checkpoint import checkpoint

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import graph, lanes
from lockstep.flow.devices import Cpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine() -> Iterator[flow.Engine]:
    engine = flow.Engine(flow.cpus(2))
    yield engine
    engine.close()


def fail() -> None:
    raise KeyError("spoon")


def test_a_failure_reaches_exactly_those_who_need_it(engine: flow.Engine) -> None:
    x, y, z = (engine.variable(name) for name in "xyz")
    ran: list[str] = []
    failing = engine.push(fail, reads=[x], writes=[y], name="stir")
    reader = engine.push(lambda: ran.append("reader"), reads=[y], writes=[z], device=engine.devices[1])
    behind = engine.push(lambda: ran.append("behind"), writes=[x])  # follows a reader of x that failed
    with pytest.raises(
        flow.OperationError, match=r"stir on cpu:0, recorded at .*: KeyError: 'spoon'"
    ) as caught:
        failing.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    for wait in (reader.wait, lambda: engine.wait(z), lambda: engine.wait(y)):
        with pytest.raises(flow.OperationError, match="stir"):
            wait()
    behind.wait()
    engine.push(lambda: ran.append("again"), writes=[y])  # without reading it
    engine.wait(y)
    engine.push(lambda: ran.append("read"), reads=[y]).wait()
    engine.wait_all()
    assert ran == ["behind", "again", "read"]


class Mute(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Leaving(Exception):
    """An error whose text ends the thread that makes it."""

    def __str__(self) -> str:
        raise SystemExit


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An error whose attributes cannot be assigned."""

    code: int


class Lost(Exception):
    """An error that has no traceback."""

    __traceback__ = "lost"  # type: ignore[assignment]


def test_any_error_fails_its_operation_only(engine: flow.Engine) -> None:
    """A worker that ended with a second error would leave all of its lane's operations waiting."""
    cycle = [KeyError("first"), KeyError("second")]
    for error, other in zip(cycle, reversed(cycle), strict=True):
        error.__context__ = other

    def throw(error: Exception) -> None:
        raise error

    for error, text in (
        (Mute(), "Mute: .making its text fails: ValueError"),
        (Leaving(), "Leaving: .making its text fails: SystemExit"),
        (Frozen(3), "Frozen: "),
        (Lost(), "its error cannot be described: AttributeError"),
        (cycle[0], "first"),
    ):
        operation = engine.push(partial(throw, error))
        wait_until(lambda operation=operation: operation.done, "the failed operation")
        with pytest.raises(flow.OperationError, match=text):
            operation.wait()
    assert engine.push(lambda: 7).wait() == 7


def test_lines_of_equal_functions_are_those_of_their_files(engine: flow.Engine) -> None:
    for file in ("one.py", "two.py"):
        scope: dict[str, Any] = {"fail": fail}
        exec(compile("def push(engine):\n    return engine.push(fail)", file, "exec"), scope)
        with pytest.raises(flow.OperationError, match=f"recorded at {file}:2: "):
            scope["push"](engine).wait()


def test_waiting_for_all_waits_for_all_engines_although_one_has_a_failure() -> None:
    with flow.Engine(flow.cpus(1)) as one, flow.Engine(flow.cpus(1)) as other:
        ran: list[Any] = []
        for each in (one, other):
            each.push(fail, name="stir")
            each.push(lambda: (time.sleep(0.2), ran.append(7)))
        with pytest.raises(flow.OperationError, match="stir") as caught:
            flow.wait_all()
        assert ran == [7, 7] and caught.value.__notes__[-1].startswith("also failed: stir")
        flow.wait_all()


def test_wait_all_raises_what_nobody_has_seen_once(engine: flow.Engine) -> None:
    engine.push(fail, name="first")
    engine.push(fail, name="second")
    with pytest.raises(flow.OperationError, match="first") as caught:
        engine.wait_all()
    assert "in fail" in caught.value.__notes__[0]
    (also,) = caught.value.__notes__[1:]
    assert also.startswith("also failed: second on cpu:0, recorded at ") and also.endswith(
        ": KeyError: 'spoon'"
    )
    engine.wait_all()


def test_arrays_name_the_users_line() -> None:
    with flow.Engine(flow.cpus(2)) as engine, flow.device(engine.devices[1]):
        x = torch.ones(3, 3)
        other = x * 2
        broken = x[torch.tensor([0, 9])]
        behind = broken + 1
        with pytest.raises(
            flow.OperationError, match=r"index on cpu:1, recorded at .*test_flow_failures.py:\d+: "
        ) as c:
            behind.numpy()
        assert isinstance(c.value.__cause__, IndexError)
        with pytest.raises(flow.OperationError, match="LinAlgError"):  # a check is waited for
            torch.linalg.cholesky(x - 5)
        assert other.sum().item() == 18
        with pytest.raises(flow.OperationError):
            broken.wait()
        broken.zero_()  # makes it whole
        assert broken.sum().item() == 0
        broken.add_(2)
        assert broken[0].tolist() == [2, 2, 2]
        reshaped = x[torch.tensor([[0, 9]])].view(2, 3)
        reshaped[0].zero_()  # a part of it
        with pytest.raises(flow.OperationError, match="index on cpu:1"):
            reshaped.wait()
        reshaped.zero_()
        assert reshaped.tolist() == [[0, 0, 0]] * 2


def test_a_pushed_function_names_the_users_line(engine: flow.Engine) -> None:
    failing = engine.push(fail, name="stir")
    match = (
        f"stir on cpu:0, recorded at .*test_flow_failures.py:{line_of('failing = engine.push(fail, name')}: "
    )
    with pytest.raises(flow.OperationError, match=match):
        failing.wait()


def test_backward_names_the_line_of_its_forward() -> None:
    with flow.Engine(flow.cpus(1)):
        x, numbers = flow.ones((3,)).requires_grad_(), flow.array([0, 1, 2])
        y = x.gather(0, numbers)
        numbers.data.fill_(9)  # autograd does not count this write
        y.sum().backward()
        assert x.grad is not None
        with pytest.raises(flow.OperationError, match=f"py:{line_of('y = x.gather(0, numbers)')}: "):
            x.grad.numpy()


def line_of(text: str) -> int:
    return next(
        n
        for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip().startswith(text)
    )


class Picking(torch.autograd.Function):
    """Its backward selects a row that does not exist."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad[flow.array([9])].expand(3)


def picking(grad: torch.Tensor) -> torch.Tensor:
    return grad[flow.array([9]), None].view(1).expand(3)


def doubled_and_hooked(weight: torch.Tensor) -> torch.Tensor:
    doubled = weight * 2
    doubled.register_hook(picking)
    return doubled


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (Picking.apply, "return grad[flow.array([9])].expand(3)"),
        (doubled_and_hooked, "return grad[flow.array([9]), None]"),
        (lambda weight: checkpoint(Picking.apply, weight, use_reentrant=False), "return grad[flow.array"),
    ],
)
def test_errors_in_a_custom_backward_or_a_hook_name_its_own_line(
    function: Callable[..., Any], line: str
) -> None:
    weight = flow.ones(3).requires_grad_()
    function(weight).sum().backward()
    with pytest.raises(
        flow.OperationError, match=rf"index on cpu, recorded at .*test_flow_failures.py:{line_of(line)}: "
    ):
        weight.grad.wait()  # type: ignore[union-attr]


def test_a_program_fails_where_it_fails_and_can_go_on() -> None:
    with flow.Engine(flow.cpus(1)):
        w = flow.ones((2, 2))

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            w.add_(1)
            return w[x].sum(), w.sum()

        good, bad = torch.tensor([0, 1]), torch.tensor([0, 2])
        program = flow.capture(step, good)
        assert [value.item() for value in program(good)] == [8, 8]
        with pytest.raises(flow.OperationError, match=r"index on cpu, recorded at .*IndexError"):
            program(bad)
        assert [value.item() for value in program(good)] == [16, 16]


def test_waiting_for_all_sees_an_operation_that_moves_from_the_queue_to_the_graph(
    engine: flow.Engine,
) -> None:
    """A worker links it right after `wait_all` has looked at the pending operations, which then lack it."""
    go, locked, unlock = threading.Event(), threading.Event(), threading.Event()

    class Pending(set[flow.Operation]):
        def __len__(self) -> int:
            n = super().__len__()
            unlock.set()
            while graph.any_submitted():
                time.sleep(1e-3)
            return n

    def hold_the_graph() -> None:
        with graph.GRAPH:
            locked.set()
            unlock.wait(limit(20))

    engine.push(int).wait()
    holding = threading.Thread(target=hold_the_graph)
    holding.start()
    assert locked.wait(limit(20))
    running = engine.push(go.wait)
    engine.pending = Pending(engine.pending)
    try:
        assert not engine._idle()
    finally:
        unlock.set()
        go.set()
        holding.join()
    engine.wait_all()
    assert running.done


def test_a_copy_that_failed_is_made_again() -> None:
    """A device that had no memory for it may have some later."""

    class Full(Cpu):
        memory = "full"
        is_full = True

        def put(self, value: torch.Tensor) -> torch.Tensor:
            if self.is_full:
                raise torch.OutOfMemoryError("out of memory")
            return value.clone()

    (near,) = flow.cpus(1, threads=1)
    full = Full("full", near.cores, 1)
    with flow.Engine([near, full]):
        x = flow.ones(3)
        with flow.device(full):
            failing = x * 2
            with pytest.raises(flow.OperationError, match=r"copy on full.*OutOfMemoryError"):
                failing.wait()
            full.is_full = False
            assert (x * 2).tolist() == [2, 2, 2]


def test_waiting_for_all_sees_a_failure_as_soon_as_nothing_is_pending(engine: flow.Engine) -> None:
    """The worker is slow right after it has removed the failed operation from the pending ones."""

    class Pending(set[flow.Operation]):
        def discard(self, operation: flow.Operation) -> None:
            super().discard(operation)
            time.sleep(0.3)

    engine.pending = Pending(engine.pending)
    failing = engine.push(fail)
    wait_until(lambda: failing.done and not engine.pending, "the failing operation")
    with pytest.raises(flow.OperationError, match="spoon"):
        engine.wait_all()


def test_waiting_for_what_needs_the_waiting_operation_is_refused(engine: flow.Engine) -> None:
    """The function reads an array that it writes by its outer name, on the lane of another device."""
    first, second = engine.devices
    with flow.device(first):
        x = flow.ones(3)

    def double(value: torch.Tensor) -> list[float]:
        value.mul_(2)
        return x.tolist()

    with pytest.raises(flow.OperationError, match="waits for fetch on cpu:0, which may be behind it"):
        flow.call(double, x, writes=[x], device=second).result()
    made = engine.variable()

    def behind() -> None:
        engine.push(int, writes=[made], device=first)
        engine.push(int, reads=[made], device=second).wait()

    with pytest.raises(flow.OperationError, match="on cpu:1, which may be behind it"):
        engine.push(behind, device=first).wait()
    assert engine.push(lambda: engine.push(lambda: 7, device=second).wait(), device=first).wait() == 7


@pytest.mark.parametrize("workers", [1, 2])
def test_operations_whose_workers_wait_for_each_others_lanes_are_refused(workers: int) -> None:
    """Each waits for an operation that is not ready yet, and then would be behind the other one."""
    devices = flow.cpus(2, threads=1, workers=workers)
    with flow.Engine(devices) as engine:
        go, slow = threading.Event(), engine.variable()
        engine.push(go.wait, writes=[slow], lane="call")
        ready = [engine.push(lambda n=n: n, reads=[slow], device=devices[n]) for n in range(2)]
        crossing = [
            engine.push(ready[1 - n].wait, device=devices[n]) for n in range(2) for _ in range(workers)
        ]
        wait_until(lambda: any(each.done for each in crossing), "the refusal")
        go.set()
        for each in crossing:
            wait_for_done(each)
        (failure,) = [each.failure for each in crossing if each.failure is not None]
        assert "which may be behind it" in failure.text
        failure.seen = True
        x = engine.variable()
        waiting = engine.push(
            lambda: engine.push(int, reads=[x], device=devices[1]).wait(), writes=[x], device=devices[0]
        )
        wait_for_done(waiting)
        with pytest.raises(flow.OperationError, match="which may be behind it"):
            waiting.wait()


def wait_for_done(operation: flow.Operation) -> None:
    """Check that an operation ends."""
    wait_until(lambda: operation.done, "an operation", 20)


def test_many_workers_wait_at_the_same_time() -> None:
    devices = flow.cpus(5, threads=1)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with flow.Engine(devices) as engine:

            def wait() -> None:
                for _ in range(200):
                    engine.push(int, device=devices[4]).wait()

            waiting = [engine.push(wait, device=device) for device in devices[:4] for _ in range(5)]
            for each in waiting:
                each.wait()
    finally:
        sys.setswitchinterval(interval)


def test_waiting_inside_an_operation_of_the_same_device_is_refused(engine: flow.Engine) -> None:
    first, second = engine.devices
    never = threading.Event()
    blocked = engine.push(never.wait, device=first)
    with pytest.raises(flow.OperationError, match="waits for operation on the same device"):
        engine.push(
            lambda: engine.push(int, device=first, after=[blocked]).wait(), device=first, lane="call"
        ).wait()
    with pytest.raises(flow.OperationError, match="waits for all"):
        engine.push(engine.wait_all, device=second).wait()
    with pytest.raises(flow.OperationError, match="can't close the engine"):
        engine.push(engine.close, device=second).wait()
    assert (
        engine.push(lambda: engine.push(lambda: 7, device=first, lane="call").wait(), device=second).wait()
        == 7
    )
    never.set()


def test_bad_input_is_one_line() -> None:
    engine = flow.Engine(flow.cpus(1))
    for wrong, words in (
        (lambda: flow.Engine([]), "an engine needs devices"),
        (lambda: flow.Engine(flow.cpus(1), run_ahead=0), "1 or more, not 0"),
        (lambda: flow.Engine(flow.cpus(1), run_ahead="many"), "1 or more, not many"),
        (lambda: flow.Engine(flow.cpus(1)[0]), "needs devices, as a list"),
        (lambda: flow.Engine(["cpu"]), "'cpu' is not a device"),
        (lambda: flow.Engine(engine.devices), "belongs to another engine"),
        (lambda: flow.cpus(0), "n, the number of devices, is 1 or more, not 0"),
        (lambda: flow.cpus(1, threads=100_000), "threads is at most 1024, not 100000"),
        (lambda: flow.cpus(1, threads=0), "threads is 1 or more"),
        (lambda: flow.set_device("cpu"), "is not a device"),
        (lambda: flow.cpus(2.5), "1 or more, not 2.5"),
        (lambda: flow.cuda(3), r"cuda:3.*flow.cpus\(n\) makes devices"),
        (lambda: flow.cpus(None), "1 or more, not None"),
        (lambda: flow.cuda(-1), "counted from 0"),
        (lambda: flow.cuda("0"), "counted from 0, so there is no '0'"),
        (lambda: flow.array(None), "can't make a tensor of NoneType"),
        (lambda: flow.arrays(torch.ones(1)), "takes a module, not Tensor"),
        (lambda: flow.call(print, device="cpu"), "'cpu' is not a device"),
        (lambda: flow.call(None), "flow.call: None is not a function"),
        (lambda: flow.call(print, writes=None), "writes is a list of arrays, not None"),
        (lambda: flow.capture(None), "flow.capture: None is not a function"),
        (lambda: flow.capture(lambda: 1)(order=3), "order: give each of the numbers"),
        (lambda: engine.wait("x"), "wait: 'x' is not a variable"),
        (lambda: flow.send(torch.ones(1), 0), "flow.send: Tensor is not an array"),
        (lambda: flow.ones((1,)).pin_memory(), "_pin_memory: an array can't be given other memory"),
        (lambda: engine.push(None), "push: None is not a function"),
        (lambda: engine.push(int, writes=engine.variable()), "writes is a list"),
        (lambda: engine.push(int, after=[1]), "1 is not an operation"),
        (lambda: engine.push(int, reads=["x"]), "'x' is not a variable"),
        (lambda: flow.send(flow.ones((1,)), 0), "flow.send needs other processes"),
        (
            lambda: engine.push(int, device=flow.cpus(3)[2]),
            "cpu:2 is not a device of this engine, which has cpu",
        ),
    ):
        with pytest.raises(UserError, match=words) as caught:
            wrong()
        assert "\n" not in str(caught.value)
    with flow.recording() as trace:
        engine.push(int).wait()
    with pytest.raises(UserError, match=r"x.png: a trace is saved as .json, .html, .dot, not .png"):
        trace.save("x.png")
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="the engine is closed"):
        engine.push(int)


def test_a_closed_engine_takes_no_device() -> None:
    (engine := flow.Engine(flow.cpus(1))).close()
    (device,) = flow.cpus(1)
    with pytest.raises(UserError, match="the engine is closed: cpu can't be added"):
        engine.add(device)
    with flow.Engine([device]) as other:  # the device is free
        assert other.push(int).result() == 0


def workers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("flow cpu") and each.is_alive()}


def test_an_engine_that_cannot_be_made_leaves_its_devices_free() -> None:
    devices = flow.cpus(2)
    with flow.Engine(devices[1:]), pytest.raises(UserError, match="belongs to another engine"):
        flow.Engine(devices)
    with flow.Engine(devices) as engine:
        assert engine.push(lambda: 7).wait() == 7


def test_closing_cancels_what_has_not_begun_and_joins() -> None:
    flow.ones((1,)).wait()  # another test may just have started that worker
    others = workers()  # of the engine that has what was given to none
    engine = flow.Engine(flow.cpus(2))
    began, go, ran = threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        go.wait(limit(20))
        ran.append("slow")

    x = engine.variable()
    running = engine.push(slow, writes=[x])
    waiting = engine.push(lambda: ran.append("never"), reads=[x])
    began.wait(limit(20))
    threading.Timer(0.1, go.set).start()
    engine.close()
    assert ran == ["slow"] and running.done and waiting.done
    running.wait()
    with pytest.raises(flow.OperationError, match="closed before it began"):
        waiting.wait()
    assert not workers() - others


def test_a_program_whose_engine_closes_before_its_submission_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = flow.cpus(1)
    engine = flow.Engine(devices)
    with flow.device(devices[0]):
        program = flow.capture(lambda x: x + 1, torch.ones(2))
    start = lanes.Lane.start

    def close_behind(lane: lanes.Lane) -> None:
        """Do what another thread may do at that moment."""
        start(lane)
        if lane.kind == "communication":  # the last lane that the program asks for
            engine.close()

    monkeypatch.setattr(lanes.Lane, "start", close_behind)
    with pytest.raises(UserError, match="the engine is closed"):
        program(torch.ones(2))
    assert not engine.pending


class Broken(Cpu):
    """A device whose workers cannot begin."""

    def __init__(self, workers: int) -> None:
        super().__init__("broken", frozenset(os.sched_getaffinity(0)), 1, workers)

    def enter(self, kind: str, stack: contextlib.ExitStack) -> None:
        raise OSError("no such core")


@pytest.mark.parametrize("n_workers", [1, 2])
def test_operations_fail_on_a_lane_whose_workers_cannot_begin(n_workers: int) -> None:
    devices = [Broken(n_workers), *flow.cpus(1)]
    engine, others = flow.Engine(devices), workers()
    x, began = engine.variable("x"), time.perf_counter()
    failing = engine.push(int, writes=[x], name="first")
    after = engine.push(int, reads=[x], device=devices[1])
    for wait in (failing.wait, after.wait, lambda: engine.wait(x), engine.push(int, name="first").wait):
        match = "first on broken.*a worker of broken compute can't begin: OSError: no such core"
        with pytest.raises(flow.OperationError, match=match):
            wait()
    assert engine.push(lambda: 7, device=devices[1]).wait() == 7
    engine.wait_all()
    engine.close()
    assert time.perf_counter() - began < limit(5) and not workers() - others


def test_without_threads_for_workers_operations_run_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread.start, which the device calls as well, fails in the thread that starts a worker."""
    start = threading.Thread.start

    def fail_in(names: tuple[str, ...]) -> None:
        def start_or_fail(thread: threading.Thread) -> None:
            if thread.name.startswith(names):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_fail)

    device = Cpu("cpu", frozenset(os.sched_getaffinity(0)), 1)
    for names in (("flow cpu",), ("flow cpu", "Thread-")):
        fail_in(names)
        engine = flow.Engine([device])
        operation = engine.push(lambda: 7)
        if len(names) == 1:
            assert operation.wait() == 7
        else:
            with pytest.raises(flow.OperationError, match="can't begin: RuntimeError: can't start new thr"):
                operation.wait()
        engine.close()
        monkeypatch.undo()


@pytest.mark.parametrize("what", ["Cpu.enter", "threading.Thread.start"])
@pytest.mark.slow
def test_a_program_whose_workers_cannot_begin_ends(what: str) -> None:
    done = run_python(
        "import threading\nfrom lockstep import flow\nfrom lockstep.flow.devices import Cpu\n"
        "def fail(*_): raise RuntimeError('can not')\n"
        "x = flow.array([1.0])\n"
        f"{what} = fail\n"
        "try: (x + 1).numpy()\n"
        "except flow.OperationError as error: print(error.__cause__, flush=True)",
        limit(60),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("can't begin: RuntimeError: can not\n")


def test_closing_cancels_what_waits_on_one_device_while_another_is_busy() -> None:
    engine, ran, go = flow.Engine(flow.cpus(2)), [], threading.Event()

    def until_closing() -> None:
        wait_until(lambda: engine.closed, "the engine's end")
        time.sleep(0.02)

    busy = engine.push(partial(go.wait, limit(20)))
    wait_until(lambda: busy.started, "the first operation")
    engine.push(until_closing, device=engine.devices[1])
    engine.push(lambda: ran.append(1), device=engine.devices[1])
    threading.Timer(0.2, go.set).start()
    engine.close()
    assert not ran


def test_closing_cancels_that_for_which_an_operation_waits() -> None:
    """It waits for another engine's operation, which runs for longer."""
    devices, (other,) = flow.cpus(2), flow.cpus(1)
    long = threading.Event()
    with flow.Engine([other]) as far:
        engine = flow.Engine(devices)
        before = far.push(long.wait)
        pushed = list[flow.Operation]()

        def wait() -> None:
            pushed.append(engine.push(int, device=devices[1], after=[before]))
            pushed[0].wait()

        waiting = engine.push(wait)
        wait_until(lambda: bool(pushed), "the push")
        time.sleep(0.1)  # until the other device's worker is idle again
        closing = threading.Thread(target=engine.close)
        closing.start()
        try:
            wait_for_done(waiting)
        finally:
            long.set()
            closing.join()
        with pytest.raises(flow.OperationError, match="the engine was closed before it began"):
            waiting.wait()


def test_an_error_inside_closes_at_once() -> None:
    ran: list[int] = []
    with pytest.raises(ZeroDivisionError), flow.Engine(flow.cpus(1)) as engine:
        engine.push(lambda: time.sleep(0.1))
        engine.push(lambda: ran.append(1))
        raise ZeroDivisionError
    assert not ran


def test_run_ahead_bounds_what_is_pending() -> None:
    with flow.Engine(flow.cpus(1), run_ahead=20) as engine:
        pending, most = [0], [0]

        def count() -> None:
            pending[0] -= 1

        for _ in range(300):
            engine.push(count)
            pending[0] += 1
            most[0] = max(most[0], pending[0])
    assert most[0] <= 22 and pending[0] == 0


def test_a_push_does_not_wait_for_what_another_engine_has_not_begun() -> None:
    """That engine's operations do not wake it, so it would look again after 0.2 s only."""
    with flow.Engine(flow.cpus(1), run_ahead=1) as one, flow.Engine(flow.cpus(1), run_ahead=1) as two:
        one.push(int).wait()
        two.push(int).wait()
        start = time.monotonic()
        for number in range(100):
            (one, two)[number % 2].push(int)
        assert time.monotonic() - start < limit(2)  # 20 s, if each push waits


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C even if a shell started the tests in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_heard_in_every_wait(engine: flow.Engine, hears_ctrl_c: None) -> None:
    go = threading.Event()
    x = engine.variable()
    hanging = engine.push(go.wait, writes=[x])
    small = flow.Engine(flow.cpus(1), run_ahead=1)
    small.push(go.wait)
    for wait in (hanging.wait, lambda: engine.wait(x), engine.wait_all, lambda: small.push(int)):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait()
    go.set()
    small.close()
    engine.wait_all()


def test_nothing_stays_alive(engine: flow.Engine) -> None:
    """Functions and their values are released after they ran, failed or were cancelled."""

    class Held:
        pass

    def push(fails: bool, after: list[flow.Operation]) -> tuple[flow.Operation, weakref.ref[Held]]:
        held = Held()
        return engine.push(lambda: held.__dict__["x"] if fails else held.__dict__, after=after), weakref.ref(
            held
        )

    operations = [push(fails=False, after=[]), push(fails=True, after=[])]
    for operation, _ in operations:
        with contextlib.suppress(flow.OperationError):
            operation.wait()
    never = threading.Event()
    blocked = engine.push(lambda: never.wait(0.3))
    operations.append(push(fails=False, after=[blocked]))
    engine.close()
    gc.collect()
    assert [held() for _, held in operations] == [None, None, None]


def test_only_the_reader_keeps_a_value_that_was_read(engine: flow.Engine) -> None:
    """The array that it was read from remembers the operations that have read it."""
    with flow.device(engine.devices[0]):
        x = flow.ones((3,))
        program = flow.capture(lambda: x)
        for read in (
            x.tensor,
            lambda: torch.nonzero(x).memory.cell.value,  # its shape depends on values
            x[0].item,
            program,
        ):
            kept = weakref.ref(value) if isinstance(value := read(), torch.Tensor) else None
            del value
            gc.collect()
            assert kept is None or kept() is None
        assert all(reader.result_value is None for reader in x.memory.readers)


def test_thread_counts_of_others_stay_as_they_are() -> None:
    def counts() -> tuple[int, int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return torch.get_num_threads(), found[0]

    before, cores = counts(), os.sched_getaffinity(0)
    made = [Cpu("one", frozenset(list(cores)[:1]), 1), Cpu("three", frozenset(cores), 3)]
    with flow.Engine(made) as engine:

        def inside() -> tuple[int, set[int]]:
            torch.ones(300, 300) @ torch.ones(300, 300)
            return torch.get_num_threads(), os.sched_getaffinity(0)

        assert engine.push(inside, device=made[0]).wait() == (1, set(made[0].cores))
        assert engine.push(inside, device=made[1]).wait() == (3, set(made[1].cores))
        assert counts() == before
    assert counts() == before and os.sched_getaffinity(0) == cores


def test_a_thread_that_first_computes_while_a_worker_begins_keeps_its_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch gives it the number that was set last, which is the worker's at that moment."""
    before, set_number, found = torch.get_num_threads(), torch.set_num_threads, []
    changed, computed = threading.Event(), threading.Event()

    def slowly(number: int) -> None:
        set_number(number)
        changed.set()
        assert computed.wait(limit(60))

    def compute() -> None:
        with flow.Engine(flow.cpus(1, threads=before + 1)) as engine:
            engine.push(int)
            assert changed.wait(limit(60))
            found.append(torch.get_num_threads())
            computed.set()

    monkeypatch.setattr(torch, "set_num_threads", slowly)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [before]


@pytest.mark.slow
def test_square_roots_are_prepared_before_any_worker_begins() -> None:
    """Two first calls at the same time in a process rarely have other bits, so the call itself is tested."""
    done = run_python(
        "import torch\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
        "class Roots(TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, function, types, args=(), kwargs=None):\n"
        "        if function is torch.ops.aten.sqrt.default:\n"
        "            print(args[0].dtype, args[0].device)\n"
        "        return function(*args, **(kwargs or {}))\n"
        "with Roots():\n"
        "    import lockstep.flow\n",
        limit(60),
    )
    assert done.stdout.splitlines() == ["torch.float32 cpu", "torch.float64 cpu"], done.stderr


def test_devices_of_one_name_have_lanes_of_their_own_in_a_trace() -> None:
    first, second = flow.Engine(flow.cpus(1)), flow.Engine(flow.cpus(1))
    with first, second, flow.recording() as trace:
        for engine in (first, second, first):
            engine.push(lambda: None)
        flow.wait_all()
    names = [operation.lane for operation in trace.operations]
    assert names == ["cpu compute", "cpu compute #2", "cpu compute"]


def test_devices_split_the_cores() -> None:
    cores = os.sched_getaffinity(0)
    for n in (1, 2, 3, 7):
        split = [device.cores for device in flow.cpus(n)]
        assert len(split) == n and all(split) and set().union(*split) <= cores
        if n <= len(cores):
            assert sum(len(part) for part in split) == len(set().union(*split))


def run_python(program: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.slow
def test_leaving_with_work_pending() -> None:
    done = run_python(
        "import time\nfrom lockstep import flow\n"
        "x = flow.array([1.0])\n"
        "for _ in range(100): flow.call(lambda v: time.sleep(0.2), x, writes=[x])\n"
        "print('leaving', flush=True)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


@pytest.mark.slow
def test_ctrl_c_ends_a_program_that_waits() -> None:
    program = (
        "import signal, time\nfrom lockstep import flow\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "engine = flow.Engine(flow.cpus(2))\n"
        "engine.push(lambda: (print('began', flush=True), time.sleep(1)))\n"
        "for _ in range(1000): engine.push(lambda: time.sleep(1))\n"
        "engine.wait_all()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=limit(60))
    assert process.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")
