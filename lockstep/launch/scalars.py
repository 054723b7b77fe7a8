"""Event files for TensorBoard, by its own writer: the launcher writes them, and that needs no torch."""

import importlib.util
from pathlib import Path
from typing import Any

from lockstep.comm.messages import Progress, Validated
from lockstep.errors import UserError


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def check_installed() -> None:
    """Raises UserError where the package `tensorboard` is not there."""
    if not is_installed():
        raise UserError(
            "tensorboard: true needs the package tensorboard: pip install tensorboard, or set it to false"
        )


class Scalars:
    """Event files in <folder>/tensorboard; every number is on the disk at once. A step is the optimizer's.

    steps_per_epoch: of the optimizer; tells at which step an epoch is validated.
    """

    def __init__(self, folder: Path, steps_per_epoch: int) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard"))
        self._steps_per_epoch = steps_per_epoch

    def take(self, message: object) -> None:
        """Writes the numbers of a message of trainer 0. Raises UserError where they can't be written."""
        if isinstance(message, Progress):
            self._add((message.epoch - 1) * self._steps_per_epoch + message.step, _of_training(message))
        elif isinstance(message, Validated):
            self._add(message.epoch * self._steps_per_epoch, _of_validation(message))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, numbers: dict[str, float]) -> None:
        try:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
            self._writer.flush()
        except OSError as error:
            raise UserError(f"tensorboard: event files can't be written: {error}") from error


def _of_training(progress: Progress) -> dict[str, float]:
    numbers: dict[str, Any] = {
        "loss/training": progress.loss,
        "error/training": progress.error,
        "learning_rate": progress.learning_rate,
        "images_per_second": progress.images_per_second,
    }
    total = sum(progress.seconds.values()) or 1.0
    numbers |= {f"share_of_time/{phase}": seconds / total for phase, seconds in progress.seconds.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _of_validation(validated: Validated) -> dict[str, float]:
    return {
        "loss/validation": validated.loss,
        "error/validation_top1": validated.error_top1,
        "error/validation_top5": validated.error_top5,
    }
