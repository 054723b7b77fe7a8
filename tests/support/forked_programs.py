"""Programs of the project in forks of a process that has imported what they import.

A start of train.py takes about two seconds of a core, nearly all of it imports: by the launcher, and by its
template process. Tests of what happens later need neither. Each program is a fork, and a launcher's template
is a fork of the launcher. Both are otherwise as in a run that a user starts, and so is a template that
replaces one that was lost. Programs with other variables that an interpreter reads at its start are started
as usual.
"""

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import fork_client

ROOT = Path(__file__).resolve().parent.parent.parent
_ENVIRONMENT = dict(os.environ)  # before any test changes it
_POLL_SECONDS = 0.005


class ForkServer:
    """The process that forks programs, as its user sees it. It exits when its user does.

    Args:
        environment: That of the process; the programs have their own.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("")  # the kernel chooses an unused name, which is no file
        listener.listen(128)
        self._address = listener.getsockname()[1:].decode()
        descriptors = (listener.fileno(), theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "fork_server.py"), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            pass_fds=descriptors,
            start_new_session=True,
        )
        listener.close()
        theirs.close()

    def start(
        self, arguments: Sequence[str], output: Path, environment: Mapping[str, str]
    ) -> "ForkedProgram | None":
        """Start a program in its own session, from the project's root.

        Args:
            arguments: Those of an interpreter: the program's file and its words.
            output: A file for its standard output and error output.
            environment: The program's.

        Returns:
            None if the program needs its own interpreter, because of its environment.
        """
        with open(output, "w") as file, open(os.devnull) as empty:
            streams = (empty.fileno(), file.fileno(), file.fileno())
            more = {"folder": str(ROOT), "session": True, "blocked": []}
            connection, pid = fork_client.ask(self._address, arguments, environment, streams, **more)
        return ForkedProgram(pid, connection) if pid else None

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that has the effects of this one of an interpreter, in a fork."""
        return [sys.executable, "-I", "-S", fork_client.__file__, self._address, *command[1:]]

    def close(self) -> None:
        """End the server and the programs that still run."""
        self._socket.close()
        self._process.wait()


@functools.cache
def server() -> ForkServer:
    """Return the server of this process's programs."""
    return ForkServer(_ENVIRONMENT)


def forked(command: Sequence[str]) -> list[str]:
    """Return a command that has the effects of this one of an interpreter, in a fork."""
    return server().command(command)


class ForkedProgram:
    """A program that the server has forked, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection, self._code = pid, connection, None

    def poll(self) -> int | None:
        """Return the exit status, negative after a signal, or None while the program runs."""
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            self._code = fork_client.receive(self._connection)["code"]
            self._connection.close()
        return self._code

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
