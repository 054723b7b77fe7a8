"""Signal handlers, finalizers and forks at any moment: nothing hangs, and all values stay right."""

import _thread
import contextlib
import copy
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from conftest import wait_until
from flow_programs import run_program
from limits import limit
from torch._subclasses import fake_tensor

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import gpu, graph, instructions, placement, private, trace
from lockstep.flow.engine import in_dry_run


class Interrupted(Exception):
    """Raised by the tests' signal handlers."""


@contextlib.contextmanager
def every(seconds: float, handle: Callable[[], object]) -> Iterator[None]:
    """Call a signal handler repeatedly inside, this long after it returned."""

    def handler(*_: Any) -> None:
        handle()
        signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_for(function: Callable[[], object], seconds: float = 20) -> None:
    """Check that function() returns in time. It runs in a thread, so that a hang can be left."""
    done = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(limit(seconds)), "it hangs"
    if failed:
        raise failed[0]


def interrupted(work: Callable[[], object], times: int, seconds: float = 0.002) -> None:
    """Call work() repeatedly until it was interrupted so many times, at random moments."""
    came = [0]
    work()  # once before: a thread that is interrupted while Python starts it prints an error

    def handler(*_: Any) -> None:
        came[0] += 1
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    moments, deadline = random.Random(0), time.monotonic() + limit(60)
    with discarding():
        for number in range(times):
            assert time.monotonic() < deadline
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds * (0.05 + moments.random()))
                while True:  # not `while came[0] <= number`: Python 3.13 does not catch what it raises
                    work()
                    if came[0] > number:
                        break
            except Interrupted:
                pass
    signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def discarding() -> Iterator[None]:
    """Accept inside that a finalizer or weakref callback swallows Interrupted.

    Python runs those at any moment, the standard library's too, and discards what a handler raises in them.
    """
    report = sys.unraisablehook
    sys.unraisablehook = lambda each: None if each.exc_type is Interrupted else report(each)
    try:
        yield
    finally:
        sys.unraisablehook = report


def test_interrupted_pushes_leave_nothing_pending() -> None:
    with flow.Engine(flow.cpus(2), run_ahead=50) as engine:
        x, ran, pushed = engine.variable(), [0], [0]

        def add() -> None:
            ran[0] += 1

        def work() -> None:
            pushed[0] += 1
            engine.push(add, reads=[x], writes=[x], device=engine.devices[pushed[0] % 2])
            if pushed[0] % 7 == 0:
                engine.wait(x)

        interrupted(work, 300)
        wait_for(engine.wait_all)
        assert not engine.pending and not graph.any_submitted()
        assert pushed[0] - 300 <= ran[0] <= pushed[0]


def test_an_interrupt_while_workers_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    start = _thread.start_new_thread

    def interrupted_start(*arguments: Any) -> None:
        monkeypatch.undo()
        start(*arguments)
        time.sleep(0.1)
        raise Interrupted

    with flow.Engine(flow.cpus(1, workers=2)) as engine:
        monkeypatch.setattr(_thread, "start_new_thread", interrupted_start)
        with pytest.raises(Interrupted):
            engine.push(int)
        assert engine.push(lambda: 7).wait() == 7


def test_an_interrupted_close_frees_the_devices_and_can_be_repeated() -> None:
    def interrupt() -> None:
        raise Interrupted

    devices, begins, ends = flow.cpus(2), threading.Event(), threading.Event()
    engine = flow.Engine(devices)
    engine.push(lambda: begins.set() or ends.wait())
    assert begins.wait(limit(20))
    with pytest.raises(Interrupted), every(0.2, interrupt):
        engine.close()
    with flow.Engine(devices) as other:
        assert other.push(lambda: 7).wait() == 7
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()  # the operation still runs
    ends.set()
    closing.join(limit(20))
    assert not closing.is_alive() and not engine.pending


