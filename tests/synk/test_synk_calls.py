"""Calls that are interrupted or come at a bad moment: the next call is correct, or fails clearly."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import synk_acts
import torch
from conftest import ROOT
from limits import limit
from synk_acts import HOOKS, hook, rank_here
from synk_teams import team

import lockstep.synk as synk
from lockstep.synk import interrupts, session


class TooLate(Exception):
    """The exception of a handler of SIGALRM."""


class Unspeakable(Exception):
    """It can't be pickled, and has no text."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ArithmeticError("no text")


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with team(2):
        yield
    HOOKS.clear()


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """A timer, whose handler raises TooLate."""

    def handle(number: int, frame: Any) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def total(x):
    hook("total")
    return x.sum()


def total_late(x):
    """Rank 1 answers half a second after rank 0 is ready."""
    if rank_here():
        time.sleep(0.5)
    return x.sum()


def interrupted(x):
    if rank_here() == 0:
        raise KeyboardInterrupt
    return x.sum()


def interrupted_there(x):
    if rank_here():
        raise KeyboardInterrupt
    return x.sum()


def unspeakable(x):
    if rank_here():
        raise Unspeakable
    return x.sum()


class Unreadable(Exception):
    """It can't be unpickled in the caller."""

    def __reduce__(self) -> Any:
        return there_only, ()


