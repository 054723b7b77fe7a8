"""The results of a section so far, in a file that is written atomically."""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Record:
    """Figures by name, and what went wrong by name of what was attempted.

    The harness reads the file however the section has ended; `complete` says that it came to its end.
    seconds: how long the section may take.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + seconds
        self._content: dict[str, Any] = {"complete": False, "figures": {}, "problems": {}}
        self._write()

    def keep(self, name: str, figures: Any) -> None:
        """Record figures; a second call with the same name replaces them."""
        self._content["figures"][name] = figures
        self._write()

    def fail(self, what: str, reason: str) -> None:
        self._content["problems"][what] = reason
        self._write()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """An error inside is kept under this name, with its traceback in the log; what follows still runs."""
        try:
            yield
        except Exception as error:
            print(f"--- {what} failed:\n{traceback.format_exc()}", flush=True)
            text = " ".join(str(error).split())
            self.fail(what, f"{type(error).__name__}: {text[-500:]}")

    def seconds_left(self) -> float:
        """For what the section starts; the rest is for itself to end in good order."""
        return self._until - 5 - time.monotonic()

    def complete(self) -> bool:
        """Mark the section as complete. Return whether nothing has failed."""
        self._content["complete"] = True
        self._write()
        return not self._content["problems"]

    def _write(self) -> None:
        made = self._path.with_suffix(".new")
        made.write_text(json.dumps(self._content))
        os.replace(made, self._path)
