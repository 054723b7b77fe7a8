"""The frame of a command-line program: the parser of its arguments, and its errors as one line."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from lockstep.errors import UserError

_P = ParamSpec("_P")


def make_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """Return a parser whose help text is a program's docstring, as it is written.

    Args:
        description: The docstring.
        command: The name of the program; None: the script's. The command `lockstep` gives its programs a
            global variable COMMAND.
    """
    return argparse.ArgumentParser(
        command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def reports_errors(
    name: str, *others: type[Exception], interrupted: str | None = None
) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """Return a decorator of a main function that prints an error as one line, and returns 2.

    Args:
        name: Begins the line.
        others: Errors that are reported like a UserError.
        interrupted: What to print after Ctrl-C, to return 130; None: the caller handles it.
    """

    errors: tuple[type[Exception], ...] = (UserError, *others)

    def decorate(main: Callable[_P, int]) -> Callable[_P, int]:
        @functools.wraps(main)
        def run(*arguments: _P.args, **keywords: _P.kwargs) -> int:
            try:
                return main(*arguments, **keywords)
            except errors as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                if interrupted is None:
                    raise
                print(f"{name}: {interrupted}", file=sys.stderr)
                return 130

        return run

    return decorate