class Unnoted(Exception):
    """It takes no notes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.__notes__ = "no list"


def there_only():
    return Unreadable() if rank_here() else sys.exit("not here")


def unreadable(x):
    if rank_here():
        raise Unreadable
    return x.sum()


def unnoted(x):
    if rank_here() == x[0]:
        raise Unnoted("its text")
    return x.sum()


def unprintable(x):
    if rank_here() == x[0]:
        raise SyntaxError("its text", ("file", 1, "no number, so Python can't show it", "a line"))
    return x.sum()


def stopped(x):
    if rank_here() == x[0]:
        raise StopIteration("no more rows")
    return x.sum()


def forking(x):
    if rank_here():
        os.fork()
    return x.sum()


def distributed(*callables: Any) -> list[synk.Function]:
    made = [synk.function(function, "sum") for function in callables]
    synk.distribute()
    for function in made:
        function._called = True  # the others begin at once
    return made


@pytest.mark.slow
def test_a_handler_that_raises_while_answers_come_waits_for_them(two_ranks: None, alarm: Any) -> None:
    late, f = distributed(total_late, total)
    for number in range(3):
        alarm(0.2)
        with pytest.raises(TooLate):
            late(np.full(4, number))
        assert f(np.full(4, 2.0)) == 8
        assert late(np.full(4, 4.0)) == 16


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_a_handler_that_raises_at_any_moment_breaks_no_later_call(two_ranks: None, alarm: Any) -> None:
    shared = synk.share(torch.zeros(3, dtype=torch.float64))
    f, g = distributed(total, total)
    random = np.random.default_rng(5)
    n_interrupts, end = 0, time.monotonic() + 3
    while time.monotonic() < end:
        number = float(random.integers(1000))
        try:
            alarm(random.uniform(1e-5, 2e-3))
            for _ in range(50):
                data = synk.data(np.full(6, number))
                assert f(data) == 6 * number
                assert g(np.full(4, number)) == 4 * number
                data.set_value(np.full(600, number))
                assert f(data, batch=[0, 5, 7]) == 3 * number
                assert f.alone(np.full(2, number)) == 2 * number
                synk.broadcast(shared, np.full(3, number))
                assert (synk.gather(shared) == number).all()
                synk.all_reduce(shared, "max")
        except TooLate:
            n_interrupts += 1
        assert signal.getsignal(signal.SIGALRM).__name__ == "handle"
    assert n_interrupts > 5


def test_a_handler_raises_after_a_finalizer_even_if_threads_start_slowly(
    two_ranks: None, alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, blocks = threading.Thread.start, session.current_team("a test").context.blocks
    drop = blocks.drop

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.1)

    def drop_and_signal(number: int) -> None:
        drop(number)
        signal.raise_signal(signal.SIGALRM)

    data = synk.data(np.zeros(4))
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    monkeypatch.setattr(blocks, "drop", drop_and_signal)
    with pytest.raises(TooLate):
        del data
        time.sleep(10)  # until the handler raises


def test_all_handlers_are_restored_where_one_raises_meanwhile(
    alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, moments = interrupts.getsignal, iter([False, True])

    def getsignal(number: int) -> Any:
        if get(number) is interrupts._note and next(moments, False):
            raise TooLate
        return get(number)

    before = {number: get(number) for number in (signal.SIGINT, signal.SIGALRM)}
    with pytest.raises(TooLate), interrupts.defer_signals():
        monkeypatch.setattr(interrupts, "getsignal", getsignal)
    assert {number: get(number) for number in before} == before


def test_all_handlers_are_restored_where_one_would_raise_before(
    alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = interrupts._deferral.restore

    def restore_late() -> None:
        signal.raise_signal(signal.SIGALRM)
        restore()

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TooLate), interrupts.defer_signals():
        monkeypatch.setattr(interrupts._deferral, "restore", restore_late)
    assert signal.getsignal(signal.SIGALRM) is before and not interrupts._deferral.depth


@pytest.mark.parametrize("own_handler", [signal.default_int_handler, lambda number, frame: None])
def test_ctrl_c_never_cuts_short_what_only_waits(own_handler: Any) -> None:
    before, kills, done = signal.signal(signal.SIGINT, own_handler), [], []
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.defer_signals(lambda: kills.append(1)):
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
            done.append("waited")
        assert signal.getsignal(signal.SIGINT) is own_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["waited"] and len(kills) == 2


def test_a_second_ctrl_c_interrupts_a_computation_once() -> None:
    done: list[str] = []

    def compute() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("first")
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
            done.append("third")
            raise

    with pytest.raises(KeyboardInterrupt) as raised, interrupts.defer_signals(lambda: None):
        interrupts.interruptible(compute)
    assert done == ["first", "third"] and raised.value.__context__ is None
    with interrupts.defer_signals(lambda: None):
        assert interrupts.interruptible(lambda: 3) == 3


def test_a_second_ctrl_c_ends_the_wait_for_another_thread_s_call(two_ranks: None) -> None:
    begun, end = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        end.wait(limit(30))
        return x.sum()

    alone, f = synk.function(wait, "sum"), synk.function(total, "sum")
    current = session.current_team("")
    thread = threading.Thread(target=alone.alone, args=(np.ones(3),))
    thread.start()
    begun.wait(limit(30))
    timers = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (0.2, 0.4)]
    try:
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            f.alone(np.ones(3))
        assert thread.is_alive()
    finally:
        end.set()
        thread.join()
    assert current.lock.acquire(blocking=False)
    current.lock.release()
    assert f.alone(np.ones(3)) == 3


@pytest.mark.parametrize("function", [interrupted, interrupted_there])
def test_a_keyboard_interrupt_of_the_users_function_is_an_error_like_others(
    two_ranks: None, function: Any
) -> None:
    g, f = distributed(function, total)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            g(np.ones(6))
        assert f(np.full(4, 2.0)) == 8


@pytest.mark.slow
def test_a_command_cut_short_in_a_thread_is_refused_later(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A RecursionError in the midst of the pipes, for instance: nothing can make good for it."""
    f, _ = distributed(total, total_late)
    current = session.current_team("")
    with monkeypatch.context() as patch:
        patch.setattr(current, "_collect", lambda worker: (_ for _ in ()).throw(RecursionError("too deep")))
        with pytest.raises(RecursionError):
            f(np.ones(4))
    for again in (lambda: f(np.ones(4)), lambda: synk.data(np.ones(3)), synk.distribute):
        with pytest.raises(RuntimeError, match=r"cut short 'calling 'function0''|cut short .*close\(\)"):
            again()
    synk.close()
    assert synk.fork(2) == 2