def test_interrupted_arithmetic_keeps_its_values() -> None:
    with flow.Engine(flow.cpus(2)) as engine:
        with flow.device(engine.devices[1]):
            y = torch.full((8,), 4.0)
        a, sizes = torch.full((8,), 3.0), iter(range(10**9))

        def work() -> None:
            x = flow.array(a)
            assert (x + y * 2).view(2, 4)[1:].sum().item() == 44
            assert (x.sum() * torch.ones(next(sizes) % 100 + 1)).sum().item() % 24 == 0

        interrupted(work, 300)
        wait_for(flow.wait_all)
        assert type(torch.zeros(2)) is torch.Tensor
        with flow.device(engine.devices[0]):
            assert type(torch.zeros(2)) is flow.Array


def test_an_interrupted_program_runs_whole_or_not_at_all() -> None:
    with flow.Engine(flow.cpus(2)) as engine:
        arrays = []
        for device in engine.devices:
            with flow.device(device):
                arrays.append(flow.zeros((4,)))

        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(10):
                for array in arrays:
                    array.add_(x)
            return arrays[0].sum()

        one = torch.ones(4)
        program = flow.capture(step, one)

        def work() -> None:
            found = program(one)
            assert found.item() % 40 == 0

        interrupted(work, 200, 0.005)
        wait_for(flow.wait_all)
        values = [array.tolist() for array in arrays]
        assert values[0] == values[1] and values[0][0] % 10 == 0 and len(set(values[0])) == 1


def test_an_interrupted_device_scope_ends() -> None:
    """Whenever the interrupt comes, no mode is left on afterwards, and none is missing."""
    devices = flow.cpus(2)
    with flow.Engine(devices):
        outer = flow.current_device()

        def work() -> None:
            assert flow.current_device() is outer and type(torch.zeros(2)) is torch.Tensor
            assert not torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
            with flow.device(devices[1]):
                with private.without_modes():
                    assert type(torch.zeros(2)) is torch.Tensor
                with flow.device(devices[0]):
                    pass
                assert flow.current_device() is devices[1] and type(torch.zeros(2)) is flow.Array

        interrupted(work, 500)
        work()


def interrupted_at_each_call(work: Callable[[], object], check: Callable[[], object]) -> list[Interrupted]:
    """Call work() until it is not interrupted: the n-th time, its n-th call of a Python function is."""
    kept = []  # a traceback keeps what a frame has opened, as a notebook's last error does
    for number in itertools.count():
        n_calls = [0]
        try:
            interrupted_at_call(work, number, n_calls)
        except Interrupted as error:
            kept.append(error)
        check()
        if n_calls[0] <= number:
            return kept
    raise AssertionError("work() ends")


def interrupted_at_call(work: Callable[[], object], number: int, n_calls: list[int]) -> None:
    """Call work(); raise Interrupted when it has called so many Python functions. Count them in `n_calls`."""

    def trace(frame: Any, event: str, argument: object) -> None:
        n_calls[0] += 1
        if n_calls[0] > number:
            sys.settrace(None)
            raise Interrupted

    with discarding():
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)


def test_a_device_scope_ends_whichever_call_of_torch_in_it_is_interrupted() -> None:
    """torch's Python functions take a mode off the stack and may put it back after the scope has ended."""
    device = flow.cpus(1)[0]

    tensor = torch.zeros(2)

    def work() -> None:
        with flow.device(device):
            torch.nn.functional.relu(tensor)

    def check() -> None:
        assert type(torch.zeros(2)) is type(copy.deepcopy(torch.zeros(2))) is torch.Tensor
        assert not torch._C._len_torch_dispatch_stack()

    with flow.Engine([device]):
        work()
        assert len(interrupted_at_each_call(work, check)) > 20
        check()  # what was interrupted is released now
        work()
        assert not torch._C._len_torch_function_stack()


