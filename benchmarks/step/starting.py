"""The time from `python train.py` to the end of the first step, with two trainers and two loaders."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import table

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 7
TORCH = "one process that imports torch, and no more"
STEP = "train.py to the end of step 1"


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS + 1):
        seconds = import_torch() | start()
        if number:  # the first round warms the page cache
            for name, value in seconds.items():
                found[name].append(value)
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows: list[tuple[str, ...]] = [("what", "seconds", f"of {TORCH}")]
    for name, value in medians.items():
        rows.append((name, f"{value:.2f}", f"{value / medians[TORCH]:.2f} x"))
    title = "Start of a run with 2 trainers and 2 loaders on the digits"
    return table(title, rows), {"starting_seconds": medians}


def import_torch() -> dict[str, float]:
    """Return the seconds of a process that imports torch and no more."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {TORCH: time.monotonic() - begin}


def start() -> dict[str, float]:
    """Return the seconds until all processes run and until step 1 is done, and CPU seconds of each."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["devices=[cpu,cpu]", f"weights_dir={folder}", "run_name=run", "print_freq=1"]
        begin = time.time()
        command = [sys.executable, "train.py", *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=ROOT, **quiet)
        try:
            log = Path(folder) / "run" / "log.jsonl"
            started = _await(log, "started", lambda: process.poll() is None)
            progress = _await(log, "progress", lambda: process.poll() is None)
            pids = {"launcher": process.pid, "trainer": started["trainer 0"], "loader": started["loader 0"]}
            used = {f"processor time of the {name}": _processor_seconds(pid) for name, pid in pids.items()}
        finally:
            process.kill()  # the others go with it
            process.wait()
        seconds = {"until all processes are started": started["time"] - begin, STEP: progress["time"] - begin}
        _await_end(list(pids.values()))
    return seconds | used


def _await(log: Path, event: str, alive: Callable[[], bool]) -> dict[str, Any]:
    """Return the first event of a kind in a run's log."""
    while alive():
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        for line in lines:
            if line.endswith("\n") and json.loads(line)["event"] == event:
                return dict(json.loads(line))
        time.sleep(0.01)
    raise RuntimeError("train.py has ended before its first step: is the digits' dataset there (make data)?")


def _await_end(pids: list[int]) -> None:
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)


def _processor_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
