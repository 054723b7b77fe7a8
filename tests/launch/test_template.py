"""The template process: it forks trainers and loaders, which end and inherit as if they had been spawned."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Program, Running, wait_until
from descriptors import open_sockets
from limits import limit

from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerLost, PeerProblem
from lockstep.launch import processes
from lockstep.launch.processes import Processes
from lockstep.launch.status import StatusBoard
from lockstep.launch.template import Stopped, Template
from lockstep.signals import Interrupts

pytestmark = pytest.mark.new_interpreter

LONG = ("n_epochs=100000", "snapshot_freq=100000")


def template_of(running: Running) -> int:
    """Return the process id of a run's template, the only child that the log does not name."""
    (pid,) = running.children() - set(running.pids().values())
    return pid


@pytest.mark.slow
def test_no_process_holds_a_pipe_of_another(program: Program) -> None:
    """A copy of a dead process's pipe would keep its peers from noticing its death."""
    running = program.start(*LONG)
    running.wait_for_text("step 2/6")
    pids = {"launcher": running.process.pid, "template": template_of(running), **running.pids()}
    sockets = {name: open_sockets([pid]) for name, pid in pids.items()}  # each end of a pipe has its own
    assert len(sockets["template"]) == 1 and all(sockets.values())
    names = sorted(sockets)
    shared = {(a, b): sockets[a] & sockets[b] for a in names for b in names if a < b}
    assert {pair for pair, common in shared.items() if common} == set()


@pytest.mark.slow
def test_a_killed_template_ends_nothing_and_is_replaced_at_the_next_start(program: Program) -> None:
    running = program.start(*LONG)
    running.wait_for_text("step 2/6")
    first = template_of(running)
    os.kill(first, signal.SIGKILL)
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    running.wait_for_text("recovered: trainer 1 (pid ")
    assert template_of(running) != first
    os.kill(running.process.pid, signal.SIGINT)
    assert running.wait() == 130, running.output()
    running.assert_nothing_left()


