"""Event files for TensorBoard, written by the launcher with TensorBoard's own writer, without torch."""

from pathlib import Path
from typing import Any

from lockstep.comm.messages import Progress, Validated
from lockstep.errors import UserError


class Scalars:
    """A writer of event files in <folder>/tensorboard. Every number is flushed at once.

    Args:
        folder: The run's folder.
        steps_per_epoch: Optimizer steps per epoch; gives the step at which an epoch is validated.

    Raises:
        UserError: The event files can't be made.
    """

    def __init__(self, folder: Path, steps_per_epoch: int) -> None:
        from tensorboard.summary import Writer

        try:
            self._writer = Writer(str(folder / "tensorboard"))
        except (OSError, UnicodeError) as error:  # TensorBoard takes only paths of valid Unicode
            raise UserError(f"tensorboard: event files can't be made in {folder}: {error}") from error
        self._steps_per_epoch = steps_per_epoch

    def take(self, message: object) -> None:
        """Write the numbers of a message of trainer 0. Raise UserError if that fails."""
        if isinstance(message, Progress):
            self._add((message.epoch - 1) * self._steps_per_epoch + message.step, _training_scalars(message))
        elif isinstance(message, Validated):
            self._add(message.epoch * self._steps_per_epoch, _validation_scalars(message))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add(self, step: int, numbers: dict[str, float]) -> None:
        try:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
            self._writer.flush()
        except OSError as error:
            raise UserError(f"tensorboard: event files can't be written: {error}") from error


def _training_scalars(progress: Progress) -> dict[str, float]:
    numbers: dict[str, Any] = {
        "loss/training": progress.loss,
        "error/training": progress.error,
        "learning_rate": progress.learning_rate,
        "images_per_second": progress.images_per_second,
    }
    total = sum(progress.seconds.values()) or 1.0
    numbers |= {f"share_of_time/{phase}": seconds / total for phase, seconds in progress.seconds.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _validation_scalars(validated: Validated) -> dict[str, float]:
    numbers = {
        "loss/validation": validated.loss,
        "error/validation_top1": validated.error_top1,
        "error/validation_top5": validated.error_top5,
        **{f"classes/{name}": value for name, value in validated.means.items()},
    }
    return {name: number for name, number in numbers.items() if number is not None}
