"""What the doctor shows: lines under titles, and how many of them tell of something wrong."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.errors import UserError

T = TypeVar("T")
_NAME_WIDTH = 28


@dataclass(frozen=True)
class Line:
    """What was found out about one thing; where it is wrong, why, and what to do."""

    name: str
    text: str
    wrong: bool = False


def failure(name: str, problem: str) -> Line:
    """The line for a process that has failed. Who already runs the doctor is sent on."""
    return Line(name, problem.replace("python -m lockstep.doctor", "docs/install.md"), wrong=True)


class Report:
    """Shows each line as soon as it is known."""

    def __init__(self) -> None:
        self.n_wrong = 0

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def show(self, line: Line) -> None:
        self.n_wrong += line.wrong
        text = f"WRONG: {' '.join(line.text.split())}" if line.wrong else line.text
        print(f"  {line.name:<{_NAME_WIDTH}}{text}", flush=True)

    def show_all(self, name: str, lines: Callable[[], Iterable[Line]]) -> None:
        """Shows the lines as they come. Where they break off, a last line, called `name`, says why."""

        def show() -> None:
            for line in lines():
                self.show(line)

        self.attempt(name, show)

    def attempt(self, name: str, part: Callable[[], T]) -> T | None:
        """The value of a part of the examination, or None where it fails, which is then a line."""
        try:
            return part()
        except UserError as error:
            self.show(Line(name, str(error), wrong=True))
        except OSError as error:
            self.show(Line(name, f"{error.filename or 'a file'}: {error.strerror or error}", wrong=True))
        return None