def test_an_interrupted_operation_in_place_raises_the_handlers_exception() -> None:
    """torch's C++ sets an attribute of its result, and turns an exception in that into a SystemError."""
    with flow.Engine(flow.cpus(1)):
        weight = flow.ones((2,)).requires_grad_()

        def work() -> None:
            (weight * 1).add_(1).mul_(2)

        work()
        assert len(interrupted_at_each_call(work, bool)) > 20
        assert (weight * 1).add_(1).tolist() == [2, 2]


def test_an_engine_closes_whichever_call_of_its_exit_is_interrupted() -> None:
    devices = flow.cpus(1)
    for number in itertools.count(1):  # call 0 is that of `__exit__` itself
        engine, n_calls = flow.Engine(devices).__enter__(), [0]
        engine.push(int)
        with contextlib.suppress(Interrupted):
            interrupted_at_call(partial(engine.__exit__, None, None, None), number, n_calls)
        assert engine.closed and devices[0].engine is None
        engine.close()  # what the interrupt left
        if n_calls[0] <= number:
            break
    assert number > 10


def test_an_engine_closes_whichever_call_of_its_beginning_is_interrupted() -> None:
    """Its user has no name for it then, so nobody else could free the devices."""
    devices, before = flow.cpus(1), flow.current_device()
    for number in itertools.count(1):  # call 0 is that of `__enter__` itself
        engine, n_calls = flow.Engine(devices), [0]
        with contextlib.suppress(Interrupted):
            interrupted_at_call(engine.__enter__, number, n_calls)
        if n_calls[0] <= number:
            break
        assert engine.closed and devices[0].engine is None and flow.current_device() is before
    assert number > 2
    engine.__exit__(None)


def test_an_engine_is_entered_once() -> None:
    devices, before = flow.cpus(1), flow.current_device()
    with flow.Engine(devices) as engine:
        with pytest.raises(UserError, match="an engine can be entered once"):
            engine.__enter__()
        assert engine.push(lambda: 3).wait() == 3
    with pytest.raises(UserError, match="an engine can be entered once"):
        engine.__enter__()
    assert flow.current_device() is before


def test_captures_and_dry_runs_end_whichever_call_is_interrupted() -> None:
    def work() -> None:
        flow.capture(lambda x: x + 1, torch.ones(2))
        with flow.dry_run(), placement.phase("merge"), flow.recording():
            pass

    def check() -> None:
        assert not trace.active
        assert placement.CONTEXT.program is placement.CONTEXT.phase is None and not in_dry_run()

    with flow.Engine(flow.cpus(1)):
        work()
        kept = interrupted_at_each_call(work, check)
        assert len(kept) > 50 and (flow.ones((2,)) + 1).tolist() == [2, 2]


def test_an_interrupted_wait_for_all_loses_no_failure() -> None:
    with flow.Engine(flow.cpus(1)) as engine:
        engine.push(lambda: 1 / 0)
        with pytest.raises(flow.OperationError, match="division by zero"):
            interrupted_at_each_call(engine.wait_all, bool)


def test_an_interrupt_makes_all_tensors_of_a_module_arrays_or_none() -> None:
    made = [torch.nn.BatchNorm1d(2)]

    def check() -> None:
        kinds = {isinstance(t, flow.Array) for t in made[-1].state_dict(keep_vars=True).values()}
        assert len(kinds) == 1
        torch.optim.SGD(made[-1].parameters()).step()  # refused for a parameter that has been replaced
        made.append(torch.nn.BatchNorm1d(2))  # its own scopes are not interrupted

    with flow.Engine(flow.cpus(1)):
        flow.arrays(made[-1])
        assert interrupted_at_each_call(lambda: flow.arrays(made[-1]), check)
        assert isinstance(made[-2].weight, flow.Array)