def in_child(act: Callable[[], Any]) -> str:
    """Return what a forked child gets: the text of the error, or the value."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"value {act()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as end:
        text = end.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_is_refused_and_the_parent_undisturbed(two_ranks: None) -> None:
    shared = synk.share(torch.zeros(3))
    (f,) = distributed(total)
    data = [synk.data(np.ones(5))]
    for act in (
        lambda: f(np.ones(20)),
        lambda: f.alone(np.ones(20)),
        lambda: synk.broadcast(shared),
        lambda: synk.data(np.ones(3)),
        lambda: data[0].set_value(np.ones(5000)),
        synk.distribute,
    ):
        assert in_child(act).startswith("RuntimeError: "), "refused"
        assert "forked" in in_child(act)
        assert f(np.ones(4)) == 4
    assert in_child(lambda: (data.clear(), synk.close())) == "value (None, None)"
    assert f(np.ones(4)) == 4
    assert f(data[0]) == 5
    HOOKS["total"] = lambda: in_child(lambda: f(np.ones(20)))
    assert f(np.ones(4)) == 4


@pytest.mark.slow
def test_a_child_forked_within_a_callable_gets_no_further(two_ranks: None) -> None:
    (f,) = distributed(total)
    parent = os.getpid()
    pids = []
    HOOKS["total"] = lambda: pids.append(os.fork())
    try:
        value = f(np.ones(4))
    except RuntimeError as error:
        os._exit(7 if os.getpid() != parent and "forked" in str(error) else 8)
    assert (os.getpid(), value) == (parent, 4)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 7
    HOOKS.clear()
    assert f(np.ones(6)) == 6


@pytest.mark.slow
def test_a_forked_child_has_ranks_of_its_own() -> None:
    code = """
import os, numpy as np, torch
import lockstep.synk as synk
synk.fork(2)
f = synk.function(lambda x: x.sum(), "sum"); synk.distribute()
pid = os.fork()
if pid == 0:
    synk.fork(2)
    g = synk.function(lambda x: 2 * x.sum(), "sum"); synk.distribute()
    print(float(g(np.ones(4))), flush=True)
    synk.close()
    os._exit(0)
os.waitpid(pid, 0)
print(float(f(np.ones(4))))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(90)
    )
    assert done.stdout == "8.0\n4.0\n", done.stderr


@pytest.mark.slow
def test_a_call_within_a_callable_is_refused(two_ranks: None) -> None:
    f, g = distributed(total, total_late)
    for inner in (
        lambda: g(np.ones(7)),
        lambda: g.alone(np.ones(7)),
        synk.distribute,
        lambda: synk.get_shapes([]),
        synk.close,
    ):
        HOOKS["total"] = inner
        with pytest.raises(RuntimeError, match="within function 'function0'"):
            f(np.ones(8))
        HOOKS.clear()
        assert f(np.ones(8)) == 8
        assert g(np.ones(7)) == 7


def test_alone_waits_for_the_call_of_another_thread(two_ranks: None) -> None:
    stored = synk.share(torch.arange(4.0))
    f = synk.function(sum_of(stored), "sum", sliceable_shareds=[stored])
    synk.distribute()
    expected = float(f.alone())
    f._called = True
    inside, found = threading.Event(), []
    HOOKS["total"] = lambda: (inside.set(), time.sleep(0.3))
    caller = threading.Thread(target=lambda: found.append(f(batch_s=[0])))
    caller.start()
    assert inside.wait(limit(10))
    HOOKS.clear()
    assert f.alone() == expected
    caller.join()
    assert found == [0]


def sum_of(stored: torch.Tensor) -> Any:
    def compute():
        hook("total")
        return stored.sum()

    return compute


@pytest.mark.slow
def test_close_in_another_thread_waits_for_the_call(two_ranks: None) -> None:
    (late,) = distributed(total_late)
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(late(np.ones(4))))
    caller.start()
    time.sleep(0.1)
    synk.close()
    caller.join()
    assert found == [4]


