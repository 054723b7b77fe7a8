"""Messages over a pipe from another process: recorded valid ones, and their receiver."""

import multiprocessing
import socket
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.comm.pipes import Pipe
from lockstep.errors import PeerProblem, UserError

# Plain values, so that any lookup of a class during unpickling is a finding.
MESSAGES = ((1, "train", 16, 32), ["epoch 1, step 2: offered", (False, [1.5, 2.0])], "x" * 3000, None, 2**70)
_DEADLINE = 5.0  # seconds; the other end is closed, so nothing is waited for


def make_messages(folder: Path) -> None:
    """Return one file with the bytes of all messages."""
    ours, theirs = multiprocessing.Pipe()
    pipe = Pipe(ours, "the receiver", _DEADLINE)
    for message in MESSAGES:
        pipe.send(message)
    pipe.close()
    with socket.socket(fileno=theirs.fileno()) as sent:
        content = bytearray()
        while part := sent.recv(1 << 16):
            content += part
        sent.detach()
    theirs.close()
    (folder / "messages.bin").write_bytes(content)


def read_messages(folder: Path) -> None:
    """Receive the messages like a trainer; raise UserError naming the file if one is invalid or cut short."""
    path = folder / "messages.bin"
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    theirs.send(path.read_bytes() if path.exists() else b"")  # less than the kernel holds
    theirs.close()
    pipe = Pipe(Connection(ours.detach()), "trainer 1", _DEADLINE)
    try:
        received = [pipe.receive(object, "a message") for _ in MESSAGES]
    except PeerProblem as error:
        raise UserError(f"{path}: {error}") from error
    finally:
        pipe.close()
    assert received == list(MESSAGES), "other messages were received than were sent"