def test_an_interrupt_gives_an_array_all_of_another_memory_or_nothing() -> None:
    with flow.Engine(flow.cpus(1)) as engine, flow.device(engine.devices[0]):
        values = flow.array(torch.ones(4)), flow.array(torch.ones(6, dtype=torch.float64))
        x = flow.array(torch.ones(4))

        def work() -> None:
            assert x.memory.cell.layout == (x.size(), x.stride(), x.dtype)
            for value in values:
                x.data = value

        interrupted(work, 300, 1e-4)
        work()
        assert x.tolist() == [1.0] * 6


def test_an_interrupted_change_of_hyperparameters_reaches_all_devices_or_none() -> None:
    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    devices, rates = flow.cpus(2), itertools.count(1)
    with flow.Engine(devices):
        model = torch.nn.Linear(2, 2)
        made = flow.ParallelExecutor(model, loss, lambda own: torch.optim.SGD(own, 0.5), devices)
        made.run({"x": torch.ones(2, 2)})
        (bucket,) = made._buckets.all

        def check() -> None:
            assert len({each.optimizer.param_groups[0]["lr"] for each in bucket.updates.values()}) == 1

        interrupted_at_each_call(lambda: made.set_hyperparameters(lr=next(rates)), check)
        assert len(bucket.updates) == 2 and bucket.updates[0].optimizer.param_groups[0]["lr"] > 1


def test_an_interrupt_leaves_gradients_switched_on() -> None:
    def work() -> None:
        with private.no_grad():
            assert not torch.is_grad_enabled()

    def check() -> None:
        assert torch.is_grad_enabled()

    with flow.device(flow.cpus(1)[0]):  # whose mode is Python code
        assert interrupted_at_each_call(work, check)


def test_a_scope_is_entered_once() -> None:
    devices = flow.cpus(1)
    with flow.Engine(devices):
        scope = flow.device(devices[0])
        with scope as device, pytest.raises(UserError, match="once"), scope:
            pass
        assert device is devices[0] and type(torch.zeros(2)) is torch.Tensor


def test_a_handler_can_use_flow() -> None:
    """It pushes, computes, draws and waits, also for what the interrupted line was about to submit."""
    with flow.Engine(flow.cpus(2)) as engine:
        w, seen = flow.zeros((4,)), list[float]()
        sizes = iter(range(10**9))

        def handle() -> None:
            seen.append((w * 2).sum().item())
            engine.push(int, device=engine.devices[1]).wait()
            flow.randn((next(sizes) % 50 + 1,)).sum().item()
            flow.wait_all()

        n, deadline = 0, time.monotonic() + limit(60)
        with every(0.001, handle):
            while len(seen) < 200 and time.monotonic() < deadline:
                w.add_(1)
                flow.randn((next(sizes) % 50 + 1,)).bernoulli_(0.5)
                n += 1
        assert len(seen) >= 200
        assert seen == sorted(seen) and all(value % 8 == 0 for value in seen)
        assert w.tolist() == [n] * 4


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_handler_leaves_no_old_copy_on_another_device(is_captured: bool) -> None:
    """Here it reads an array there between any two lines of flow that write the array."""
    devices = flow.cpus(2)
    devices[1].memory = "far"
    folder = os.path.dirname(graph.__file__)
    with flow.Engine(devices):
        x = flow.zeros((2,))

        def write(y: torch.Tensor) -> None:
            x.add_(y)

        def read() -> list[float]:
            with flow.device(devices[1]):
                return (x + 0).tolist()  # type: ignore[no-any-return]

        def handle(frame: Any, event: str, argument: object) -> Any:
            if not frame.f_code.co_filename.startswith(folder):
                return None
            read()
            return handle

        change = flow.capture(write, torch.ones(2)) if is_captured else write
        sys.settrace(handle)
        try:
            change(torch.ones(2))
        finally:
            sys.settrace(None)
        assert read() == x.tolist() == [1, 1]


