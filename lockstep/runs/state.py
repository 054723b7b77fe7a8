"""The part of a checkpoint that is not tensors, which its JSON file holds."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config import Config, Layer
from lockstep.config.tasks import monitor_in
from lockstep.runs import versions

_NAME = re.compile(r"epoch_(\d+)(?:_at_(\d+))?")


@dataclass(frozen=True)
class State:
    """The part of a checkpoint that is not tensors.

    Attributes:
        epoch: The current epoch, from 1.
        position: Samples of that epoch that have been trained on.
        n_samples: Samples per epoch.
        val_record: One entry per validated epoch: epoch, loss, error_top1, macro_f1, balanced_accuracy, and
            error_top5 where there are more than five classes. With `task: multilabel`: epoch, loss,
            mean_average_precision, macro_f1 and micro_f1.
        n_trainers: Trainers on all hosts.
        config: The resolved configuration.
        sha256: The checksum of the file of tensors.
        dataset: The digest of the dataset's manifest; '' without one, and in checkpoints before version 0.1.
        only_best: Whether it was saved only because its epoch was the best so far.
    """

    epoch: int
    position: int
    n_samples: int
    learning_rate: float
    val_record: list[dict[str, float]]
    n_trainers: int
    config: dict[str, Any]
    versions: dict[str, str]
    sha256: str = ""
    dataset: str = ""
    only_best: bool = False

    @classmethod
    def now(
        cls,
        epoch: int,
        position: int,
        n_samples: int,
        learning_rate: float,
        val_record: list[dict[str, float]],
        n_trainers: int,
        config: Config,
        dataset: str = "",
        only_best: bool = False,
    ) -> "State":
        """Return the state of a run of this program, with the versions of the packages that it uses."""
        return cls(
            epoch=epoch,
            position=position,
            n_samples=n_samples,
            learning_rate=learning_rate,
            val_record=val_record,
            n_trainers=n_trainers,
            config=asdict(config),
            versions=versions.of_packages(),
            dataset=dataset,
            only_best=only_best,
        )

    @property
    def name(self) -> str:
        """The checkpoint's name: 'epoch_0005', or 'epoch_0005_at_1024' if the epoch is not complete."""
        return f"epoch_{self.epoch:04d}" + ("" if self.is_complete else f"_at_{self.position}")

    @property
    def is_complete(self) -> bool:
        """True if the epoch has been trained, and validated if `val_freq` says so."""
        every = self.config.get("val_freq")
        is_due = not isinstance(every, int) or every < 1 or self.epoch % every == 0
        is_due |= self.epoch == self.config.get("n_epochs")
        return self.is_validated or (not is_due and self.position >= self.n_samples > 0)

    @property
    def is_within_epoch(self) -> bool:
        """True if the epoch has begun and is not complete: its validation, at least, is still to come."""
        return self.position > 0 and not self.is_complete

    @property
    def is_validated(self) -> bool:
        """True if all epochs so far are validated, or the newest validation is of this epoch."""
        record = self.val_record
        return bool(record) and self.epoch in (len(record), record[-1].get("epoch"))

    @property
    def moment(self) -> tuple[int, int, int]:
        """The epoch, the position in it and the number of validations so far, which order a run's states."""
        return self.epoch, self.position, len(self.val_record)

    @property
    def monitor(self) -> str:
        """The value of a validation that says which epoch is best; without one that of the task."""
        return monitor_in(self.config)

    def is_well_formed(self) -> bool:
        """Return whether every value has its type; the file may have been edited."""
        counts = (self.epoch, self.position, self.n_samples, self.n_trainers)
        return (
            all(type(count) is int and 0 <= count < 1 << 63 for count in counts)
            and self.epoch > 0
            and isinstance(self.learning_rate, float)
            and isinstance(self.config, dict)
            and isinstance(self.sha256, str)
            and isinstance(self.dataset, str)
            and isinstance(self.only_best, bool)
            and isinstance(self.val_record, list)
            and all(
                isinstance(entry, dict)
                and isinstance(entry.get("error_top1", entry.get("mean_average_precision")), float)
                and isinstance(entry.get("epoch", 1), int)
                and all(isinstance(value, int | float | None) for value in entry.values())
                for entry in self.val_record
            )
        )


def position_of(name: str) -> tuple[int, float] | None:
    """Return the epoch and the position in it that a checkpoint's name has, or None for any other name.

    This is the inverse of `State.name`. The position is infinite if the epoch is complete, so results sort
    in the order of training.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2]) if match[2] else math.inf) if match else None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the file of its tensors, and its state."""

    path: Path
    state: State

    @property
    def settings(self) -> Layer:
        """The settings with which it was trained, as a source of a configuration."""
        return Layer(str(self.path.with_suffix(".json")), self.state.config)
