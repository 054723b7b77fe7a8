"""Removal of the files of interprocess events that killed processes have left in /dev/shm.

CUDA keeps an interprocess event as a file cuda.shm.<user>.<process>.<number>, in hexadecimal, which
disappears when its process destroys the event. A killed process leaves it. CUDA's documents do not specify
the names, so files with other names are left alone.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
_NAME = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.[0-9a-f]+")


def remove_leftovers(pids: Iterable[int]) -> list[str]:
    """Remove this user's event files of these processes, which have exited. Return the files' names."""
    exited, removed, candidates = set(pids), [], list[Path]()
    with suppress(OSError):  # out of descriptors; the error that caused it matters more
        candidates = sorted(SHARED.glob("cuda.shm.*"))
    for path in candidates:
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1], 16) not in exited:
            continue
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_uid == os.getuid():
                path.unlink()
                removed.append(path.name)
    return removed
