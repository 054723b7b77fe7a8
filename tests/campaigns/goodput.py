"""Goodput of a run whose processes are killed again and again: python -m campaigns.goodput 15

A run with two trainers and two loaders gets SIGKILL, SIGSEGV or SIGSTOP in a random one of its processes
every 15 seconds. Goodput is the time that the same steps take in an unbroken run, over the time that they
took. Unbroken and broken runs take turns, because a machine's speed drifts. The campaign measures from each
signal to the run's `recovered` event, which is logged at the end of the next step; or, where a killed loader
is started again alone, to its `loader_restarted` event. With --hosts 2 two launchers on this machine have two
trainers each, and a random one is hit.
"""

import argparse
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conftest import make_folder

from benchmarks.measure import table, verdict, write_results
from campaigns.watching import ROOT, Watched, free_port
from lockstep.files import checksum
from lockstep.runs.checkpoint_files import find_checkpoint

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP")
TIMEOUT = {"digits": 1.0, "alexnet": 5.0}  # seconds after which a stopped process counts as lost
LEAST_TIMEOUT = 10.0  # over several hosts, whose launchers send heartbeats once a second
LONGEST = 600.0  # seconds until a step, on any machine
DEVICES = "devices=[cpu,cpu]"
KEYS = {
    "digits": [f"data_folder={ROOT / 'data/digits'}", "model=smallnet"],
    "alexnet": ["model=alexnet", "batch_size=16"],
}
TURNS = 5  # of an unbroken and a broken run
N_TRIAL = 4  # epochs of the run from which the number of epochs is computed
N_TRAIN, N_VAL, SIZE = 320, 32, 256  # random images for AlexNet, and their pixels on a side

ALONE = "a loader alone"
Strike = tuple[str, float]  # the signal, or ALONE; and the seconds from it to the end of the next step


def events_of(run: Watched, kind: str) -> list[dict[str, Any]]:
    """Return the whole events of one kind in a run's log."""
    return [event for event in run.events() if event["event"] == kind]


def start(folder: Path, words: list[str], n_hosts: int) -> list[Watched]:
    """Start the run on so many hosts, host 0 first."""
    if n_hosts == 1:
        folder.mkdir()
        return [Watched(folder, words)]
    runs, keys = [], [*words, f"n_hosts={n_hosts}", f"rendezvous=127.0.0.1:{free_port()}"]
    for host in range(n_hosts):
        place = folder / f"host {host}"
        place.mkdir(parents=True)
        runs.append(Watched(place, [*keys, f"host_rank={host}"]))
    return runs


def strike(runs: list[Watched], dice: random.Random) -> Strike | None:
    """Send a signal to a trainer or loader and wait for the recovery. Return None if the run has ended."""
    name, hit = dice.choice(SIGNALS), dice.choice(runs)
    pids = hit.pids()
    victim = dice.choice(sorted(pids))
    begin = time.time()

    def since(run: Watched, kind: str) -> list[float]:
        return [event["time"] - begin for event in events_of(run, kind) if event["time"] > begin]

    try:
        os.kill(pids[victim], getattr(signal, name))
    except ProcessLookupError:
        return None
    if not runs[0].wait_for(lambda: since(runs[0], "recovered") or since(hit, "loader_restarted"), LONGEST):
        return None
    alone = since(hit, "loader_restarted")
    return (ALONE, alone[0]) if alone else (name, since(runs[0], "recovered")[0])


def train(
    folder: Path, words: list[str], every: float, seed: int, n_hosts: int = 1
) -> tuple[float, list[Strike], str]:
    """Train, with a strike every so many seconds, or none with 0.

    Returns:
        The seconds from the first step to the end, the strikes, and the checksum of the last checkpoint.
    """
    runs, strikes, dice = start(folder, words, n_hosts), list[Strike](), random.Random(seed)
    run = runs[0]
    try:
        run.wait_for(lambda: events_of(run, "implementations"), LONGEST)
        begin = due = time.time()
        while every:
            due = max(due, time.time()) + every  # so that a long recovery is not followed by a salvo
            if not run.wait_for(lambda until=due: time.time() > until, LONGEST):
                break
            if (found := strike(runs, dice)) is None:
                break
            strikes.append(found)
        if (code := run.process.wait()) != 0:
            raise RuntimeError(f"the run ended with {code}: {run.last_line()}")
        seconds = events_of(run, "ended")[-1]["time"] - begin
    finally:
        for each in runs:
            each.end()
    return seconds, strikes, checksum(find_checkpoint(run.run_folder, "latest")[0].path)


