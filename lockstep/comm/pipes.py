"""A pipe to another process: every wait has a deadline, and its error names the process that is awaited.

A message is its length, two CRC-32 (of the length and of the rest), and a pickle. So bytes that a library
writes into the wrong descriptor are refused. A process that sends also receives meanwhile: two processes that
send each other more than the kernel holds (some 200 KB) at once do not deadlock.
"""

import array
import errno
import math
import os
import pickle
import select
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from lockstep.errors import DeadlinePassed, Garbled, PeerLost

T = TypeVar("T")

START_SECONDS = 120.0  # deadline of a process's first message: importing torch from a cold disk takes long
_CHUNK = 1 << 20  # bytes taken from the socket at once
# For one descriptor: a read never spans two messages with one.
_ROOM = socket.CMSG_SPACE(array.array("i").itemsize)
_LENGTH = struct.Struct("!Q")
_SUMS = struct.Struct("!II")
_HEAD_BYTES = _LENGTH.size + _SUMS.size


class _Descriptor:
    """The message that accompanies a file descriptor."""


class Pipe:
    """One end of a duplex pipe to another process, whose first message may take START_SECONDS.

    Waits are counted in slices of a second, so that a run that is suspended as a whole (Ctrl-Z) and resumed
    loses one slice, not the whole deadline.

    Args:
        connection: Is taken over.
        peer: The other process's name, for errors.
        deadline: Of every wait, in seconds.
    """

    def __init__(self, connection: Connection, peer: str, deadline: float) -> None:
        self.peer = peer
        self._socket = socket.socket(fileno=socket.dup(connection.fileno()))
        connection.close()
        self._deadline = deadline
        self._patience = max(START_SECONDS, deadline)  # until the first message
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()  # parts, with their descriptors
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._ended = False  # the peer has closed its end

    def send(self, message: Any) -> None:
        """Send a message, and receive meanwhile.

        Raises:
            PeerLost: The peer has closed its end.
            DeadlinePassed: The peer does not read, and the pipe is full.
        """
        self._queue(message, [])
        _flush([self])

    def receive(self, kind: type[T], what: str) -> T:
        """Wait for a message and return it.

        Args:
            kind: Its type.
            what: What it is needed for, for the errors.

        Raises:
            PeerLost: The peer has closed its end.
            DeadlinePassed: No message arrived in time.
            Garbled: What arrived is not a message.
        """
        message = pickle.loads(self._receive_bytes(what))
        assert isinstance(message, kind), f"{self.peer} sent {message!r} where {kind} is due"
        return message

    def fileno(self) -> int:
        """Return the descriptor, for multiprocessing.connection.wait. Call `poll` before waiting."""
        return self._socket.fileno()

    def poll(self) -> bool:
        """Return whether `receive` would return or raise at once."""
        self._take_in()
        return self._ended or self._is_whole()

    def send_descriptor(self, descriptor: int) -> None:
        """Send the peer a duplicate of an open file descriptor (SCM_RIGHTS, see unix(7))."""
        self._queue(_Descriptor(), [descriptor])
        _flush([self])

    def receive_descriptor(self, what: str) -> int:
        """Return the descriptor that the peer's `send_descriptor` sent. The caller closes it.

        Args:
            what: What it is needed for, for the errors.

        Raises:
            OSError: This process has too many open files.
        """
        self.receive(_Descriptor, what)
        descriptor = self._descriptors.popleft()
        if descriptor < 0:
            raise OSError(errno.EMFILE, f"too many open files (ulimit -n) to open {what}")
        return descriptor

    def shorten_deadline(self, seconds: float) -> None:
        """Wait `seconds` at most from now on."""
        self._deadline, self._patience = min(self._deadline, seconds), min(self._patience, seconds)

    def close(self) -> None:
        """Close this end; the peer's next receive raises PeerLost."""
        self._socket.close()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors.clear()

    # -- sending ---------------------------------------------------------------------------------------------

    def _queue(self, message: Any, descriptors: list[int]) -> None:
        body = ForkingPickler.dumps(message)
        length = _LENGTH.pack(len(body))
        head = length + _SUMS.pack(zlib.crc32(length), zlib.crc32(body))
        if len(body) < _CHUNK:
            self._outgoing.append((memoryview(head + bytes(body)), descriptors))
        else:  # not copied
            self._outgoing.append((memoryview(head), descriptors))
            self._outgoing.append((memoryview(body), []))

    def _send_some(self) -> bool:
        """Send what the kernel takes without waiting. Return whether nothing is left."""
        while self._outgoing:
            part, descriptors = self._outgoing[0]
            packed = array.array("i", descriptors)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if descriptors else []
            try:
                # socket.send_fds takes no flags, and would wait. A program may have set SIGPIPE to SIG_DFL.
                n_sent = self._socket.sendmsg([part], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError) as error:
                raise PeerLost(self.peer, f"{self.peer} has left its pipe") from error
            self._outgoing.popleft()
            if n_sent < len(part):
                self._outgoing.appendleft((part[n_sent:], []))
        return True

    # -- receiving -------------------------------------------------------------------------------------------

    def _receive_bytes(self, what: str) -> bytes:
        while not self._is_whole():
            if self._ended:
                raise PeerLost(self.peer, f"{self.peer} has left its pipe ({what})")
            if not self._take_in() and not within(self._patience, self._wait_to_receive):
                raise DeadlinePassed(self.peer, f"waited {self._patience:g} s for {self.peer} ({what})")
        size, of_length, of_body = self._head()
        with memoryview(self._incoming) as incoming:
            body = bytes(incoming[_HEAD_BYTES : _HEAD_BYTES + size])
            if zlib.crc32(incoming[: _LENGTH.size]) != of_length or zlib.crc32(body) != of_body:
                raise Garbled(
                    self.peer, f"what {self.peer} sent is no message ({what}): its checksum is wrong"
                )
        del self._incoming[: _HEAD_BYTES + size]
        self._patience = self._deadline
        return body

    def _head(self) -> tuple[int, int, int]:
        """Return the first message's length, the checksum of the length and the checksum of the rest."""
        (size,) = _LENGTH.unpack_from(self._incoming)
        return size, *_SUMS.unpack_from(self._incoming, _LENGTH.size)

    def _is_whole(self) -> bool:
        """Return whether the first message is complete, or already known to be damaged."""
        if len(self._incoming) < _HEAD_BYTES:
            return False
        size, of_length, _ = self._head()
        is_damaged = zlib.crc32(self._incoming[: _LENGTH.size]) != of_length
        return is_damaged or len(self._incoming) >= _HEAD_BYTES + size

    def _take_in(self) -> bool:
        """Receive without waiting. Return whether anything arrived, the peer's end included."""
        if self._ended:
            return False
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            data, ancillary, received_flags, _ = self._socket.recvmsg(_CHUNK, _ROOM, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, ancillary, received_flags = b"", [], 0
        self._incoming += data
        for _, _, packed in ancillary:
            self._descriptors.extend(array.array("i", packed))
        # The kernel drops a descriptor beyond the limit.
        if received_flags & socket.MSG_CTRUNC and not ancillary:
            self._descriptors.append(-1)
        self._ended = not data
        return True

    def _wait_to_receive(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def send_to_all(pipes: Collection[Pipe], message: Any) -> None:
    """Send a message over each pipe, and receive over all of them meanwhile.

    So processes that all send to all others at once do not deadlock. Raises as `Pipe.send`.
    """
    for pipe in pipes:
        pipe._queue(message, [])
    _flush(pipes)


def _flush(pipes: Collection[Pipe]) -> None:
    """Send what is queued. After an interrupt, the rest precedes the next message."""
    while waiting := [pipe for pipe in pipes if not pipe._send_some()]:
        first = waiting[0]
        if not within(first._patience, lambda seconds: _take_in_or_wait(pipes, seconds)):
            text = f"waited {first._patience:g} s for {first.peer} to read its messages"
            raise DeadlinePassed(first.peer, text)


def _take_in_or_wait(pipes: Collection[Pipe], seconds: float) -> bool:
    """Receive until something can be sent. Return False if nothing happened in time."""
    poll, by_number = select.poll(), {pipe.fileno(): pipe for pipe in pipes}
    for number, pipe in by_number.items():
        sending = select.POLLOUT if pipe._outgoing else 0
        poll.register(number, sending if pipe._ended else sending | select.POLLIN)
    happened = poll.poll(seconds * 1000)
    for number, _ in happened:
        by_number[number]._take_in()
    return bool(happened)


def within(seconds: float, happens: Callable[[float], bool]) -> bool:
    """Call `happens` with slices of at most a second until it returns True; return False after `seconds`.

    A pause of this process costs one slice.
    """
    return any(happens(min(1.0, seconds)) for _ in range(math.ceil(seconds)))
