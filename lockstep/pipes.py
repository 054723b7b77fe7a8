"""A multiprocessing pipe whose every wait has a deadline and names whom it waits for."""

import errno
import math
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from lockstep.errors import DeadlinePassed, PeerLost

T = TypeVar("T")


START_SECONDS = 120.0  # patience with a process that is starting: importing torch from a cold disk takes long


class Pipe:
    """One end of a duplex pipe to the process called `peer`, whose first message may take START_SECONDS.

    `deadline` is in seconds. They are counted in slices, so that a run that was suspended as a whole (Ctrl-Z)
    and resumed loses one slice at most, not the whole deadline.
    """

    def __init__(self, connection: Connection, peer: str, deadline: float) -> None:
        self.peer = peer
        self._connection = connection
        # not Connection.poll, which makes a selector each time
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._deadline = deadline
        self._patience = max(START_SECONDS, deadline)  # until the peer has shown that it is there

    def send(self, message: Any) -> None:
        """Sends a small message.

        Raises PeerLost where nobody is left to read it, DeadlinePassed when the peer lets the pipe fill up.
        """
        if not self._within(self._patience, lambda seconds: bool(self._writable.poll(seconds * 1000))):
            raise DeadlinePassed(
                self.peer, f"waited {self._patience:g} s for {self.peer} to read its messages"
            )
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerLost(self.peer, f"{self.peer} has left its pipe") from error

    def receive(self, kind: type[T], what: str) -> T:
        """Waits for a message of type `kind`; `what` says, for the errors, what it is needed for.

        Raises PeerLost when the peer has gone, DeadlinePassed when it does not answer in time.
        """
        self._wait(what)
        try:
            message = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise PeerLost(self.peer, f"{self.peer} has left its pipe ({what})") from error
        assert isinstance(message, kind), f"{self.peer} sent {message!r} where {kind} is due"
        return message

    def fileno(self) -> int:
        """For multiprocessing.connection.wait."""
        return self._connection.fileno()

    def poll(self) -> bool:
        """Whether a message, or the peer's end, is there to be received at once."""
        return self._connection.poll()

    def send_descriptor(self, descriptor: int) -> None:
        """Gives the peer a duplicate of an open file descriptor (SCM_RIGHTS, see unix(7))."""
        with self._socket() as channel:
            socket.send_fds(channel, [b"d"], [descriptor])

    def receive_descriptor(self, what: str) -> int:
        """The descriptor that the peer's `send_descriptor` sent; it is the caller's to close.

        Raises OSError where this process has no room for one more.
        """
        self._wait(what)
        with self._socket() as channel:
            data, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not data:
            raise PeerLost(self.peer, f"{self.peer} has left its pipe ({what})")
        if not descriptors:  # the kernel drops what finds no room (MSG_CTRUNC, see recvmsg(2))
            raise OSError(errno.EMFILE, f"too many open files (ulimit -n) to open {what}")
        return descriptors[0]

    def close(self) -> None:
        """Closes this end; the peer's next receive raises PeerLost."""
        self._connection.close()

    def _wait(self, what: str) -> None:
        if not self._within(self._patience, lambda seconds: bool(self._readable.poll(seconds * 1000))):
            raise DeadlinePassed(self.peer, f"waited {self._patience:g} s for {self.peer} ({what})")
        self._patience = self._deadline

    @staticmethod
    def _within(seconds: float, happens: Callable[[float], bool]) -> bool:
        return any(happens(min(1.0, seconds)) for _ in range(math.ceil(seconds)))

    @contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """The connection as a socket; not a duplicate, for which there may be no descriptor left."""
        channel = socket.socket(fileno=self._connection.fileno())
        try:
            yield channel
        finally:
            channel.detach()
