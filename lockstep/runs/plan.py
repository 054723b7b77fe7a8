"""What all processes of a run are told at their start: little, for it goes through a pipe nobody reads yet.

They read the dataset's headers and labels, and the checkpoint, for themselves.
"""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import Config


@dataclass(frozen=True)
class Plan:
    """How to train, where to write, and the tensors of the checkpoint to go on from (None: from scratch)."""

    config: Config
    folder: Path
    start: Path | None
    writes: bool = True  # this host, into the folder; False: another does