@pytest.mark.slow
def test_blocks_of_threads_have_numbers_of_their_own(two_ranks: None) -> None:
    made: list[list[Any]] = [[] for _ in range(4)]

    def make(place: int) -> None:
        made[place] = [synk.data(np.full(3, 100.0 * place + i)) for i in range(50)]

    threads = [threading.Thread(target=make, args=(place,)) for place in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    (f,) = distributed(total)
    assert len({data.location().block for datas in made for data in datas}) == 200
    for place, datas in enumerate(made):
        for i, data in enumerate(datas):
            assert f(data) == 3 * (100 * place + i)


@pytest.mark.slow
def test_an_error_without_text_that_cannot_be_pickled_is_an_error_like_others(two_ranks: None) -> None:
    g, f = distributed(unspeakable, total)
    with pytest.raises(RuntimeError, match="Unspeakable: its text can't be had"):
        g(np.ones(6))
    assert f(np.ones(4)) == 4


@pytest.mark.slow
def test_a_stop_iteration_is_an_error_like_others(two_ranks: None) -> None:
    g, f = distributed(stopped, total)
    for rank in (0, 1):
        with pytest.raises(StopIteration, match="no more rows") as raised:
            g(np.full(4, rank))
        assert f"on rank {rank} of 2" in "".join(raised.value.__notes__)
    assert f(np.ones(4)) == 4


@pytest.mark.slow
def test_an_error_of_another_rank_changes_no_class_of_the_program(two_ranks: None) -> None:
    state = {"factor": 1}

    class Bad(Exception):
        made: ClassVar[list[int]] = []

        def __init__(self, text: str) -> None:
            super().__init__(text)
            Bad.made.append(1)

        def factor(self) -> int:
            return state["factor"]

    def work(x: torch.Tensor, fail: torch.Tensor) -> torch.Tensor:
        state["factor"] += 1
        if fail and rank_here() == 1:
            raise Bad("no good")
        return x * Bad("fine").factor()

    f = synk.function(work, "gather", bcast_inputs=["fail"])
    synk.distribute()
    made = Bad.made
    assert f(np.ones(4), 0.0).tolist() == [2.0] * 4
    with pytest.raises(Bad, match="no good"):
        f(np.ones(4), 1.0)
    assert Bad.made is made
    assert f(np.ones(4), 0.0).tolist() == [4.0] * 4


@pytest.mark.slow
def test_errors_that_python_can_not_read_or_annotate_are_errors_like_others(two_ranks: None) -> None:
    g, h, k, f = distributed(unreadable, unnoted, unprintable, total)
    with pytest.raises(RuntimeError, match="an error that this process can't read"):
        g(np.ones(6))
    for rank in (0, 1):
        with pytest.raises(Unnoted, match="its text"):
            h(np.full(4, rank))
        with pytest.raises(SyntaxError, match="its text"):
            k(np.full(4, rank))
    assert f(np.ones(4)) == 4


@pytest.mark.slow
def test_a_child_that_a_worker_forks_within_a_callable_does_not_answer(two_ranks: None) -> None:
    g, f = distributed(forking, total)
    assert g(np.ones(4)) == 4
    time.sleep(limit(0.5))  # for its answer
    for number in range(5):
        assert f(np.full(4, number)) == 4 * number


@pytest.mark.slow
def test_a_worker_that_dies_is_lost_before_its_children_end(two_ranks: None, tmp_path: Path) -> None:
    file, seconds = tmp_path / "pid", limit(10)

    def forking_and_dying(x):
        if rank_here():
            if pid := os.fork():
                file.write_text(str(pid))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(seconds)
            os._exit(0)
        return x.sum()

    (f,) = distributed(forking_and_dying)
    with pytest.raises(synk.RankLost, match="SIGKILL"):
        f(np.ones(4))
    os.kill(int(file.read_text()), signal.SIGKILL)  # raises an error if the child has ended


@pytest.mark.slow
def test_results_without_room_are_an_error_and_the_team_goes_on(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = synk.function(lambda x: x, "gather")
    (f,) = distributed(total)
    gather(np.ones(4))
    current = session.current_team("")

    def no_room(n_bytes: int, what: str) -> int:
        raise MemoryError(f"{what}: no room")

    data = synk.data(np.ones(200_000))
    with monkeypatch.context() as patch:
        patch.setattr(current, "allocate", no_room)
        with pytest.raises(MemoryError, match="results of rank 1: no room"):
            gather(data)
    assert f(np.ones(4)) == 4
    assert gather(data).sum() == 200_000


def test_modules_in_the_working_directory_are_not_the_workers(tmp_path: Path) -> None:
    for name in ("random", "queue", "socket"):
        (tmp_path / f"{name}.py").write_text(
            "open('was_imported', 'w'); raise ImportError('the wrong one')\n"
        )
    (tmp_path / "program").mkdir()
    program = tmp_path / "program/script.py"
    program.write_text("import lockstep.synk as synk\nprint(synk.fork(2))\n")
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.stdout == "2\n", done.stderr
    assert not (tmp_path / "was_imported").exists()


def test_the_hooks_of_these_tests_are_the_callers_alone() -> None:
    assert synk_acts.HOOKS is HOOKS
