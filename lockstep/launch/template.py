"""The template process: it imports torch and the program once, and forks trainers and loaders.

A fork takes milliseconds, an import of torch about a second. The template computes nothing and opens no
device, because neither survives a fork. Each process is forked twice, and the process in between exits at
once, so the kernel makes the launcher the parent (prctl(2), PR_SET_CHILD_SUBREAPER). The launcher therefore
gets exit codes and takes its children with it when it dies, as with processes that it spawns itself; and a
template that is killed is missed only at the next start.
"""

import atexit
import importlib
import io
import json
import multiprocessing
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.comm.pipes import START_SECONDS, Pipe, within
from lockstep.errors import DeadlinePassed, PeerLost, PeerProblem
from lockstep.launch.child_main import ChildStart, child_main
from lockstep.memory.host import HostBlock
from lockstep.signals import (
    STOP_SIGNAL,
    adopt_orphans,
    die_with_parent,
    leave_signals_to_launcher,
    set_process_name,
    signals_blocked,
)

_NAME = "the template process"
_CODE = """import json, sys
connection, launcher, sys.path[:], modules = json.loads(sys.argv[1])
from lockstep.launch.template import run_template
run_template(connection, launcher, modules)
"""
_REPLACEMENTS = 3  # of a template that does not answer, for one child
_POLL_SECONDS = 0.0002  # between two looks for the exit of the process in between


@dataclass(frozen=True)
class _Request:
    """Launcher to template: fork a child. Its descriptors follow.

    Attributes:
        start: A pickled ChildStart, in which descriptors are numbered.
        open_files: The launcher's limits (setrlimit(2)), which it may have raised since the template began.
    """

    start: bytes
    environment: dict[str, str]
    n_descriptors: int
    open_files: tuple[int, int]


@dataclass(frozen=True)
class _Forked:
    """Template to launcher: the child's process id, or the error number of a failed fork."""

    pid: int = 0
    error: int = 0


class ForkedProcess:
    """The launcher's handle of a forked child, with multiprocessing's interface.

    Attributes:
        sentinel: A descriptor that is readable once the child has exited.
    """

    def __init__(self, pid: int, sentinel: int) -> None:
        self.pid, self.sentinel = pid, sentinel
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative after a signal; None while the child runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self.sentinel)
        return self._code

    def kill(self) -> None:
        """Kill the child, unless it has exited."""
        if self.exitcode is None:
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the child's exit."""
        until = time.monotonic() + timeout
        poll = select.poll()  # unlike select.select, for descriptors above 1023, too
        poll.register(self.sentinel)
        while self.exitcode is None and time.monotonic() < until:
            poll.poll(1000 * max(0.0, until - time.monotonic()))
            time.sleep(_POLL_SECONDS)  # its descriptors close a moment before it can be waited for


class Stopped(Exception):
    """A signal ends the run while a child is being started."""