@pytest.mark.parametrize("victim", ["launcher", "group"])
def test_the_template_dies_with_its_launcher(program: Program, victim: str) -> None:
    running = program.start(*LONG)
    running.wait_for_text("step 2/6")
    if victim == "group":
        os.killpg(running.process.pid, signal.SIGKILL)
    else:
        os.kill(running.process.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    running.assert_nothing_left()


REAPING = """
import os, subprocess, sys
from lockstep.launch.template import adopt_orphans
adopt_orphans()
code = subprocess.call([sys.executable, "train.py", "batch_size=0"])
try:
    left = os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    left = None
print(code, left)
"""


def test_a_launcher_leaves_no_template_to_process_1() -> None:
    """In a container, process 1 may not wait for orphans."""
    done = subprocess.run(
        [sys.executable, "-c", REAPING], cwd=ROOT, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.stdout == "2 None\n", done.stdout + done.stderr


@pytest.mark.slow
def test_sigterm_to_the_template_stops_the_run_in_good_order(program: Program) -> None:
    running = program.start(*LONG)
    running.wait_for_text("step 2/6")
    os.kill(template_of(running), signal.SIGTERM)
    assert running.wait() == 143, running.output()
    assert "stopped as asked; saved" in running.last_line()


@pytest.fixture
def template() -> Iterator[Template]:
    """Return a template of this process, which is a subreaper until the end of the test."""
    template = Template(["test_template"])
    yield template
    template.close()
    ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER: orphans of other tests belong to init again


def report(control: Pipe, board: StatusBoard, text: str) -> None:
    """A child's work: tell what it has from its parent."""
    control.send(json.dumps([text, os.environ.get("TEST_OF_TEMPLATE"), os.getppid()]))


def sleep(control: Pipe, board: StatusBoard) -> None:
    """A child's work that does not end."""
    time.sleep(600)


def die(control: Pipe, board: StatusBoard, how: str) -> None:
    """A child's work, which ends it."""
    if how == "exits":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


def test_a_child_gets_arguments_and_environment_and_is_the_launchers_own(
    monkeypatch: pytest.MonkeyPatch, template: Template
) -> None:
    monkeypatch.setenv("TEST_OF_TEMPLATE", "set after the template was started")
    heard: list[object] = []
    with Processes(60, template=template) as children:
        children.start("trainer 0", "test_template:report", ("hello",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
    assert heard == [json.dumps(["hello", "set after the template was started", os.getpid()])]


@pytest.mark.parametrize(
    ("how", "text"), [("exits", "left with exit code 3"), ("SIGSEGV", "was killed by SIGSEGV")]
)
def test_how_a_child_ended_reaches_the_launcher(how: str, text: str, template: Template) -> None:
    with Processes(60, template=template) as children:
        children.start("trainer 0", "test_template:die", (how,))
        exit_status = children.watch(lambda message: None)
    assert exit_status.lost == "trainer 0" and text in exit_status.message


def test_a_launcher_with_many_open_files_ends_its_children(template: Template) -> None:
    """select.select takes no descriptor above 1023."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("this process may not open 1,200 files")
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Processes(60, template=template) as children:
            children.start("trainer 0", "test_template:sleep", ())
            pid = children.pids()["trainer 0"]
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_template_that_stands_still_is_replaced(template: Template) -> None:
    heard: list[object] = []
    with Processes(1, template=template) as children:
        children.start("trainer 0", "test_template:report", ("first",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
        stopped = template._process
        os.kill(stopped.pid, signal.SIGSTOP)
        children.start("trainer 1", "test_template:report", ("second",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
    wait_until(lambda: stopped.poll() is not None, "the end of the first template")
    assert len(heard) == 2 and "second" in str(heard[1])


def test_a_signal_ends_the_wait_for_a_template_and_the_next_child_is_the_right_one(
    template: Template,
) -> None:
    interrupts, heard = Interrupts(), list[object]()
    stopped = template._process
    os.kill(stopped.pid, signal.SIGSTOP)
    interrupts.code = 130
    begin = time.monotonic()
    with Processes(600, interrupts, template=template) as children, pytest.raises(Stopped):
        children.start("trainer 0", "test_template:report", ("first",))
    assert time.monotonic() - begin < limit(10)
    with Processes(600, template=template) as children:
        children.start("the writer", "test_template:report", ("second",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
    assert len(heard) == 1 and "second" in str(heard[0])


@pytest.mark.slow
def test_ctrl_c_in_a_recovery_whose_template_stands_still_saves_what_is_in_memory(program: Program) -> None:
    running = program.start(*LONG, "memory_checkpoint_seconds=1e-6", "timeout=600")
    running.wait_for_text("step 4/6")
    os.kill(template_of(running), signal.SIGSTOP)
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    log = running.run_folder / "log.jsonl"
    wait_until(lambda: '"event": "lost"' in log.read_text(), "the loss")
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130, running.output()
    assert "stopped as asked; saved" in running.last_line()
    running.assert_nothing_left()


@pytest.mark.parametrize("n_killed", [2, 4])
def test_a_template_is_replaced_until_several_in_a_row_have_died(
    template: Template, monkeypatch: pytest.MonkeyPatch, n_killed: int
) -> None:
    heard, left, begin = list[object](), [n_killed - 1], template._begin
    template._process.kill()

    def begin_and_die() -> None:
        begin()
        if left[0]:
            left[0] -= 1
            template._process.kill()

    monkeypatch.setattr(template, "_begin", begin_and_die)
    with Processes(60, template=template) as children:
        if n_killed == 4:
            with pytest.raises(
                PeerProblem, match=r"the template process .*; it was started 4 times, last as pid \d+"
            ):
                children.start("trainer 0", "test_template:report", ("first",))
            return
        children.start("trainer 0", "test_template:report", ("first",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
    assert len(heard) == 1


def test_a_child_whose_template_died_before_it_answered_does_nothing(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is started in its place, with the same pipes."""
    receive, orphans, heard = template._pipe.receive, list[int](), list[object]()

    def lose(kind: type[Any], purpose: str) -> None:
        orphans.append(receive(kind, purpose).pid)
        template._process.kill()
        raise PeerLost("the template process", "was killed")

    monkeypatch.setattr(template._pipe, "receive", lose)
    with Processes(60, template=template) as children:
        children.start("trainer 0", "test_template:report", ("once",))
        assert children.watch(heard.append) == processes.ExitStatus(0)
        wait_until(lambda: os.waitpid(orphans[0], os.WNOHANG)[0], "the end of the first child")
    assert len(heard) == 1


@pytest.mark.slow
def test_a_child_may_open_as_many_files_as_its_launcher(program: Program) -> None:
    """The launcher raises its limit for the pipes of all restarts, when the template runs already."""
    low_limit = ("sh", "-c", 'ulimit -Sn 64 && exec "$0" "$@"')
    running = program.run("n_epochs=1", "loader_restarts=60", devices="[cpu]", through=low_limit)
    assert "Traceback" not in running.output()


COUNTING = """
import os, sys

class Counter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            with open(os.environ["IMPORTS_OF_TORCH"], "a") as file:
                file.write(f"{os.getpid()}\\n")

sys.meta_path.insert(0, Counter())
"""  # run by every Python process that finds it first


def test_torch_is_imported_once_for_all_processes(program: Program, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTING)
    places = {"PYTHONPATH": str(tmp_path / "site"), "IMPORTS_OF_TORCH": str(tmp_path / "imports")}
    running = program.start(*LONG, environment={**os.environ, **places})
    running.wait_for_text("step 2/6")
    assert (tmp_path / "imports").read_text().split() == [str(template_of(running))]
