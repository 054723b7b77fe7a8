"""Progress bars of the scripts."""

import shutil
import sys
from typing import Any

from tqdm import tqdm

_RARELY = 60.0  # seconds between lines if standard error is not a terminal


def progress_bar(total: int, unit: str, done: int = 0) -> "tqdm[Any]":
    """Return a bar with speed and remaining time; without a terminal it prints a line per minute."""
    columns, rows = shutil.get_terminal_size()  # 80 x 24 if a terminal reports 0 x 0
    watched = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        smoothing=0.05,
        ncols=columns,
        nrows=rows,
        delay=0 if watched else _RARELY,
        mininterval=0.1 if watched else _RARELY,
    )


def write_beside(bar: "tqdm[Any]", line: str) -> None:
    """Print a line above a bar; without a terminal, where the bar's `write` also prints the bar, alone."""
    if sys.stderr.isatty():
        bar.write(line)
    else:
        print(line, flush=True)
