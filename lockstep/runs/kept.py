"""What a run's folder has once, kept for its older checkpoints when the run resumes with something else.

What NAME.json was for the checkpoints up to epoch_0003 is then in NAME-until-epoch_0003.json.
"""

import os
from pathlib import Path

from lockstep.runs.state import position_of

_MARK = "-until-"


def mark_of(checkpoint: str) -> str:
    """Return the mark in the name of what is kept for the checkpoints up to this one."""
    return f"{_MARK}{checkpoint}"


def mark_for(folder: Path, name: str, checkpoint: str) -> str:
    """Return the mark of what a checkpoint was trained with, or '' if that is what the run has now.

    Args:
        folder: The run's folder.
        name: Of the file or folder without a mark.
        checkpoint: Its name; '' means the run as it is now.
    """
    position = position_of(checkpoint)
    return next((mark_of(kept) for until, kept in _kept(folder, name) if position and position <= until), "")


def marks_after(folder: Path, name: str, start: str) -> list[str]:
    """Return the marks of what is kept for checkpoints after `start`, which were damaged or removed.

    Args:
        folder: The run's folder.
        name: Of the file or folder without a mark.
        start: The name of the checkpoint that the run resumes from; '' from scratch.
    """
    begin = position_of(start)
    return [mark_of(kept) for until, kept in _kept(folder, name) if begin is None or until > begin]


def _kept(folder: Path, name: str) -> list[tuple[tuple[int, float], str]]:
    """Return positions and names of the checkpoints up to which something is kept, the oldest first."""
    stem, ending = os.path.splitext(name)
    first = f"{stem}{_MARK}"
    names = (path.name.removeprefix(first).removesuffix(ending) for path in folder.glob(f"{first}*{ending}"))
    return sorted((position, kept) for kept in names if (position := position_of(kept)))
