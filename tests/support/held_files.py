"""Files whose readers wait, by a lease of the kernel (fcntl(2), F_SETLEASE), for at most 45 seconds."""

import fcntl
import signal
from pathlib import Path


class HeldFile:
    """A regular file that no process can open until it is released."""

    def __init__(self, path: Path) -> None:
        signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel sends it when a reader comes
        self._file = open(path, "r+b")  # noqa: SIM115 (the lease ends when it is closed)
        fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def has_reader(self) -> bool:
        """Return whether a process waits to open the file."""
        return fcntl.fcntl(self._file, fcntl.F_GETLEASE) != fcntl.F_WRLCK

    def release(self) -> None:
        self._file.close()
