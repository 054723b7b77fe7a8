"""The doctor's output: lines under titles, and the number of problems."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lockstep.errors import UserError

T = TypeVar("T")
TRY_SECONDS = 120.0  # for a part in processes of its own: enough to import torch from a cold disk
_NAME_WIDTH = 28


@dataclass(frozen=True)
class Finding:
    """One result. If it is wrong, the text holds the reason and a remedy."""

    name: str
    text: str
    wrong: bool = False


def failure(name: str, problem: str) -> Finding:
    """Return the line for a failed process. Its advice to run the doctor becomes one to read the guide."""
    return Finding(name, problem.replace("python -m lockstep.doctor", "docs/install.md"), wrong=True)


class Report:
    """The output, which shows each line as soon as it is known."""

    def __init__(self) -> None:
        self.n_wrong = 0

    def title(self, text: str) -> None:
        """Print the title of a section."""
        print(f"\n{text}", flush=True)

    def show(self, line: Finding) -> None:
        """Print a line, and count it if it is wrong."""
        self.n_wrong += line.wrong
        text = f"WRONG: {' '.join(line.text.split())}" if line.wrong else line.text
        print(f"  {line.name:<{_NAME_WIDTH}}{text}", flush=True)

    def show_all(self, name: str, lines: Callable[[], Iterable[Finding]]) -> None:
        """Show the lines as they arrive. If they fail, a last line `name` has the reason."""

        def show() -> None:
            for line in lines():
                self.show(line)

        self.attempt(name, show)

    def attempt(self, name: str, part: Callable[[], T]) -> T | None:
        """Return the value of a part of the check. If it fails, show a line `name` and return None."""
        try:
            return part()
        except UserError as error:
            self.show(Finding(name, str(error), wrong=True))
        except OSError as error:
            self.show(Finding(name, f"{error.filename or 'a file'}: {error.strerror or error}", wrong=True))
        return None
