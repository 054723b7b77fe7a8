"""Text that can always be stored and printed: what an encoding lacks becomes a backslash escape.

Names of files may be any bytes. Python holds bytes that are not UTF-8 as lone surrogates, such as '\\udce9',
which no encoding has.
"""

import io
import sys


def as_valid(text: str) -> str:
    """Return a text that UTF-8 can store, with lone surrogates as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def one_line(text: str) -> str:
    """Return a text as one line of a list: line breaks, which names of files may have, become escapes."""
    return "".join(repr(each)[1:-1] if each.splitlines() == [""] else each for each in text)


def escape_when_printing() -> None:
    """Have stdout and stderr print an escape for each character that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not None, and not a notebook's
            stream.reconfigure(errors="backslashreplace")
