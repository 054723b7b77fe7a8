"""The process that has imported what programs of the project import, and forks one for each connection.

It is started by `forked_programs.ForkServer`, and exits when its user does. Arguments: the descriptors of a
listening socket, and of one that its user closes.
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
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_SIMULATOR = ROOT / "tests" / "cuda_sim" / "site"
_MODULES = ("train", "train_funcs", "proc_load", "preprocessing.make_hkl", "validate", "verify", "classify")
_LONGEST = 1 << 20  # of a request, in bytes
# Variables that take effect as an interpreter starts, or as libraries are loaded.
_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "MALLOC_")
_APPLIED = ("PYTHONPATH", "PYTHONUNBUFFERED")  # here


def serve(listener: socket.socket, user: socket.socket) -> None:
    """Fork a program for each connection, and answer with its process id, and then with its exit status.

    A program whose connection is closed is killed, and so are all when the user has exited.
    """
    programs: dict[int, socket.socket] = {}
    awake, waking = _exits()
    while True:
        ready, _, _ = select.select([listener, user, awake, *programs.values()], [], [])
        if awake in ready:
            os.read(awake, 1 << 12)
            for pid, status in _exited():
                with programs.pop(pid) as connection:
                    _answer(connection, code=os.waitstatus_to_exitcode(status))
        for pid, connection in programs.items():
            if connection in ready or user in ready:
                os.kill(pid, signal.SIGKILL)
        if user in ready:
            return
        if listener in ready:
            connection = listener.accept()[0]
            if pid := _fork(connection, [listener, user, *programs.values()], (awake, waking)):
                programs[pid] = connection
            else:
                connection.close()


def _exits() -> tuple[int, int]:
    """Return the ends of a pipe. The first can be read when children have exited."""
    awake, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return awake, waking


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


def _answer(connection: socket.socket, **message: int) -> None:
    with suppress(BrokenPipeError):  # who asked has exited
        connection.sendall(json.dumps(message).encode())


def _fork(connection: socket.socket, others: list[socket.socket], exits: tuple[int, int]) -> int:
    """Fork the program that a connection asks for. Return its process id, or 0 if it needs an interpreter."""
    content, streams, _, _ = socket.recv_fds(connection, _LONGEST, 3)
    request = json.loads(content or "null")  # nothing, if who asked has exited
    pid = os.fork() if request and _can_fork(request["environment"]) else None
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for file in (connection, *others):
            file.close()
        for number in exits:
            os.close(number)
        _become(request, streams)
    for number in streams:
        os.close(number)
    _answer(connection, pid=pid or 0)
    return pid or 0


def _can_fork(environment: dict[str, str]) -> bool:
    """Return whether a fork with this environment is as a new interpreter with it.

    Modules of other folders may hide what this process has imported, or run as an interpreter starts.
    """
    for place in {*map(Path, _python_path(environment))} - {*_simulation(environment)}:
        is_known = place.is_relative_to(ROOT) or str(place) in _USUAL_PATH
        if not is_known or (place / "sitecustomize.py").exists():
            return False
    return _at_start(environment) == _at_start(os.environ)


def _simulation(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders from which trainers have PyCUDA on the simulated driver. Launchers use neither."""
    if "CUDA_SIM_PARTS" not in environment or "CUDA_SIM_ALL" in environment:
        return []
    return [_SIMULATOR, Path(json.loads(environment["CUDA_SIM_PARTS"])[0])]


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_AT_START) and name not in _APPLIED
    }


def _python_path(environment: Mapping[str, str]) -> list[str]:
    return list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Become the program. Never returns."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _reset_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _open_streams()
    code = 0
    try:
        _fork_first_template()
        _run(request["arguments"])
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            print(ending.code, file=sys.stderr)
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit takes 0.7 s after importing torch


def _open_streams() -> None:
    """Open the standard streams as an interpreter does: those of the server may be files, and these pipes."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    write_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=write_through)


def _run(arguments: list[str]) -> None:
    """Run a program, given as the arguments of an interpreter: [-P] [-m MODULE | FILE] WORDS."""
    is_safe = arguments[0] == "-P"
    arguments = arguments[is_safe:]
    is_module = arguments[0] == "-m"
    program, *words = arguments[is_module:]
    first = [] if is_safe else [os.getcwd() if is_module else str(Path(program).resolve().parent)]
    sys.path[:] = [*first, *_python_path(os.environ), *_USUAL_PATH]
    sys.argv = [program, *words]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def _reset_signals() -> None:
    """Restore the signals' actions of a new interpreter, as exec(2) and Python's start do."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and not isinstance(signal.getsignal(number), signal.Handlers):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
                if _simulation(os.environ):
                    sys.orig_argv = [template.__name__]  # by which sitecustomize.py recognises a template
                    runpy.run_path(str(_SIMULATOR / "sitecustomize.py"))
                template.run_template(os.dup(theirs.fileno()), launcher, self._modules)
                os._exit(0)
        theirs.close()
        self._process = _ForkedTemplate(pid)  # type: ignore[assignment]
        self._pipe, self._has_answered = Pipe(ours, template._NAME, START_SECONDS), False

    template.Template._begin = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    _USUAL_PATH = [place for place in sys.path[1:] if place not in _python_path(os.environ)]
    _USUAL_PATH += [] if str(ROOT) in _USUAL_PATH else [str(ROOT)]
    sys.path[0] = str(ROOT)
    importlib.import_module("lockstep.hosts.store").load_torch()  # first, since it decides what torch logs
    for _name in _MODULES:
        importlib.import_module(_name)
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
