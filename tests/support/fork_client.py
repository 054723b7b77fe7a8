"""Asks the process of fork_server.py for programs; as a script, it stands for such a program.

The script has the program's standard streams, passes on its signals and ends as it does. Its arguments are
the address of the server and those of an interpreter. With -I -S it starts in 0.02 s.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ask(
    address: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    **more: Any,
) -> tuple[socket.socket, int]:
    """Ask for a program.

    Args:
        address: Of the server.
        arguments: Those of an interpreter: [-P] [-m MODULE | FILE] WORDS.
        environment: The program's.
        streams: Descriptors of its standard input, output and error output.
        more: `folder`, its working directory; `session`, whether it has its own session; `blocked`, the
            signals that are blocked.

    Returns:
        The connection, from which the exit status is received, and which ends the program as it is closed;
        and the process id, or 0 if the program needs its own interpreter.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{address}")
    lines = Path("/proc/self/status").read_text().splitlines()
    umask = next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))
    request = {"arguments": list(arguments), "environment": dict(environment), "umask": umask, **more}
    socket.send_fds(connection, [json.dumps(request).encode()], streams)
    return connection, receive(connection)["pid"]


def receive(connection: socket.socket) -> dict[str, int]:
    """Receive a message of the server's."""
    content = connection.recv(1 << 10)
    assert content, "the process that forks programs has exited"
    return dict(json.loads(content))


def main(address: str, *arguments: str) -> None:
    """Stand for a program."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    more = {"folder": os.getcwd(), "session": False, "blocked": list(map(int, blocked))}
    connection, pid = ask(address, arguments, os.environ, (0, 1, 2), **more)
    if not pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = receive(connection)["code"]
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
