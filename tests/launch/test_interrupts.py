"""Ctrl-C and SIGTERM in every phase of a launcher: it leaves at once, says so last, and leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Program, Running, wait_until
from dataset_folders import write_manifest
from limits import limit

from lockstep.signals import STOP_SIGNAL, Interrupts

pytestmark = pytest.mark.new_interpreter

SECONDS = 10  # for an answer that takes milliseconds; without one, each of these waits would be for ever


def stall(path: Path) -> Callable[[], bool]:
    """Puts a named pipe in a file's place: who reads it waits for ever. Returns whether someone does."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    def is_read() -> bool:
        try:
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # left open, or the reader would come to the end
        except OSError:
            return False
        time.sleep(0.3)  # it comes from open to read; a signal between the two is heard behind the read only
        return True

    return is_read


def stalling_module(folder: Path, name: str) -> tuple[dict[str, str], Callable[[], bool]]:
    """An environment in which a module's import takes for ever, and whether someone is at it."""
    folder.mkdir()
    reached = folder / "reached"
    # In short sleeps: Python hears of a signal just before a sleep at its end only.
    stalling = f"open({str(reached)!r}, 'w')\nimport time\nwhile True:\n    time.sleep(0.05)\n"
    (folder / f"{name}.py").write_text(stalling)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}, reached.exists


def interrupt(running: Running, is_there: Callable[[], bool], number: int) -> str:
    """Sends a signal when the phase is reached; returns the last line."""
    wait_until(lambda: is_there() or running.process.poll() is not None, "the phase to be reached")
    assert running.process.poll() is None, running.output()
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)  # as a terminal does
    else:
        running.process.send_signal(number)
    assert running.wait(SECONDS) == 128 + number, running.output()
    running.assert_nothing_left()
    assert "Traceback" not in running.output() and running.output().count("lockstep: ") == 1
    return running.last_line()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_it_imports(program: Program, tmp_path: Path, number: int) -> None:
    environment, is_there = stalling_module(tmp_path / "modules", "tqdm")
    running = program.start(environment=environment)
    assert interrupt(running, is_there, number) == "lockstep: stopped as asked, before training began"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["opening", "checking sums"])
def test_while_it_looks_at_the_data(program: Program, folder: Path, number: int, phase: str) -> None:
    """The sums are taken by threads, which no exception in the main thread ends."""
    write_manifest(folder)
    is_there = stall(folder / {"opening": "manifest.json", "checking sums": "misc/slow"}[phase])
    program.data = folder
    running = program.start("check_sums=true")
    assert interrupt(running, is_there, number) == "lockstep: stopped as asked, before training began"
    assert not running.run_folder.exists()


@pytest.mark.slow
def test_while_validation_or_resuming_opens_its_files(program: Program, folder: Path, tmp_path: Path) -> None:
    program.data = folder
    trained = program.run("n_epochs=1", devices="[cpu]")
    output = tmp_path / "validation.txt"
    is_there = stall(trained.run_folder / "checkpoints" / "epoch_0001.safetensors")
    with open(output, "w") as file:
        command = [sys.executable, "validate.py", str(trained.run_folder)]
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, cwd=ROOT)
    validating = Running(process, trained.run_folder, output)
    program.started.append(validating)
    assert interrupt(validating, is_there, signal.SIGINT) == "lockstep: stopped as asked"
    running = program.start("n_epochs=2", "resume_train=true", devices="[cpu]")
    assert "before training began" in interrupt(running, is_there, signal.SIGINT)


def test_while_nvidia_smi_hangs_which_ends_too(program: Program, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n: > {tmp_path}/reached\nexec sleep 600\n")
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])}
    running = program.start(devices="[cuda:0]", environment=environment)
    assert "stopped as asked" in interrupt(running, (tmp_path / "reached").exists, signal.SIGTERM)


@pytest.mark.slow
def test_while_the_report_is_written(program: Program, tmp_path: Path) -> None:
    environment, is_there = stalling_module(tmp_path / "modules", "matplotlib")
    running = program.start("n_epochs=1", "report=true", devices="[cpu]", environment=environment)
    last = interrupt(running, is_there, signal.SIGINT)
    assert last.startswith("lockstep: stopped as asked: the run is complete, its report was not written; to ")
    assert last.endswith(f"-m lockstep.report {running.run_folder}")
    assert "done: validation error" in running.output()
    assert not (running.run_folder / "report.html").exists()


