"""A user's function as augmentation: `augmentation: package.module:function`."""

from typing import Any

import numpy as np

from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from lockstep.objects import import_function


class UserAugmentation:
    """A function f(image, rng) -> image, with image uint8 (row, column, 3) and rng a generator of the sample.

    Args:
        name: <package.module>:<function>.

    Raises:
        UserError: The module can't be imported, or has no such function.
    """

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._function = import_function("augmentation", name)

    def apply(self, image: np.ndarray, epoch: int, row: int, sample: int) -> np.ndarray:
        """Return the function's image of a sample.

        Args:
            image: It is not changed.
            epoch: The epoch's number.
            row: The number of the generator in this epoch.
            sample: The sample's number, for errors.

        Raises:
            UserError: The function fails, or returns something else than an image of the same shape.
        """
        random = generator(self._seed, epoch, Purpose.OWN, row)
        where = f"augmentation: {self._name} of training sample {sample} in epoch {epoch}"
        try:
            result = self._function(image.copy(), random)
        except Exception as error:  # the user's code
            raise UserError(f"{where} fails: {type(error).__name__}: {error}") from error
        if isinstance(result, np.ndarray) and result.shape == image.shape and result.dtype == np.uint8:
            return result
        raise UserError(
            f"{where} returns {_described(result)}. It must return a uint8 array of shape {image.shape}."
        )


def _described(result: Any) -> str:
    if not isinstance(result, np.ndarray):
        return type(result).__name__
    has_nan = result.dtype.kind == "f" and bool(np.isnan(result).any())
    return f"{result.dtype} of shape {result.shape}{' that holds NaN' if has_nan else ''}"
