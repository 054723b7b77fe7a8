"""The costs of receipts, rechecks and memory checkpoints, and the pause when a run changes devices."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loading.augmenting import make_folder
from benchmarks.measure import table, verdict
from lockstep.files import checksum
from lockstep.runs.checkpoint_files import find_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 7
N_EPOCHS = 10
EVERY = 200  # steps between two receipts or rechecks; receipts have 1,000 by default
WORDS = ("logical_ranks=4", "cpu_threads=1", "print_freq=1000")
DIGITS = ("global_batch_size=32", *WORDS, f"n_epochs={N_EPOCHS}", f"snapshot_freq={N_EPOCHS}")
N_IMAGES, ALEXNET_EPOCHS, ALEXNET_ROUNDS = 320, 4, 3
ALEXNET = ("model=alexnet", "batch_size=16", "n_classes=1000", "cpu_threads=1", "print_freq=1000")
NOTHING = {"check_every": "null", "memory_checkpoint_seconds": "null", "on_failure": "stop"}
IN_MEMORY = {"check_every": "null"}
NONE = "none of them"
CONTENDERS: dict[str, dict[str, str]] = {
    NONE: NOTHING,
    f"receipts every {EVERY} steps": NOTHING | {"check_every": f"{EVERY}"},
    f"recheck_every: {EVERY}": NOTHING | {"recheck_every": f"{EVERY}"},
    "memory checkpoints (auto)": IN_MEMORY,
}
SHORT_STEPS = ("devices=[cpu]", "global_batch_size=4", "learning_rate=0.001", "n_epochs=1")
SIZES = (2, 4, 3, 1)  # numbers of trainers, one after the other
N_SEQUENCES = 3
MOST = 1.01  # times the run without


def costs() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers of what a run's safeguards cost."""
    seconds = in_turns(CONTENDERS, ROUNDS, DIGITS)
    title = f"{N_EPOCHS} epochs of the digits, 2 trainers and 2 loaders, medians of {ROUNDS} in turns"
    return table(title, rows_of(seconds)), {"safeguards_seconds": seconds}


def costs_alexnet() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers of what memory checkpoints of AlexNet's 61 M weights cost."""
    contenders = {NONE: NOTHING, "memory checkpoints (auto)": IN_MEMORY}
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "set", N_IMAGES // 2)
        epochs = f"n_epochs={ALEXNET_EPOCHS}", f"snapshot_freq={ALEXNET_EPOCHS}", f"val_freq={ALEXNET_EPOCHS}"
        words = *ALEXNET, f"data_folder={folder}/set", *epochs
        seconds = in_turns(contenders, ALEXNET_ROUNDS, words)
    n_steps = ALEXNET_EPOCHS * N_IMAGES // 32
    title = f"{n_steps} steps of AlexNet, 2 trainers, 16 images each, medians of {ALEXNET_ROUNDS} in turns"
    return table(title, rows_of(seconds)), {"safeguards_alexnet_seconds": seconds}


def in_turns(
    contenders: dict[str, dict[str, str]], n_rounds: int, words: Sequence[str]
) -> dict[str, list[float]]:
    """Return the seconds of runs with each contender's keys, after a round that warms the page cache."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(n_rounds + 1):
        for name, keys in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                found = train(Path(folder), [*words, *(f"{key}={value}" for key, value in keys.items())])
            if number:
                seconds[name].append(found)
    return seconds


def rows_of(seconds: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Return the rows of a table: each contender's median, and its ratio to the run without safeguards."""
    without = statistics.median(seconds[NONE])
    rows: list[tuple[str, ...]] = [("a run with", "seconds", "of the run without", "")]
    for name, values in seconds.items():
        ratio = statistics.median(values) / without
        rows.append((name, f"{ratio * without:.2f}", f"{ratio:.3f} x", verdict(ratio, MOST, True)))
    return rows


def train(folder: Path, words: Sequence[str]) -> float:
    """Train, and return the seconds from the first step to the end."""
    run = start(folder, "run", ["devices=[cpu,cpu]", *words])
    if run.wait():
        raise RuntimeError(f"a run with {' '.join(words)} ended with exit status {run.returncode}")
    events = events_of(folder / "run")
    (begin,) = (event["time"] for event in events if event["event"] == "implementations")
    return float(events[-1]["time"] - begin)


def pauses() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers of the pauses in which a run gets other devices."""
    found: dict[str, list[float]] = {f"to {size} trainer(s)": [] for size in SIZES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unbroken = resized(folder, "unbroken", ())
        same = True
        for number in range(N_SEQUENCES):
            same &= resized(folder, f"run{number}", SIZES) == unbroken
            events = [event for event in events_of(folder / f"run{number}") if event["event"] == "resized"]
            for values, event in zip(found.values(), events, strict=True):
                values.append(event["seconds"])
    rows: list[tuple[str, ...]] = [("resize", "seconds until the next step ends", "")]
    for name, values in found.items():
        rows.append((name, ", ".join(f"{value:.2f}" for value in values), verdict(max(values), 1.0, True)))
    rows.append(("ends with the bits of the unbroken run", "yes" if same else "no", ""))
    return table("The pause of a run that gets other devices", rows), {"resize_seconds": found, "same": same}


def resized(folder: Path, name: str, sizes: tuple[int, ...]) -> str:
    """Train one epoch of short steps on one device, then on others. Return the checkpoint's checksum."""
    process = start(folder, name, [*SHORT_STEPS, *WORDS])
    await_event(folder / name, "implementations")
    for size in sizes:
        wish = f"devices=[{','.join(['cpu'] * size)}]"
        command = [sys.executable, "-m", "lockstep.launch.resize", str(folder / name), wish]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    if process.wait():
        raise RuntimeError(f"the run {name} ended with exit status {process.returncode}")
    return checksum(find_checkpoint(folder / name, "latest")[0].path)


def start(folder: Path, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
    """Start a run without output."""
    command = [sys.executable, "train.py", f"weights_dir={folder}", f"run_name={name}", *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=ROOT, **quiet)


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's log."""
    log = run / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def await_event(run: Path, kind: str, seconds: float = 300.0) -> None:
    """Wait until a run has logged an event of a kind. Raise TimeoutError after some seconds."""
    until = time.monotonic() + seconds
    while not any(event["event"] == kind for event in events_of(run)):
        if time.monotonic() > until:
            raise TimeoutError(f"{run}: no event {kind!r} within {seconds:g} s")
        time.sleep(0.02)
