"""A status board: one line of text that says what a process is doing, in memory that the launcher maps too.

Writing it costs about a microsecond, so every phase of every step is told. When a process is killed, its last
line is still there, and the launcher can say what it was doing.
"""

import os
import shutil
import time
from pathlib import Path

from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.memory.host import HostBlock, HostMemory

TRACE = "LOCKSTEP_TRACE"  # the variable that names the folder for traces to the launcher's children
_SIZE = 512


class StatusBoard:
    """The board of one process: that process writes it, the launcher reads it."""

    def __init__(self, block: HostBlock) -> None:
        self._block = block
        self._bytes = block.array("u1", (_SIZE,))
        self._trace: int | None = None
        self._trace_path = Path()

    @classmethod
    def create(cls) -> "StatusBoard":
        return cls(HostMemory().allocate(_SIZE, "a status board"))

    @classmethod
    def receive(cls, pipe: Pipe) -> "StatusBoard":
        return cls(HostMemory().receive(pipe, "its status board"))

    def send(self, pipe: Pipe) -> None:
        self._block.send(pipe)

    def close(self) -> None:
        """Lets go of it; what was said last can still be read here."""
        self._block.close()

    def say(self, text: str) -> None:
        """Replaces the line. Text over 500 bytes is cut."""
        encoded = text.encode()[: _SIZE - 12]
        memory = self._bytes.data
        memory[: len(encoded) + 1] = encoded + b"\0"
        self._count_up(memory)
        if self._trace is not None:
            line = b"%d %b\n" % (time.monotonic_ns(), encoded.replace(b"\n", b" "))
            try:
                os.write(self._trace, line)
            except OSError as error:
                self._trace = None  # what this process says of its end must not fail, too
                raise _unwritten(self._trace_path, error) from error

    def trace(self, path: Path) -> None:
        """From now on every line is also appended to a file, with its time in ns (lockstep/trace).

        Raises UserError where the file can't be made; `say` does, once, where a line can't be written.
        """
        self._trace_path = path
        try:
            self._trace = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _unwritten(path, error) from error

    def read(self) -> str:
        """The last line that was said."""
        return bytes(self._bytes[:-8]).split(b"\0", 1)[0].decode(errors="replace")

    def count(self) -> int:
        """How often the line was said: a process that works raises it."""
        return int.from_bytes(bytes(self._bytes[-8:]), "little")

    def _count_up(self, memory: memoryview) -> None:
        count = int.from_bytes(memory[-8:], "little") + 1
        memory[-8:] = count.to_bytes(8, "little")


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: the trace can't be written: {error.strerror}; trace=false goes without it")


def begin_trace(wanted: bool, folder: Path) -> None:
    """If wanted, has the processes that are started from now on write down what they do.

    Raises UserError where there is no place for it.
    """
    os.environ.pop(TRACE, None)
    if wanted:
        shutil.rmtree(folder / "trace", ignore_errors=True)  # of an earlier start: its clock may be another
        try:
            (folder / "trace").mkdir()
        except OSError as error:
            raise _unwritten(folder / "trace", error) from error
        os.environ[TRACE] = str(folder.resolve() / "trace")