def test_backward_runs_where_its_forward_ran_if_a_handler_writes_an_array_of_another_device() -> None:
    """Here it writes one whenever torch calls Python in the middle of an operation."""
    devices = flow.cpus(2)
    with flow.Engine(devices):
        with flow.device(devices[1]):
            count = flow.zeros((1,))
        w = flow.ones((3, 3)).requires_grad_()

        def handle(frame: Any, event: str, argument: object) -> None:
            if frame.f_code.co_name in private.DISPATCHING:
                count.add_(1)

        sys.settrace(handle)
        try:
            loss = (w @ w).sum()
        finally:
            sys.settrace(None)
        loss.backward()
        assert count.item() > 0 and count.place is devices[1]
        assert w.grad is not None and w.grad.place is devices[0]  # type: ignore[attr-defined]


def test_a_handler_and_a_hook_set_the_device_during_backward() -> None:
    devices = flow.cpus(3)
    seen = []

    def compute(device: Any, grad: torch.Tensor) -> torch.Tensor:
        with flow.device(device):
            made = grad * 2 + torch.zeros(3)
        seen.append(made.place)  # type: ignore[attr-defined]
        return made

    def hook(grad: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGALRM)
        return compute(devices[1], grad)

    with flow.Engine(devices):
        w = flow.ones((3,)).requires_grad_()
        before = signal.signal(signal.SIGALRM, lambda *_: compute(devices[2], torch.ones(3)))
        try:
            for device in devices:  # this scope began before backward: its forward decides
                made = w * 2
                made.register_hook(hook)
                with flow.device(device):
                    made.sum().backward()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert seen == [devices[2], devices[1]] * 3
        assert w.grad is not None and w.grad.place is devices[0]  # type: ignore[attr-defined]
        assert w.grad.tolist() == [12] * 3


def test_a_handler_can_use_flow_while_a_seed_waits_for_its_turn() -> None:
    """A worker has the turn while it computes with torch's own generator, which may take long."""
    is_held, go, found = threading.Event(), threading.Event(), []

    def hold() -> None:
        with instructions._SEEDING:
            is_held.set()
            go.wait(limit(20))

    def handle(*_: Any) -> None:
        try:
            found.append((flow.array([1.0]) + 1).tolist())
        finally:
            go.set()

    with flow.Engine(flow.cpus(1)):
        (flow.array([1.0]) + 1).wait()
        threading.Thread(target=hold).start()
        is_held.wait(limit(20))
        before = signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        flow.randn((3,)).wait()
        signal.signal(signal.SIGALRM, before)
    assert found == [[2.0]]


def test_a_finalizer_can_push() -> None:
    """Garbage collection runs it in any thread, and in the middle of anything."""
    with flow.Engine(flow.cpus(2)) as engine:
        ran: list[int] = []
        x = engine.variable()

        class Finalized:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                engine.push(lambda: ran.append(1), writes=[x])

        threshold = gc.get_threshold()
        gc.set_threshold(20)
        try:
            for _ in range(2000):
                engine.push(Finalized, reads=[x])
                Finalized()
        finally:
            gc.set_threshold(*threshold)

        def all_ran() -> bool:
            gc.collect()  # returns at once while another thread collects
            wait_for(engine.wait_all)
            return len(ran) == 4000

        wait_until(all_ran, "4,000 finalizers")
        assert len(ran) == 4000


def test_a_finalizer_does_not_run_while_shapes_are_predicted() -> None:
    """Torch's kernels of predictions switch off flow's operations on arrays."""
    with flow.Engine(flow.cpus(1)):
        x = flow.zeros((2,))

        class Finalized:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                x.add_(1)

        def predict() -> list[Any]:
            Finalized()
            with torch._C._DisableTorchDispatch():
                return [[] for _ in range(10 * gc.get_threshold()[0])]

        def ran() -> bool:
            gc.collect()  # returns at once while another thread collects
            return x.tolist() == [1, 1]  # type: ignore[no-any-return]

        private.predict(predict)
        wait_until(ran, "the finalizer")


