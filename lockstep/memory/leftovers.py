"""Files of interprocess events that killed processes have left behind.

CUDA keeps an interprocess event as a file in /dev/shm, cuda.shm.<user>.<process, in hexadecimal>.<number>,
which goes when the process that made it destroys the event; one that is killed leaves it there. The names are
no part of CUDA's documents, so what does not look like this is left alone.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
_NAME = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.[0-9a-f]+")


def remove_leftovers(pids: Iterable[int]) -> list[str]:
    """Removes this user's files of these processes, which are gone; returns the files' names."""
    gone, removed = set(pids), []
    for path in sorted(SHARED.glob("cuda.shm.*")):
        match = _NAME.fullmatch(path.name)
        if match is None or int(match[1], 16) not in gone:
            continue
        with suppress(FileNotFoundError, PermissionError):
            if path.stat().st_uid == os.getuid():
                path.unlink()
                removed.append(path.name)
    return removed
