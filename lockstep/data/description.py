"""The facts about a dataset that users of a trained network need."""

from dataclasses import dataclass

import numpy as np

from lockstep.data.manifest import Orientation, Resize


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
