"""Text that can always be stored and printed: what an encoding lacks becomes a backslash escape.

Names of files may be any bytes. Python holds bytes that are not UTF-8 as lone surrogates, such as '\\udce9',
which no encoding has.
"""

import io
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING
from unicodedata import category

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CONTROLS = ("Cc", "Zl", "Zp")  # of Unicode: control characters, line and paragraph separators


def as_valid(text: str) -> str:
    """Return a text that UTF-8 can store, with lone surrogates as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def one_line(text: str) -> str:
    """Return a text as one line of a list, for a terminal, too.

    Line breaks and other control characters, which names of files may have, become escapes.
    """
    return "".join(repr(each)[1:-1] if category(each) in _CONTROLS else each for each in text)


def as_name(text: str) -> str:
    """Return the name of a class as one line that UTF-8 can store: folders may have any names."""
    return one_line(as_valid(text))


def escape_when_printing() -> None:
    """Have stdout and stderr print an escape for each character that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, and not a notebook's
            stream.reconfigure(errors="backslashreplace")


class _Output(io.FileIO):
    """A standard output whose reader may exit before this program does, or whose disk may be full.

    Attributes:
        ends_program: Whether the program then ends. Otherwise later output is discarded.
    """

    ends_program = True

    def write(self, data: "ReadableBuffer") -> int:
        """Write bytes, or end the program (or discard them) if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            discarding = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discarding, self.fileno())  # so that flushing at exit does not fail again
            os.close(discarding)
            if self.ends_program:  # no OSError, which a caller could take for that of a file
                raise SystemExit(_exit_status(error)) from None
            return memoryview(data).nbytes


def _exit_status(error: OSError) -> int:
    """Return the exit status of a program whose output failed, and print why unless its reader has exited."""
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    with suppress(OSError):  # the same disk may hold the errors, too
        print(f"lockstep: standard output can't be written: {error.strerror}", file=sys.stderr)
    return 2


def handle_closed_pipe(ends_program: bool = True) -> None:
    """Have a program end quietly when the reader of its output has exited, as in `lockstep --help | head -1`.

    The exit status is then 141, that of a program that SIGPIPE ends. After another error, as of a full disk,
    it is 2, and a line on stderr names the error.

    Args:
        ends_program: False: the program continues without output, because its work matters more.
    """
    _open_closed_streams()
    for name in ("stdout",) if ends_program else ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper:  # a test's or a notebook's
            continue
        output = getattr(stream.buffer, "raw", stream.buffer)
        if type(output) is io.FileIO:
            stream.flush()
            output = _Output(output.fileno(), "wb", closefd=False)
            buffer = io.BufferedWriter(output)
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
        if isinstance(output, _Output):
            output.ends_program = ends_program


def _open_closed_streams() -> None:
    """Open standard streams that were closed before the program started, as by `>&-`, on /dev/null.

    The next file that is opened would get the descriptor, and with it what libraries print.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            stream = os.fdopen(descriptor, "r" if name == "stdin" else "w", errors="backslashreplace")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # so that the descriptor stays open