class Template:
    """The launcher's side of the template process, which is started again when it has died.

    Args:
        modules: Imported by the template, for all its children.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        adopt_orphans()
        self._begin()

    def start(self, start: ChildStart, is_stopped: Callable[[], bool] = lambda: False) -> ForkedProcess:
        """Fork a child that runs `child_main(start)`, within its `timeout`; importing may take longer.

        Args:
            start: The child's parameters.
            is_stopped: Returns whether a signal ends the run; its handler may change that at any moment.

        Raises:
            OSError: The operating system refuses another process.
            PeerProblem: The template does not answer, and neither do those that replace it.
            Stopped: `is_stopped` holds before the template has answered.
        """
        for n_left in reversed(range(1 + _REPLACEMENTS)):
            try:
                return self._ask(start, is_stopped)
            except PeerProblem as problem:  # it was killed, or stands still
                if not n_left:
                    text = f"it was started {1 + _REPLACEMENTS} times, last as pid {self._process.pid}"
                    raise type(problem)(problem.peer, f"{problem}; {text}") from problem
                self._replace()
        raise AssertionError("never reached")

    def close(self) -> None:
        """End the template. Its children are not affected."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def _replace(self) -> None:
        self.close()
        self._begin()

    def _begin(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        setting = [theirs.fileno(), os.getpid(), list(map(str, sys.path)), self._modules]
        command = [sys.executable, *flags, "-c", _CODE, json.dumps(setting)]
        with signals_blocked():
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()
        self._pipe, self._has_answered = Pipe(ours, _NAME, START_SECONDS), False

    def _ask(self, start: ChildStart, is_stopped: Callable[[], bool]) -> ForkedProcess:
        sentinel, childs_end = os.pipe()
        confirmation, confirming = os.pipe()
        try:
            payload, descriptors = _pickled(start)
            descriptors += [childs_end, confirmation]
            open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._pipe.send(_Request(payload, dict(os.environ), len(descriptors), open_files))
            for descriptor in descriptors:
                self._pipe.send_descriptor(descriptor)
            self._await_answer(start, is_stopped)
            forked = self._pipe.receive(_Forked, f"to start {start.name}")
            if forked.error:
                raise OSError(forked.error, os.strerror(forked.error))
            os.write(confirming, b"1")
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            for descriptor in (childs_end, confirmation, confirming):
                os.close(descriptor)
        return ForkedProcess(forked.pid, sentinel)

    def _await_answer(self, start: ChildStart, is_stopped: Callable[[], bool]) -> None:
        """Wait for the template's answer. Raises as `start`."""

        def answers(at_most: float) -> bool:
            if not self._pipe.poll():
                if is_stopped():
                    self._replace()  # this one may answer yet
                    raise Stopped
                wait([self._pipe.fileno()], at_most)
            return self._pipe.poll()

        seconds = start.timeout if self._has_answered else max(START_SECONDS, start.timeout)
        if not within(seconds, answers):
            raise DeadlinePassed(_NAME, f"waited {seconds:g} s for {_NAME} to start {start.name}")
        self._has_answered = True


def run_template(connection: int, launcher: int, modules: Sequence[str]) -> None:
    """Run the template process, and each child that it forks.

    Args:
        connection: The descriptor of the pipe to the launcher.
        launcher: The launcher's process id.
        modules: Imported before the first fork.
    """
    die_with_parent()
    if os.getppid() != launcher:
        return
    leave_signals_to_launcher(lambda *_: os.kill(launcher, STOP_SIGNAL))
    for module in modules:
        importlib.import_module(module)
    start = _serve(Pipe(Connection(connection), "the launcher", START_SECONDS))
    if start is not None:
        _run_child(start)


def _run_child(start: ChildStart) -> None:
    """Run a child, and exit without taking the interpreter apart, which takes 0.7 s after importing torch."""
    with suppress(SystemExit):
        child_main(start)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # the terminal may be closed
            stream.flush()
    os._exit(0)


def _serve(pipe: Pipe) -> ChildStart | None:
    """Fork a child for each request. Return its start in each child, and None in the template at the end."""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while True:
        if not pipe.poll():
            poll.poll()
        try:
            request = pipe.receive(_Request, "its next request")
            resource.setrlimit(resource.RLIMIT_NOFILE, request.open_files)
            descriptors = [pipe.receive_descriptor("a child's pipe") for _ in range(request.n_descriptors)]
        except PeerLost:
            return None
        forked = _fork_twice()
        if forked is None:
            pipe.close()
            _await_confirmation(descriptors.pop())
            os.environ.clear()
            os.environ.update(request.environment)
            start = _unpickled(request.start, descriptors)
            set_process_name(start.name)
            return start
        for descriptor in descriptors:
            os.close(descriptor)
        pipe.send(forked)


def _fork_twice() -> _Forked | None:
    """Fork a child of the launcher. Return None in the child, once the launcher is its parent."""
    reading, writing = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return _Forked(error=error.errno or 0)
    if middle:
        os.close(writing)
        with open(reading, "rb") as file:
            answer = file.read()
        os.waitpid(middle, 0)  # from now on the launcher is the child's parent
        forked: _Forked = pickle.loads(answer)
        return forked
    middle = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        os.write(writing, pickle.dumps(_Forked(error=error.errno or 0)))
        os._exit(0)
    if child:
        os.write(writing, pickle.dumps(_Forked(child)))
        os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == middle:
        time.sleep(_POLL_SECONDS)
    return None


def _await_confirmation(descriptor: int) -> None:
    """Exit unless the launcher confirms this child: it starts another one if the template dies meanwhile."""
    if not os.read(descriptor, 1):
        os._exit(0)
    os.close(descriptor)


class _StartPickler(pickle.Pickler):
    """A pickler that numbers the descriptors of connections and memory files, which travel beside it."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.descriptors: list[int] = []

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, Connection):
            self.descriptors.append(value.fileno())
            return "connection", len(self.descriptors) - 1, value.readable, value.writable
        if isinstance(value, HostBlock):
            self.descriptors.append(value.descriptor)
            return "block", len(self.descriptors) - 1, value.n_bytes
        return None


class _StartUnpickler(pickle.Unpickler):
    """The counterpart of _StartPickler in the child."""

    def __init__(self, file: io.BytesIO, descriptors: Sequence[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def persistent_load(self, identity: tuple[Any, ...]) -> Connection | HostBlock:
        kind, number, *rest = identity
        descriptor = self._descriptors[number]
        return Connection(descriptor, *rest) if kind == "connection" else HostBlock(descriptor, *rest)


def _pickled(start: ChildStart) -> tuple[bytes, list[int]]:
    file = io.BytesIO()
    pickler = _StartPickler(file)
    pickler.dump(start)
    return file.getvalue(), pickler.descriptors


def _unpickled(payload: bytes, descriptors: Sequence[int]) -> ChildStart:
    """Return the start of this child. The last descriptor stays open until this process exits."""
    start: ChildStart = _StartUnpickler(io.BytesIO(payload), descriptors).load()
    return start
