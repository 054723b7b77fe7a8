"""What a process has open, while it may open and close more."""

import os
from contextlib import suppress
from pathlib import Path


def open_files(pid: int) -> dict[int, str]:
    """Return a process's descriptors and what they are links to, without those that close meanwhile.

    A process that ends meanwhile has none.
    """
    found = {}
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[int(path.name)] = os.readlink(path)
    return found


def open_sockets(pids: list[int]) -> set[str]:
    """Return the inodes of the sockets that processes have open, as in tables of /proc/net."""
    links = [link for pid in pids for link in open_files(pid).values()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}
