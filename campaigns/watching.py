"""A run of train.py as a campaign sees it: its processes, what they are at, and what is left of them."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """A port of this host that nobody has at this moment, below those that the kernel gives away itself."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Watched:
    """train.py in a session of its own, so that its processes can be told from all others.

    words: key=value. folder: where its run's folder and its output go. With trace=true among the words, what
    each process is at can be waited for. command: another program in its place, without words.
    """

    def __init__(self, folder: Path, words: list[str], command: list[str] | None = None) -> None:
        self.output = folder / "output.txt"
        self.run_folder = folder / "run"
        self._offset = self.output.stat().st_size if self.output.exists() else 0
        with open(self.output, "a") as file:
            command = command or [sys.executable, "train.py", f"weights_dir={folder}", "run_name=run", *words]
            settings = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": ROOT}
            self.process = subprocess.Popen(command, start_new_session=True, **settings)
        self.since = time.time()

    def text(self) -> str:
        """What it has said."""
        with open(self.output, errors="replace") as file:
            file.seek(self._offset)
            return file.read()

    def last_line(self) -> str:
        return (self.text().rstrip().splitlines() or [""])[-1]

    def pids(self) -> dict[str, int]:
        """Numbers of trainers and loaders by name; empty before they are started."""
        log = next(
            (path for path in self.run_folder.glob("*.jsonl")), None
        )  # of hosts after the first: host<k>
        if not log:
            return {}
        events = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line[-1:] == "\n"]
        started = [each for each in events if each["event"] == "started" and each["time"] >= self.since]
        names = started[-1] if started else {}
        return {name: pid for name, pid in names.items() if name.startswith(("trainer", "loader"))}

    def children(self, words: str) -> list[int]:
        """Its own child processes with these words in their command line, oldest first."""
        found = []
        for pid in self.left():
            try:
                parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):  # gone since
                continue
            if parent == self.process.pid and words in line:
                found.append(pid)
        return sorted(found)

    def is_at(self, point: str) -> bool:
        """Whether a process has said by now that it is at something with these words in it."""
        folder = self.run_folder / "trace"
        return any(point in path.read_text(errors="replace") for path in folder.glob("*.txt"))

    def wait_for(self, condition: Callable[[], object], seconds: float) -> bool:
        """Whether it came true before the run's end and in time."""
        until = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def code(self, seconds: float) -> int | None:
        """The exit code; None where it is still there after so many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left(self) -> list[int]:
        """Processes of its session that are still there."""
        return processes_of_session(self.process.pid)

    def wait_for_none_left(self, seconds: float) -> bool:
        """Whether all of its processes have gone in time: Python's resource tracker leaves a bit later."""
        until = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """Kills what is left."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def processes_of_session(number: int) -> list[int]:
    """Those that are still there (not counting zombies that init will reap)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # gone since
            continue
        if int(session) == number and state != "Z":
            found.append(int(path.parent.name))
    return found
