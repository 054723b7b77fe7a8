"""A status board: one line of text with what a process is doing, in memory that the launcher maps too.

Writing a line costs about a microsecond, so every phase of every step is reported. The last line of a killed
process survives it, so the launcher can report what the process was doing.
"""

import os
import shutil
import struct
import time
from pathlib import Path

from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.memory.host import HostBlock, HostMemory

TRACE = "LOCKSTEP_TRACE"  # environment variable: the folder for traces of the launcher's children
_SIZE = 528
_TAIL = struct.Struct("<QQQ")  # behind the line: the last step's epoch and number, and the count of lines


class StatusBoard:
    """The status line of one process, which writes it; the launcher reads it."""

    def __init__(self, block: HostBlock) -> None:
        self._block = block
        self._bytes = block.array("u1", (_SIZE,))
        self._trace: int | None = None
        self._trace_path = Path()

    @classmethod
    def create(cls) -> "StatusBoard":
        """Allocate the board of this process."""
        return cls(HostMemory().allocate(_SIZE, "a status board"))

    @classmethod
    def receive(cls, pipe: Pipe) -> "StatusBoard":
        """Open the board of the process at the other end of a pipe, which calls `send`."""
        board = cls(HostMemory().receive(pipe, "its status board"))
        board.close()  # the mapping needs no descriptor, and a launcher opens boards in every attempt
        return board

    def send(self, pipe: Pipe) -> None:
        """Give the process at the other end of a pipe access to this board."""
        self._block.send(pipe)

    def close(self) -> None:
        """Release the shared memory. This process can still read the last line."""
        self._block.close()

    def say(self, text: str) -> None:
        """Replace the line. Text over 500 bytes is cut. Names of files in it may be any bytes."""
        encoded = text.encode("utf-8", "backslashreplace")[: _SIZE - _TAIL.size - 4]
        memory = self._bytes.data
        memory[: len(encoded) + 1] = encoded + b"\0"
        self._count_up(memory)
        if self._trace is not None:
            line = b"%d %b\n" % (time.monotonic_ns(), encoded.replace(b"\n", b" "))
            try:
                os.write(self._trace, line)
            except OSError as error:
                self._trace = None  # so that this process can still report its failure
                raise _cant_write(self._trace_path, error) from error

    def trace(self, path: Path) -> None:
        """Append every later line to a file too, with its time in nanoseconds (see lockstep/trace).

        Raises:
            UserError: The file can't be created. `say` raises it, once, if a line can't be written.
        """
        self._trace_path = path
        try:
            self._trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _cant_write(path, error) from error

    def read(self) -> str:
        """Return the last line."""
        return bytes(self._bytes[: -_TAIL.size]).split(b"\0", 1)[0].decode(errors="replace")

    def count(self) -> int:
        """Return how often the line was replaced; it grows as long as the process works."""
        return int.from_bytes(bytes(self._bytes[-8:]), "little")

    def count_step(self, epoch: int, step: int) -> None:
        """Record that this process has completed a step, both numbers from 1."""
        _TAIL.pack_into(self._bytes.data, _SIZE - _TAIL.size, epoch, step, self.count())

    def last_step(self) -> tuple[int, int]:
        """Return epoch and number of the last step that the process completed, (0, 0) before the first."""
        epoch, step, _ = _TAIL.unpack_from(self._bytes.data, _SIZE - _TAIL.size)
        return epoch, step

    def _count_up(self, memory: memoryview) -> None:
        count = int.from_bytes(memory[-8:], "little") + 1
        memory[-8:] = count.to_bytes(8, "little")


def _cant_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{path}: the trace can't be written: {error.strerror}. Set trace=false to train without it"
    )


def begin_trace(enabled: bool, folder: Path) -> None:
    """Have processes that are started from now on write a trace, if `enabled`.

    Args:
        folder: The run's folder; traces go to its subfolder trace/.

    Raises:
        UserError: The subfolder can't be created.
    """
    os.environ.pop(TRACE, None)
    if enabled:
        # An earlier start's clock may have another origin.
        shutil.rmtree(folder / "trace", ignore_errors=True)
        try:
            (folder / "trace").mkdir()
        except OSError as error:
            raise _cant_write(folder / "trace", error) from error
        os.environ[TRACE] = str(folder.resolve() / "trace")
