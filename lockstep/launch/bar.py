"""The progress bar, and the lines that carry its state from a launcher to the program that shows it."""

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import TqdmExperimentalWarning, TqdmWarning, tqdm

_VARIABLE = "LOCKSTEP_BAR"  # environment variable: print the states as lines, for another program's bar
SENDING = {_VARIABLE: "1"}
_MARK = "\x1e"  # begins a line of JSON among others (RFC 7464)
_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"


@dataclass(frozen=True)
class BarState:
    """The content of a bar: the part of the run, its steps, and the time left and loss as text."""

    title: str
    step: int
    n_steps: int
    numbers: str


def is_sending() -> bool:
    """Return whether the launcher prints the bar's states as lines."""
    return _VARIABLE in os.environ


def as_line(state: BarState) -> str:
    """Return a line that `from_line` reads."""
    return _MARK + json.dumps(asdict(state))


def from_line(line: str) -> BarState | None:
    """Return the state in a line of a launcher's output, or None if the line is for people."""
    return BarState(**json.loads(line[len(_MARK) :])) if line.startswith(_MARK) else None


class ProgressBar:
    """A bar for each part of a run: an epoch's training, its validation.

    Args:
        in_notebook: Show a notebook's widget, or text where the notebook has no widgets.
    """

    def __init__(self, in_notebook: bool = False) -> None:
        self._in_notebook = in_notebook
        self._bar: tqdm[Any] | None = None
        self._title = ""

    def move(self, state: BarState) -> None:
        """Show a state, with a new bar if its title is another."""
        if self._bar is None or self._title != state.title:
            self.close()
            self._title = state.title
            self._bar = self._begin(state)
        self._bar.set_postfix_str(state.numbers, refresh=False)
        self._bar.update(state.step - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _begin(self, state: BarState) -> "tqdm[Any]":
        options: dict[str, Any] = {
            "desc": state.title,
            "total": state.n_steps,
            "initial": state.step - 1,
            "unit": "step",
            "leave": False,
            "postfix": state.numbers,
            "bar_format": _FORMAT,
        }
        if self._in_notebook:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TqdmExperimentalWarning)
                warnings.simplefilter("ignore", TqdmWarning)  # without ipywidgets it falls back to text
                from tqdm.autonotebook import tqdm as notebook_bar

                return notebook_bar(**options)
        columns, rows = shutil.get_terminal_size()  # 80 x 24 if the terminal reports no size
        return tqdm(**options, ncols=columns, nrows=rows)
