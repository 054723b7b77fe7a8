"""Long training beside other work on all cores: python -m campaigns.soak 30

A run of train.py on two trainers with validation and checkpoints is stopped in good order several times; each
time its report is written and it resumes. Memory, descriptors, threads and shared memory of each process are
sampled, and must not grow after the warm-up. The results are written to docs/results/soak.md.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measure import table, write_results
from campaigns.sampling import Limits, Series, take
from campaigns.watching import ROOT, Watched
from lockstep.backends.devices import count_cores
from lockstep.signals import die_with_parent

PATIENCE = 300.0  # seconds for what takes a few seconds on an idle machine
SAMPLES = 200  # per process and start, about
WORDS = (
    "devices=[cpu,cpu]", "n_epochs=1000000", "batch_size=32", "cpu_threads=1", "snapshot_freq=20",
    "print_freq=20", "timeout=300",
)  # fmt: skip


@dataclass
class Start:
    """One start of the run: samples by process name, and seconds since its first step."""

    number: int
    series: dict[str, Series] = field(default_factory=dict)
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@contextmanager
def other_work(n_processes: int) -> Iterator[None]:
    """Start processes that keep cores busy and end with this one."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, preexec_fn=die_with_parent) for _ in range(n_processes)]  # noqa: PLW1509
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train(place: Path, number: int, seconds: float, words: list[str]) -> Start:
    """Start the run, sample it from its first step on for a time, then ask it to stop."""
    start = Start(number)
    again = ["resume_train=true"] if number > 1 else []
    run = Watched(place, [*words, *again])
    try:
        if not run.wait_for(lambda: "\nepoch " in run.text(), PATIENCE):
            start.problems.append(f"it did not come to train: {run.last_line()}")
            return start
        if number == 1:
            start.problems += second_in_same_folder(place, words)
        sample(run, start, seconds)
        run.process.send_signal(signal.SIGTERM)
        code = run.code(PATIENCE)
        if code != 128 + signal.SIGTERM or "stopped as asked; saved" not in run.last_line():
            start.problems.append(f"it ended with {code}: {run.last_line()}")
        if not run.wait_for_none_left(PATIENCE):
            start.problems.append(f"{len(run.left())} processes were left")
    finally:
        run.end()
    return start


def sample(run: Watched, start: Start, seconds: float) -> None:
    """Sample all processes of the run at equal intervals while it runs."""
    pids = {"launcher": run.process.pid, **run.pids()}
    begin = time.monotonic()
    while (now := time.monotonic() - begin) < seconds and run.process.poll() is None:
        for name, pid in pids.items():
            if taken := take(pid, now):
                start.series.setdefault(name, Series()).samples.append(taken)
        time.sleep(max(0.02, seconds / SAMPLES))
    start.seconds = time.monotonic() - begin


def second_in_same_folder(place: Path, words: list[str]) -> list[str]:
    """Check that a second run in the same folder is refused."""
    command = [
        sys.executable,
        "train.py",
        f"weights_dir={place}",
        "run_name=run",
        "resume_train=true",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode == 2 and "another run is writing there now" in done.stderr:
        return []
    return [f"a second run in its folder was not refused: {done.returncode}, {done.stderr.strip()[-200:]}"]


def report(place: Path) -> list[str]:
    """Write the run's report."""
    command = [sys.executable, "-m", "lockstep.report", "--no-examples", str(place / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    is_there = (place / "run/report.html").exists()
    return [] if done.returncode == 0 and is_there else [f"no report: {done.stderr.strip()[-200:]}"]


def rows_of(start: Start) -> list[tuple[str, ...]]:
    """Return rows with the resources of each process after the warm-up and their growth per hour."""
    rows = []
    for name, series in start.series.items():
        cells = [f"{start.number}", name, f"{len(series.samples)}"]
        for what, unit, digits in (
            ("memory", 1e6, 1),
            ("shared", 1e6, 2),
            ("descriptors", 1, 0),
            ("threads", 1, 0),
        ):
            cells += [f"{series.level(what) / unit:.{digits}f}", f"{series.slope(what) / unit:+.2f}"]
        rows.append(tuple(cells))
    return rows


HEAD = (
    "start", "process", "samples", "memory, MB", "an hour", "shared, MB", "an hour", "descriptors", "an hour",
    "threads", "an hour",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign. Exit status 0: nothing grew and nothing failed; 1: otherwise."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.soak", description=__doc__.split("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=30.0, help="of training in all (30)")
    parser.add_argument("--starts", type=int, default=3, help="it is stopped and goes on so often (3)")
    parser.add_argument(
        "--load", type=int, default=count_cores(), help="processes of other work (one a core)"
    )
    parser.add_argument("--data", type=Path, default=ROOT / "data/digits", help="the dataset folder")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results", help="folder for soak.md")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the run")
    words = parser.parse_args(arguments)
    given = dict(word.split("=", 1) for word in [*WORDS, f"data_folder={words.data.resolve()}", *words.set])
    keys = [f"{key}={value}" for key, value in given.items()]
    before = set(os.listdir("/dev/shm"))
    starts = []
    with tempfile.TemporaryDirectory() as place, other_work(words.load):
        for number in range(1, words.starts + 1):
            start = train(Path(place), number, words.minutes * 60 / words.starts, keys)
            start.problems += report(Path(place))
            starts.append(start)
            print(f"start {number}: {'; '.join(start.problems) or 'as it should be'}", flush=True)
    left = sorted(name for name in set(os.listdir("/dev/shm")) - before if "lockstep" in name)
    return write(words, starts, [f"left in /dev/shm: {name}" for name in left])


def write(words: argparse.Namespace, starts: list[Start], problems: list[str]) -> int:
    """Print the table, write it, and return the exit status."""
    for start in starts:
        problems += [f"start {start.number}: {problem}" for problem in start.problems]
        for name, series in start.series.items():
            problems += [f"start {start.number}: {name}: {text}" for text in series.problems(Limits())]
    spent = sum(start.seconds for start in starts) / 60
    where = f"{spent:.1f} minutes in {len(starts)} starts beside {words.load} busy processes"
    title = f"{where}: {len(problems)} problems"
    rows = [HEAD, *(row for start in starts for row in rows_of(start))]
    text = "\n".join([table(title, rows), *(f"- {problem}" for problem in problems)])
    print(text)
    series = {f"{start.number} {name}": vars(each) for start in starts for name, each in start.series.items()}
    numbers = {"starts": len(starts), "load": words.load, "problems": problems}
    numbers["samples"] = {
        name: [list(vars(s).values()) for s in each["samples"]] for name, each in series.items()
    }
    command = f"python -m campaigns.soak {words.minutes:g} --starts {words.starts}"
    write_results(words.results, "soak", [(text, numbers)], command)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
