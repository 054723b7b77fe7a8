"""What all processes of a run are told at their start."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import Config
from lockstep.dataset import Dataset
from lockstep.runfolder import Checkpoint


@dataclass(frozen=True)
class Plan:
    """How to train, on what, where to write, and what to go on from (None: from scratch)."""

    config: Config
    dataset: Dataset
    folder: Path
    start: Checkpoint | None
