"""Programs of the project in forks of a process that has imported what they import.

A start of train.py takes about two seconds of a core, nearly all of it imports: by the launcher, and by its
template process. Tests of what happens later need neither. Each program is a fork in a session of its own,
and a launcher's template is a fork of the launcher. Both are otherwise as in a run that a user starts, and
so is a template that replaces one that was lost.
"""

import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "MALLOC_")
_START_SECONDS = 300  # for the imports, on a busy machine
_POLL_SECONDS = 0.005


class ForkServer:
    """The process that forks programs, as its user sees it. It exits when its user does.

    Args:
        environment: That of the process; the programs have their own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._at_start = _at_start(environment)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            cwd=ROOT,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._socket, self._unread = ours, b""
        self._codes: dict[int, int] = {}

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether a fork with this environment is as a new interpreter with it."""
        return _at_start(environment) == self._at_start

    def start(
        self, program: str, words: Sequence[str], output: Path, environment: Mapping[str, str]
    ) -> "ForkedProgram":
        """Start a program, a path from the project's root. Both of its streams go to the file `output`."""
        output.write_text("")
        command = [str(ROOT / program), *words]
        status = Path("/proc/self/status").read_text().splitlines()
        umask = next(line for line in status if line.startswith("Umask:"))
        request = {
            "command": command,
            "output": str(output),
            "environment": dict(environment),
            "umask": int(umask.split()[1], 8),
        }
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return ForkedProgram(self._receive_pid(), self)

    def code_of(self, pid: int) -> int | None:
        """Return the exit status of a program, negative after a signal; None while it runs."""
        while pid not in self._codes and self._receive(0):
            pass
        return self._codes.get(pid)

    def close(self) -> None:
        """End the server. Its programs are not affected."""
        self._socket.close()
        self._process.wait()

    def _receive_pid(self) -> int:
        self._pid = 0
        while not self._pid:
            assert self._receive(_START_SECONDS), "the process that forks programs does not answer"
        return self._pid

    def _receive(self, seconds: float) -> bool:
        """Take in what has arrived within `seconds`. Return whether anything has."""
        if not select.select([self._socket], [], [], seconds)[0]:
            return False
        received = self._socket.recv(1 << 16)
        assert received, "the process that forks programs has exited"
        *lines, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, lines):
            if "code" in message:
                self._codes[message["pid"]] = message["code"]
            else:
                self._pid = message["pid"]
                self._codes.pop(self._pid, None)  # of an earlier process with this number
        return True


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that take effect as an interpreter starts, or libraries are loaded."""
    return {name: value for name, value in environment.items() if name.startswith(_AT_START)}


class ForkedProgram:
    """A program that the server has forked, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server

    def poll(self) -> int | None:
        """Return the exit status, or None while the program runs."""
        return self._server.code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired."""
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _ForkedTemplate:
    """The launcher's handle of a template that it has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


def _fork_first_template() -> None:
    """Have the launcher's first template forked, and those that replace it started as usual."""
    from lockstep.comm.pipes import START_SECONDS, Pipe
    from lockstep.launch import template
    from lockstep.signals import signals_blocked

    as_usual = template.Template._begin

    def begin(self: template.Template) -> None:
        template.Template._begin = as_usual  # type: ignore[method-assign]
        ours, theirs = multiprocessing.Pipe()
        launcher = os.getpid()
        with signals_blocked():
            pid = os.fork()
            if pid == 0:
                ours.close()
                _reset_signals()
                template.run_template(os.dup(theirs.fileno()), launcher, self._modules)
                os._exit(0)
        theirs.close()
        self._process = _ForkedTemplate(pid)  # type: ignore[assignment]
        self._pipe, self._has_answered = Pipe(ours, template._NAME, START_SECONDS), False

    template.Template._begin = begin  # type: ignore[method-assign]


def _reset_signals() -> None:
    """Restore the signals' actions of a new interpreter, as exec(2) and Python's start do."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and not isinstance(signal.getsignal(number), signal.Handlers):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: list[str], output: str, environment: dict[str, str], umask: int) -> None:
    """Become the program. Never returns."""
    os.setsid()
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    _reset_signals()
    file = os.open(output, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    code = 0
    try:
        _fork_first_template()
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit takes 0.7 s after importing torch


def _serve(connection: socket.socket) -> None:
    """Fork a program for each request, and report how each has ended."""
    awake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = connection.makefile("r")

    def send(**message: int) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    while True:
        ready, _, _ = select.select([connection, awake], [], [])
        if awake in ready:
            os.read(awake, 1 << 12)
            for pid, status in _exited():
                send(pid=pid, code=os.waitstatus_to_exitcode(status))
        if connection in ready:
            line = requests.readline()
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for descriptor in (awake, waking, connection.detach()):
                    os.close(descriptor)
                _run(**json.loads(line))
            send(pid=pid)


def _exited() -> list[tuple[int, int]]:
    """Return children that have exited, with their statuses."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, status))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for _name in ("train", "train_funcs", "proc_load", "preprocessing.make_hkl"):
        importlib.import_module(_name)
    _serve(socket.socket(fileno=int(sys.argv[1])))