class Interrupted(Interrupts):
    """While it takes a signal, another comes at each of its assignments, as from the rest of a group."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if getattr(self, "comes", None):
            number, self.__dict__["comes"] = self.comes, None
            self._note_stop(number, None)
            self.__dict__["comes"] = number


@pytest.mark.parametrize("others", [STOP_SIGNAL, signal.SIGTERM])
@pytest.mark.parametrize("number", [STOP_SIGNAL, signal.SIGTERM])
def test_a_signal_that_comes_within_anothers_handler_is_no_second_wish(number: int, others: int) -> None:
    interrupts = Interrupted()
    interrupts.__dict__["comes"] = others
    interrupts._note_stop(number, None)
    assert interrupts.code == 128 + signal.SIGTERM and not interrupts.at_once
    interrupts.__dict__.update(comes=None, since=interrupts.since - 2)  # two seconds later
    interrupts._note_stop(signal.SIGTERM, None)
    assert interrupts.at_once


INHERITED = """
import os, signal, time
from lockstep.signals import Interrupts

interrupts = Interrupts()
interrupts.install("stopped as asked")
interrupts.note()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(1.1)
print(interrupts.code, interrupts.at_once, signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
"""


@pytest.mark.parametrize(
    ("command", "received"), [("", "143 False False"), ("trap '' HUP; ", "0 False True")]
)
def test_hangups_are_one_wish_to_stop_unless_they_are_ignored(command: str, received: str) -> None:
    """A shell sends another as it ends; under nohup there is none."""
    shell = ["sh", "-c", f'{command}exec "$0" "$@"', sys.executable, "-c", INHERITED]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
    assert done.stdout.strip() == received, done.stderr


ARRIVING = """
import os, signal, sys, threading, time
from lockstep.signals import Interrupts, signals_blocked

interrupts = Interrupts()
interrupts.install("stopped as asked")
interrupts.note()
if sys.argv[1] == "two threads":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
with signals_blocked():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
print(interrupts.code, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("threads", ["one thread", "two threads"])
def test_a_signal_that_comes_while_a_process_is_started_is_not_lost(threads: str) -> None:
    command = [sys.executable, "-c", ARRIVING, threads]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
    assert done.stdout == "143\n", done.stderr


EXITING = """
import os, signal, sys
from lockstep.launch.hosting import leave
from lockstep.launch.template import Template
from lockstep.signals import Interrupts


class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=int(sys.argv[1])):
        kill(pid, number)


interrupts, late = Interrupts(), Late()
interrupts.install("stopped as asked")
interrupts.note()
leave(3, Template([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_while_python_exits_changes_no_exit_status(number: int) -> None:
    """A callback of lockstep.train may ask to stop after the last validation, when the run is complete."""
    command = [sys.executable, "-c", EXITING, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
    assert done.returncode == 3, done.stderr


@pytest.mark.parametrize("redirection", [">&- 2>&-", ">/dev/full 2>&1"])
def test_it_leaves_where_its_last_words_cant_be_said(redirection: str) -> None:
    """A handler's exception would be taken for one of what it interrupts."""
    code = INHERITED.replace("interrupts.note()\n", "")
    shell = ["sh", "-c", f'exec "$0" "$@" {redirection}', sys.executable, "-c", code]
    assert subprocess.run(shell, cwd=ROOT, timeout=limit(30)).returncode == 143


@pytest.mark.slow
def test_a_signal_about_children_that_is_inherited_as_ignored_changes_nothing(program: Program) -> None:
    """A kernel that reaps children itself would leave no exit codes."""
    ignoring = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execvp(sys.argv[1], sys.argv[1:])
"""
    running = program.start("n_epochs=1", through=(sys.executable, "-c", ignoring))
    assert running.wait() == 0, running.output()
    assert "Traceback" not in running.output() and running.last_line().startswith("done")
    running.assert_nothing_left()


@pytest.mark.slow
def test_a_request_for_the_status_to_the_whole_group_ends_nothing(program: Program) -> None:
    running = program.start("n_epochs=100000", "snapshot_freq=100000")
    running.wait_for_text("starting: ")
    os.killpg(running.process.pid, signal.SIGUSR1)  # while the processes start
    running.wait_for_text("step 2/6")
    os.killpg(running.process.pid, signal.SIGUSR1)
    running.wait_for_text("status: ")
    assert all(Path(f"/proc/{pid}").exists() for pid in running.pids().values())
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output()
    assert "recovered" not in running.output()
