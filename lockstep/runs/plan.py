"""What all processes of a run are told at their start: little, for it goes through a pipe nobody reads yet.

They read the dataset's headers and labels, and the checkpoint, for themselves.
"""

from dataclasses import dataclass
from pathlib import Path

from lockstep.config import Config


@dataclass(frozen=True)
class Joint:
    """How to reach other hosts: their store, a prefix of all keys in it, and this host's own address."""

    store: tuple[str, int]
    prefix: str
    address: str


@dataclass(frozen=True)
class Plan:
    """How to train, where to write, and the tensors of the checkpoint to go on from (None: from scratch).

    joint: None where there are no other hosts.
    """

    config: Config
    folder: Path
    start: Path | None
    joint: Joint | None = None
    writes: bool = True  # this host, into the folder; False: another does