def pausing_while_another_ends(number: int) -> tuple[list[Any], int]:
    """Return how a pause begins if another ends before this instruction, and its number of instructions."""
    pause, resume = private.pausing()
    private.call_all(pause)
    n_seen = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal n_seen
        frame.f_trace_opcodes = frame.f_code is private.pausing.__code__
        if frame.f_trace_opcodes and event == "opcode":
            n_seen += 1
            if n_seen == number:
                private.call_all(resume)
        return trace

    sys.settrace(trace)
    begin, _ = private.pausing()
    sys.settrace(None)
    if n_seen < number:
        private.call_all(resume)
    return begin, n_seen


def test_a_pause_begins_while_another_thread_ends_its_own() -> None:
    """The other one switches the collection on again, between any two instructions."""
    for number in itertools.count(1):
        begin, n_instructions = pausing_while_another_ends(number)
        assert gc.disable in begin and gc.isenabled()
        if n_instructions < number:
            break
    assert n_instructions > 10


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cycles are collected between two lines only")
def test_the_last_pause_of_all_threads_ends_the_pause() -> None:
    locks = threading.Lock(), threading.Lock()
    threads = [threading.Thread(target=private.plainly, args=(lock.acquire,)) for lock in locks]
    for lock, thread in zip(locks, threads, strict=True):
        lock.acquire()
        n_paused = len(private._paused)
        thread.start()
        wait_until(lambda n=n_paused: len(private._paused) > n, "the pause")  # type: ignore[misc]
    for lock, thread, is_last in zip(locks, threads, (False, True), strict=True):
        assert not gc.isenabled()
        lock.release()
        thread.join()
        assert gc.isenabled() is is_last


def test_a_finalizer_that_waits_in_a_worker_is_refused() -> None:
    with flow.Engine(flow.cpus(1)) as engine:
        assert engine.push(int).wait() == 0
        with graph.GRAPH, pytest.raises(UserError, match="finalizer"):
            engine.wait_all()


@pytest.mark.parametrize("collected", [False, True])
def test_a_finalizer_in_a_worker_cannot_wait_for_another_device(collected: bool) -> None:
    """The other device may need an operation behind the one that the finalizer interrupts."""
    with flow.Engine(flow.cpus(2)) as engine:
        x, errors = flow.zeros((2,)), list[str]()

        class Finalized:
            def __del__(self) -> None:
                x.add_(1)
                try:
                    with flow.device(engine.devices[1]):
                        (x * 2)[0].item()
                except UserError as error:
                    errors.append(str(error))

        def function(kept: list[Any]) -> None:
            if collected:
                kept[0].me = kept[0]
                kept.clear()
                gc.collect()

        engine.push(partial(function, [Finalized()]))
        flow.wait_all()
        wait_until(lambda: bool(errors), "the finalizer")
        assert x.tolist() == [1, 1] and "finalizer" in errors[0]


def test_a_finalizer_in_the_thread_that_predicts_shapes() -> None:
    with flow.Engine(flow.cpus(1)):
        x, ran = flow.zeros((2,)), list[Any]()

        class Finalized:
            def __del__(self) -> None:
                ran.append(x.view(1, 2, 1) + torch.ones(3, 1, 5))  # no operation had these shapes

        flow.zeros((3, 7))  # it has started
        done = threading.Lock()
        done.acquire()
        private._Predictor.requests.put((partial(bool, Finalized()), [], done))
        wait_until(lambda: bool(ran), "the finalizer")
        assert ran[0].shape == (3, 2, 5)