def measure(name: str, folder: Path, words: argparse.Namespace) -> dict[str, Any]:
    """Return the numbers of one network: an unbroken run and a broken one of the same epochs."""

    timeout = max(TIMEOUT[name], LEAST_TIMEOUT if words.hosts > 1 else 0.0) * words.patience

    def keys(n_epochs: int) -> list[str]:
        usual = [DEVICES, "cpu_threads=1", "print_freq=1000", f"timeout={timeout:g}"]
        return [*usual, *KEYS[name], *data, f"n_epochs={n_epochs}", f"snapshot_freq={n_epochs}"]

    def run(kind: str, n_epochs: int, every: float, turn: int = 0) -> tuple[float, list[Strike], str]:
        return train(folder / f"{kind} {turn}", keys(n_epochs), every, words.seed + turn, words.hosts)

    data = []
    if name == "alexnet":
        data = [f"data_folder={make_folder(folder / 'images', N_TRAIN, N_VAL, SIZE)}", "n_classes=10"]
    trial, _, _ = run("trial", N_TRIAL, 0.0)
    n_epochs = max(N_TRIAL, round(N_TRIAL * 60 * words.minutes / words.turns / trial))
    unbroken, broken, strikes, same_bits = 0.0, 0.0, list[Strike](), True
    for turn in range(words.turns):
        seconds, _, whole = run("unbroken", n_epochs, 0.0, turn)
        unbroken += seconds
        seconds, some, end = run("broken", n_epochs, words.every, turn)
        broken, strikes, same_bits = broken + seconds, strikes + some, same_bits and end == whole
    killed = sorted(seconds for kind, seconds in strikes if kind not in ("SIGSTOP", ALONE))
    alone = [seconds for kind, seconds in strikes if kind == ALONE]
    stopped = sorted(seconds - timeout for kind, seconds in strikes if kind == "SIGSTOP")
    return {
        "goodput": unbroken / broken,
        "seconds": broken,
        "strikes": len(strikes),
        "median_killed": statistics.median(killed) if killed else math.nan,
        "percentile_95_killed": percentile_95(killed),
        "median_stopped": statistics.median(stopped) if stopped else math.nan,
        "percentile_95_stopped": percentile_95(stopped),
        "alone": len(alone),
        "median_alone": statistics.median(alone) if alone else math.nan,
        "timeout": timeout,
        "same_bits": same_bits,
    }


def percentile_95(ordered: list[float]) -> float:
    """Return the 95th percentile of ordered numbers; nan of none."""
    return ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else math.nan


def rows_of(name: str, numbers: dict[str, Any], n_hosts: int = 1) -> list[tuple[str, ...]]:
    """Return the rows of one network's table."""
    targets = (0.8, 1.2) if n_hosts == 1 else (3.0, math.inf)

    def verdict_on(seconds: float, target: float) -> str:
        has_target = name == "digits" and math.isfinite(target) and math.isfinite(seconds)
        return verdict(seconds, target, at_most=True) if has_target else ""

    def pair(what: str, kind: str) -> list[tuple[str, ...]]:
        median, percentile = numbers[f"median_{kind}"], numbers[f"percentile_95_{kind}"]
        return [
            (f"{name}: {what}, median", f"{median:.2f} s", verdict_on(median, targets[0])),
            (f"{name}: the same, 95th percentile", f"{percentile:.2f} s", verdict_on(percentile, targets[1])),
        ]

    return [
        (f"{name}: goodput", f"{numbers['goodput']:.1%}", verdict(numbers["goodput"], 0.92)),
        (f"{name}: signals in {numbers['seconds']:.0f} s", f"{numbers['strikes']}", ""),
        *pair("from a kill to the end of the next step", "killed"),
        (
            f"{name}: {numbers['alone']} killed loaders started again alone, median",
            f"{numbers['median_alone']:.2f} s",
            "",
        ),
        *pair(f"the same after SIGSTOP, less `timeout` of {numbers['timeout']:g} s", "stopped"),
        (f"{name}: ends with the bits of the unbroken run", "yes" if numbers["same_bits"] else "no", ""),
    ]


def named(name: str, words: argparse.Namespace) -> tuple[str, str]:
    """Return the names of a network's page of results and of the command that makes it."""
    over_hosts = words.hosts > 1
    options = [f"--hosts {words.hosts}"] if over_hosts else []
    options += [] if words.turns == TURNS else [f"--turns {words.turns}"]
    page = "_".join(["goodput", *(["hosts"] if over_hosts else []), name])
    return page, f"make goodput MINUTES={words.minutes:g} ARGS='{' '.join([*options, '--networks', name])}'"


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign. Exit status 1: a broken run ended with other bits than the unbroken one."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.goodput", description=__doc__.split("\n")[0])
    parser.add_argument("minutes", type=float, nargs="?", default=15.0, help="of training with signals (15)")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of unbroken and broken runs ({TURNS})")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other victims (1)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two signals (15)")
    parser.add_argument("--patience", type=float, default=1.0, help="times timeout, on a busy machine (1)")
    parser.add_argument("--hosts", type=int, default=1, help="launchers on this machine (1)")
    parser.add_argument("--networks", nargs="*", default=list(KEYS), choices=list(KEYS), help="to train")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results", help="folder for the pages")
    words = parser.parse_args(arguments)
    same_bits = True
    for name in words.networks:
        with tempfile.TemporaryDirectory() as folder:
            numbers = measure(name, Path(folder), words)
        rows = [("what", "measured", ""), *rows_of(name, numbers, words.hosts)]
        each = f" on each of {words.hosts} hosts" if words.hosts > 1 else ""
        title = f"2 trainers and 2 loaders{each}, {words.minutes:g} minutes, a signal every {words.every:g} s"
        text = table(title, rows)
        print(text, flush=True)
        page, command = named(name, words)
        write_results(words.results, page, [(text, {name: numbers})], command)
        same_bits = same_bits and numbers["same_bits"]
    return 0 if same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
