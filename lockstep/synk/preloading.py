"""Workers import what graphs need while the caller does, so that distribute() need not wait for it."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_GRAPHS = ["pytensor", "lockstep.synk.programs.graph"]
_NUMBA = "pytensor.link.numba.dispatch"  # half of the time, and only this way of compiling needs it


def needed_for_graphs() -> list[str]:
    """Modules, in the order in which they are imported."""
    config: Any = getattr(sys.modules.get("pytensor"), "config", None)
    flags = os.environ.get("PYTENSOR_FLAGS", "") if config is None else str(config.mode)
    return _GRAPHS if "FAST_COMPILE" in flags else [*_GRAPHS, _NUMBA]


class Noticing(MetaPathFinder):
    """Calls `act` when PyTensor is about to be imported here, once. It finds no modules itself."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "pytensor":
            self.stop()
            self._act()

    def stop(self) -> None:
        with suppress(ValueError):  # it has been called, or somebody has cleared the list
            sys.meta_path.remove(self)