def test_a_finalizer_in_the_thread_that_predicts_shapes_cannot_wait_for_a_worker() -> None:
    """The worker may wait for this thread: one of its own finalizers computes with a new shape."""
    with flow.Engine(flow.cpus(1), run_ahead=1) as engine:
        x, errors = flow.zeros((2,)), list[str]()

        class Finalized:
            def __del__(self) -> None:
                engine.push(int)
                x.add_(1)  # pushing does not wait for room
                try:
                    x[0].item()
                except UserError as error:
                    errors.append(str(error))

        x.add_(1)  # its shape is known
        flow.wait_all()
        begun, may_end = threading.Event(), threading.Event()
        engine.push(lambda: (begun.set(), may_end.wait(limit(20))))
        begun.wait()
        done = threading.Lock()
        done.acquire()
        private._Predictor.requests.put((partial(bool, Finalized()), [], done))
        wait_until(lambda: bool(errors), "the finalizer")
        may_end.set()
        assert x.tolist() == [2, 2] and "finalizer" in errors[0]


def test_a_collection_beside_a_wait() -> None:
    """The wait looks at the newest collection, and another thread may collect at any time."""
    with flow.Engine(flow.cpus(1)) as engine:
        slow = engine.push(lambda: time.sleep(0.3))
        sys.setprofile(lambda frame, event, _: gc.collect(0) if event == "c_call" else None)
        try:
            slow.wait()
        finally:
            sys.setprofile(None)


def test_engines_may_open_beside_a_wait_for_all() -> None:
    opened: list[flow.Engine] = []

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and len(opened) < 50:
            opened.append(flow.Engine(flow.cpus(1)))

    with flow.Engine(flow.cpus(1)), flow.Engine(flow.cpus(1)):
        sys.setprofile(profile)
        try:
            flow.wait_all()
        finally:
            sys.setprofile(None)
    for each in opened:
        each.close()


def test_no_garbage_is_collected_in_a_thread_that_is_to_become_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finalizer there might wait for the worker, and for the threads that the worker waits for."""
    run, collects = threading.Thread.run, list[bool]()

    def noting(thread: threading.Thread) -> None:
        collects.append(gc.isenabled())
        run(thread)

    monkeypatch.setattr(threading.Thread, "run", noting)
    with flow.Engine(flow.cpus(1)) as engine:
        assert engine.push(int).wait() == 0
    assert collects == [False] * 3  # the worker, and two that set its number of threads
    wait_until(gc.isenabled, "the end of the pause")


AT_THE_END = """
import atexit
import sys
import torch

@atexit.register
def compute():  # Python calls this after flow has closed its engines, because it was registered before
    products = [flow.randn((400, 400)) @ flow.randn((400, 400)) for _ in range(20)]
    print(products[0].isfinite().all().item(), flush=True)

from lockstep import flow

# An interrupt while the first operation imports it would break all later ones.
print("torch.distributed.tensor" in sys.modules, flush=True)

class Finalized:
    def __init__(self):
        self.array, self.me = flow.ones((3,)), self  # a cycle, which Python drops at its end only

    def __del__(self):
        push = flow.Engine(flow.cpus(1)).push
        for use in (lambda: self.array + 1, lambda: self.array[:2].item(), lambda: push(int),
                    lambda: flow.array([1.0]), lambda: flow.zeros(3)):
            try:
                use()
                print("did not raise", flush=True)
            except ValueError as error:
                print(str(error)[:16], flush=True)

Finalized()
"""


@pytest.mark.slow
def test_what_runs_at_the_end_of_the_program_does_not_hang_or_crash() -> None:
    assert run_program(AT_THE_END).split("\n")[:-1] == ["True", "True", *["Python is ending"] * 5]


def in_child(function: Callable[[], object]) -> None:
    """Check that function() returns in a forked child in time, without an error."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + limit(20)
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert found[1] == 0


