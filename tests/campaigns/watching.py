"""A run of train.py seen from outside: its processes, their activity, and what remains after the end."""

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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """Return a free port below the range from which the kernel assigns ports."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Watched:
    """A running train.py. It has its own session, which identifies all of its processes.

    Args:
        folder: The folder for its run folder and its output.
        words: Arguments, as key=value. With trace=true the activity of each process can be awaited.
        command: Another program to run instead, without words.
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
        """Return its output."""
        with open(self.output, errors="replace") as file:
            file.seek(self._offset)
            return file.read()

    def last_line(self) -> str:
        return (self.text().rstrip().splitlines() or [""])[-1]

    def events(self) -> list[dict[str, Any]]:
        """Return the whole events of the run's log."""
        # Hosts after the first write host<k>.jsonl. Receipts are in another file.
        logs = [path for name in ("log", "host*") for path in self.run_folder.glob(f"{name}.jsonl")]
        lines = logs[0].read_text().splitlines(keepends=True) if logs else []
        return [json.loads(line) for line in lines if line[-1:] == "\n"]

    def pids(self) -> dict[str, int]:
        """Return the process ids of trainers and loaders by name, {} before they have started."""
        events = self.events()
        started = [each for each in events if each["event"] == "started" and each["time"] >= self.since]
        names = dict(started[-1]) if started else {}
        anew = [each for each in events if each["event"] == "loader_restarted"]
        names |= {each["name"]: each["pid"] for each in anew if each["time"] > names.get("time", 0.0)}
        return {name: pid for name, pid in names.items() if name.startswith(("trainer", "loader"))}

    def children(self, words: str) -> list[int]:
        """Return its child processes whose command line contains a text, oldest first."""
        found = []
        for pid in self.left():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):  # gone since
                continue
            parent, start_time = int(fields[1]), int(fields[19])
            if parent == self.process.pid and words in line:
                found.append((start_time, pid))  # process ids wrap around, so they tell no age
        return [pid for _, pid in sorted(found)]

    def is_at(self, point: str, process: str = "") -> bool:
        """Return whether a process (of this name, or any) has reported an activity that contains a text."""
        folder = self.run_folder / "trace"
        return any(point in path.read_text(errors="replace") for path in folder.glob(f"{process}*.txt"))

    def wait_for(self, condition: Callable[[], object], seconds: float) -> bool:
        """Return whether a condition became true in time and before the end of the run."""
        until = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def code(self, seconds: float) -> int | None:
        """Return the exit status, or None if it still runs after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def left(self) -> list[int]:
        """Return the processes of its session that still run."""
        return processes_of_session(self.process.pid)

    def wait_for_none_left(self, seconds: float) -> bool:
        """Return whether all its processes exited in time; Python's resource tracker exits a bit later."""
        until = time.monotonic() + seconds
        while self.left():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def end(self) -> None:
        """Kill its remaining processes."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def processes_of_session(number: int) -> list[int]:
    """Return the running processes of a session, without zombies that init will reap."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # gone since
            continue
        if int(session) == number and state != "Z":
            found.append(int(path.parent.name))
    return found
