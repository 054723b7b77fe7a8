"""What all processes of a run are told at their start: little, for it goes through a pipe nobody reads yet.

They read the dataset's headers and labels, and the checkpoint, for themselves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.config import Config


class Joint(Protocol):
    """How to reach other hosts: their store, a prefix of all keys in it, and this host's own address."""

    @property
    def store(self) -> tuple[str, int]: ...

    @property
    def prefix(self) -> str: ...

    @property
    def address(self) -> str: ...


@dataclass(frozen=True)
class Plan:
    """How to train, where to write, and the tensors of the checkpoint to go on from (None: from scratch).

    joint: None where there are no other hosts.
    """

    config: Config
    folder: Path
    start: Path | None
    writes: bool = True  # this host, into the folder; False: another does
    joint: Joint | None = None