def test_a_forked_child_begins_afresh() -> None:
    devices = flow.cpus(2)
    with flow.Engine(devices) as engine, flow.device(devices[1]):
        there = torch.ones(4)
        there.wait()
        go = threading.Event()
        late = flow.call(lambda _: go.wait(), there, writes=[there])

        def child() -> None:
            assert type(torch.zeros(3)) is torch.Tensor  # outside of `with flow.device`
            assert type(copy.deepcopy(torch.zeros(3))) is torch.Tensor
            assert (flow.ones((3,)) + 1).sum().item() == 6
            with flow.device(devices[1]):
                assert torch.randn(7).bernoulli_(0.5).sum().item() <= 7
            for wait in (late.wait, there.wait):
                with pytest.raises(flow.OperationError, match="forked"):
                    wait()
            with pytest.raises(UserError, match="closed"):
                engine.push(int)
            flow.wait_all()

        in_child(child)
        go.set()
        assert (there + 1).sum().item() == 8


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cycles are collected between two lines only")
def test_a_fork_while_another_thread_computes_a_view() -> None:
    """Meanwhile no cycles are collected, in no thread; the child's are."""
    wait = threading.Lock()
    wait.acquire()
    thread = threading.Thread(target=private.plainly, args=(wait.acquire,))
    thread.start()
    wait_until(lambda: not gc.isenabled(), "the pause")
    child = os.fork()
    if not child:
        os._exit(gc.isenabled() is False)
    wait.release()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0 and gc.isenabled()


def test_a_fork_while_another_thread_predicts_shapes() -> None:
    inside, go = threading.Event(), threading.Event()

    def predict_slowly() -> None:
        with fake_tensor.in_kernel_invocation_manager(private._fake_mode()):
            inside.set()
            go.wait(limit(20))

    thread = threading.Thread(target=private.predict, args=(predict_slowly,))
    thread.start()
    try:
        assert inside.wait(limit(20))
        in_child(lambda: (flow.ones((3, 217)) * 2).sum().item())
    finally:
        go.set()
        thread.join()


def test_a_forked_child_cannot_use_its_parents_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = object.__new__(gpu.Cuda)
    device.name = "cuda:0"
    monkeypatch.setattr(gpu._ForkState, "uses_cuda", True)

    def child() -> None:
        for use in (lambda: flow.set_device(device), lambda: flow.Engine([device]), lambda: flow.cuda(0)):
            with pytest.raises(UserError, match="forked"):
                use()

    in_child(child)


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(number)), number


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_data_loader_works_inside_a_device(n_workers: int) -> None:
    loader = torch.utils.data.DataLoader(Samples(), 4, shuffle=True, num_workers=n_workers)
    with flow.Engine(flow.cpus(2)) as engine, flow.device(engine.devices[1]):
        total = 0.0
        for images, numbers in loader:
            total += (images.sum() + numbers.sum()).item()
        assert total == 4 * 66


def test_backward_runs_where_its_forward_ran_whatever_other_threads_do() -> None:
    devices, wrong = flow.cpus(2), []

    def work(device: flow.Device) -> None:
        flow.set_device(device)
        for _ in range(30):
            x = flow.ones((3,)).requires_grad_()
            (x * 2).exp().sum().backward()

    with flow.Engine(devices), flow.recording() as trace:
        threads = [threading.Thread(target=work, args=[device]) for device in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        flow.wait_all()
    by_number = {each.number: each for each in trace.operations}
    for each in trace.operations:
        wrong += [each for n in each.waited_for if n in by_number and by_number[n].device != each.device]
    assert not wrong and {each.device for each in trace.operations} == {"cpu:0", "cpu:1"}


def test_backward_in_a_thread_of_autograds_runs_where_its_forward_ran() -> None:
    """On GPUs torch computes backward in such threads."""
    first, second = flow.cpus(2)
    with flow.Engine([first, second]), flow.recording() as trace:
        with flow.device(first):
            hidden = (flow.ones((3,)).requires_grad_() * 2).tanh()
        with flow.device(second):
            result = hidden.exp().sum()
        thread = threading.Thread(target=result.backward)
        thread.start()
        thread.join()
        flow.wait_all()
    backward = {each.name: each.device for each in trace.operations if each.phase == "backward"}
    assert backward["tanh_backward"] == "cpu:0"
