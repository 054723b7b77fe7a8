"""The facts about a dataset that users of a trained network need."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.manifest import Orientation, Resize
from lockstep.errors import UserError


@dataclass(frozen=True)
class Description:
    """Class names, the mean to subtract, float32 (row, column, channel), and how images became square."""

    class_names: tuple[str, ...]
    mean: np.ndarray
    resize: Resize
    orientation: Orientation

    @property
    def n_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self.mean.shape

    def same_as(self, other: "Description") -> bool:
        """Return whether all facts are equal."""
        facts, others = (
            (each.class_names, each.resize, each.orientation, each.image_shape) for each in (self, other)
        )
        return facts == others and bool((self.mean == other.mean).all())


def check_same_classes(names: Sequence[str], data: str, description: Description, file: Path) -> None:
    """Raise UserError if a class has two names. A class without a name has its number instead.

    Two different numbers are names, such as those of class folders 0, 1, 2 and 1, 2, 3.

    Args:
        names: Of the classes in the dataset called `data`.
        data: The dataset's name, for messages.
        description: Of a run's training data.
        file: The description's file in the run's folder, for messages.
    """
    for number, (now, then) in enumerate(zip(names, description.class_names, strict=False)):
        is_unnamed = str(number) in (now, then) and not (now.isdecimal() and then.isdecimal())
        if now != then and not is_unnamed:
            raise UserError(
                f"{data}: class {number} is {now!r}, and {then!r} in the training data of {file.parent}. "
                f"Give the same classes in the same order, or, if both names mean the same, change {file}."
            )
