"""The progress bars of the scripts."""

import shutil
import sys
from typing import Any

from tqdm import tqdm

_RARELY = 60.0  # seconds between lines where nobody watches


def progress_bar(total: int, unit: str, done: int = 0) -> "tqdm[Any]":
    """A bar with units a second and time left; where standard error is no terminal, a line a minute."""
    columns, rows = shutil.get_terminal_size()  # 80 x 24 where a terminal says that it has none
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
