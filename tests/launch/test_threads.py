"""A daemon thread runs functions in order, reports their errors, and does not delay the program's exit."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT
from limits import limit

from lockstep.threads import DaemonExecutor

HANGING = """
import threading, time
from {module} import {name}
started = threading.Event()
{name}({arguments}).submit(lambda: (started.set(), time.sleep(600)))
started.wait()
"""


def test_functions_run_in_order_in_one_thread() -> None:
    order: list[object] = []
    executor = DaemonExecutor("a test's thread")
    futures = [executor.submit(lambda number=number: order.append(number)) for number in range(100)]
    name = executor.submit(lambda: threading.current_thread().name)
    assert name.result(limit(10)) == "a test's thread"
    assert order == [*range(100)]
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_is_raised_in_the_caller_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    executor = DaemonExecutor("a test's thread")
    with pytest.raises(type(error)) as raised:
        executor.submit(fail).result(limit(10))
    assert raised.value is error
    assert executor.submit(lambda: 5).result(limit(10)) == 5


def test_a_cancelled_function_does_not_run() -> None:
    executor, release = DaemonExecutor("a test's thread"), threading.Event()
    executor.submit(release.wait)
    called: list[int] = []
    waiting = executor.submit(lambda: called.append(1))
    assert waiting.cancel()
    release.set()
    assert executor.submit(lambda: len(called)).result(limit(10)) == 0


@pytest.mark.parametrize(
    ("kind", "arguments", "exits"), [(DaemonExecutor, "'hanging'", True), (ThreadPoolExecutor, "1", False)]
)
def test_a_function_that_never_returns_does_not_keep_the_program(
    kind: type, arguments: str, exits: bool
) -> None:
    """The thread pool of the standard library is the negative control."""
    script = HANGING.format(module=kind.__module__, name=kind.__name__, arguments=arguments)
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as process:
        try:
            if exits:
                assert process.wait(limit(30)) == 0
            else:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(1)
        finally:
            process.kill()
