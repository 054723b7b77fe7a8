"""The fold of what the parts of a sliced call give, on one rank."""

from typing import Any

import numpy as np

from lockstep.synk.results import check_same_shape

_UFUNCS: dict[str, Any] = {
    "avg": np.add,
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


class Folded:
    """The fold of one output's parts, as they come. mode None: all parts in a list."""

    def __init__(self, mode: str | None, n_rows: int, what: str) -> None:
        self.mode, self.n_rows, self.what = mode, n_rows, what
        self._parts: list[Any] = []

    def add(self, value: Any, n_rows: int) -> None:
        """One part, which stands for so many rows. It is copied."""
        if self.mode in (None, "gather"):
            self._parts.append(np.array(value))
            return
        value = np.asarray(value)
        if self.mode == "avg":
            value = value * value.dtype.type(n_rows / self.n_rows)
        if not self._parts:
            self._parts.append(np.array(value))
            return
        check_same_shape([self._parts[0].shape, value.shape], self.what, str(self.mode))
        _UFUNCS[str(self.mode)](self._parts[0], value, out=self._parts[0])

    def result(self) -> Any:
        if self.mode is None:
            return self._parts
        return np.concatenate(self._parts) if self.mode == "gather" else self._parts[0]
