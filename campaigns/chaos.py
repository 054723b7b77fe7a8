"""Kills, stops and signals at random, by the hundred: python -m campaigns.chaos 500 --seed 1

Every case is a run of train.py to which one thing happens, at a random moment or at a named point, and which
then goes on with resume_train=auto. What must hold: it ends in time with the right exit code and last line,
nothing of it is left, its newest checkpoint is whole, and the end has the bits of the unbroken run.
"""

import argparse
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.measure import table, write_results
from campaigns.watching import ROOT, Watched
from lockstep.errors import UserError
from lockstep.runs.folder import find_checkpoint

DATA = ROOT / "data" / "digits"
ENDS_IN = 10.0  # seconds, on an idle machine
STANDS_STILL = 4  # wait_deadline of the runs in which a process is stopped
RULES = ("weights", "gradients", "parts", "local", "outer", "elastic", "gossip")
POINTS = (
    "starting", "opening the dataset", "opening the arenas", "waiting for a minibatch", "forward, backward",
    "meeting the others", "exchanging", "validating", "saving a checkpoint", "leaving",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM", "SIGINT")
ASKED = {"SIGINT": 130, "SIGTERM": 143}  # the exit codes of a run that was asked to stop


@dataclass(frozen=True)
class Case:
    """signal: what happens. victim: 'launcher', 'trainer 1', 'loader 0' or 'the group'. moment: a point of
    POINTS, or seconds after the start."""

    signal: str
    victim: str
    moment: str | float
    rule: str
    n_trainers: int

    def words(self) -> list[str]:
        """The run's configuration: 60 steps of the digits in three epochs, more or less."""
        rule = {"parts": ["parts=4", "minibatch=48"]}.get(self.rule, [f"rule={self.rule}"])
        every = ["rule_args={every: 3}"] if self.rule in ("local", "outer", "elastic", "gossip") else []
        devices = ",".join(["cpu"] * self.n_trainers)
        deadline = [f"wait_deadline={STANDS_STILL}"] if self.signal == "SIGSTOP" else []
        usual = ["batch_size=16", "n_epochs=3", "snapshot_freq=1", "cpu_threads=1", "trace=true"]
        return [f"data_folder={DATA}", f"devices=[{devices}]", *usual, *rule, *every, *deadline]

    @property
    def is_for_all(self) -> bool:
        """Whether the victim is there from the start, and needs no number of its own."""
        return self.victim in ("launcher", "the group")

    def expected(self) -> tuple[int, str]:
        """The exit code of a run that is hit while it trains, and what its last line has in it."""
        if self.signal == "SIGINT" and not self.is_for_all:
            return 0, ""  # Ctrl-C is the launcher's business
        if self.signal in ASKED:
            return ASKED[self.signal], "stopped as asked"
        if self.is_for_all:
            word = "the launcher (pid" if self.victim == "launcher" else ""
            return -getattr(signal, self.signal), word
        how = "has stood still" if self.signal == "SIGSTOP" else f"was killed by {self.signal}"
        return 1, how


def cases(n: int, seed: int) -> Iterator[Case]:
    """The same for the same seed. A stopped launcher is only a pause, so that is no case."""
    dice = random.Random(seed)
    while n:
        rule = dice.choice(RULES)
        n_trainers = dice.choice((1, 2, 4) if rule == "parts" else (1, 2, 3, 4))
        names = [f"{kind} {rank}" for kind in ("trainer", "loader") for rank in range(n_trainers)]
        victim = dice.choice(["launcher", "the group", *names])
        moment: str | float = dice.choice(POINTS) if dice.random() < 0.6 else round(dice.uniform(0, 6), 2)
        case = Case(dice.choice(SIGNALS), victim, moment, rule, n_trainers)
        if case.signal != "SIGSTOP" or case.victim not in ("launcher", "the group"):
            n -= 1
            yield case


def strike(run: Watched, case: Case) -> bool:
    """Does it. False where the run had ended before, or the victim was never there."""
    if isinstance(case.moment, str):
        run.wait_for(lambda: run.is_at(str(case.moment)), 120)
    else:
        run.wait_for(lambda: time.time() - run.since > float(case.moment), 120)
    pid = run.process.pid
    if not case.is_for_all:
        run.wait_for(lambda: case.victim in run.pids(), 120)
        pid = run.pids().get(case.victim, 0)
    if run.process.poll() is not None or not pid:
        return False
    try:
        (os.killpg if case.victim == "the group" else os.kill)(pid, getattr(signal, case.signal))
    except ProcessLookupError:
        return False
    return True


def problems_of(run: Watched, case: Case, patience: float) -> Iterator[str]:
    """Promises that a run which was hit has broken. patience: how much slower than idle the machine is."""
    began = bool(run.pids())
    seconds = patience * (ENDS_IN + (STANDS_STILL if case.signal == "SIGSTOP" else 0))
    expected, word = case.expected()
    code = run.code(120 if expected == 0 else seconds)
    is_done = "\ndone: " in run.text()
    if code is None:
        yield f"it had not ended {seconds:.0f} s after"
    elif code != expected and not (is_done and code == 0):
        yield f"its exit code is {code}, not {expected}"
    elif began and code == expected and word not in run.last_line():
        yield f"its last line does not say '{word}': {run.last_line()}"
    if "Traceback" in run.text():
        yield "it showed a traceback"
    if not run.wait_for_none_left(seconds):
        yield f"{len(run.left())} processes were left"
    if any((run.run_folder / "checkpoints").glob("*.json")):
        try:
            find_checkpoint(run.run_folder, "latest")
        except UserError as error:
            yield f"its newest checkpoint is not whole: {error}"


def going_on(folder: Path, case: Case, unbroken: Path) -> Iterator[str]:
    """The same for its resumption, whose end must be the unbroken run's."""
    run = Watched(folder, [*case.words(), "resume_train=auto"])
    code = run.code(300)
    already = "epochs are done" in run.last_line()
    if code != 0 and not already:
        yield f"going on with it ended with {code}: {run.last_line()}"
        run.end()
        return
    ours, theirs = (
        load_file(place / "run/checkpoints/epoch_0003.safetensors") for place in (folder, unbroken)
    )
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        yield "its end has other bits than the unbroken run's"


def run_case(case: Case, place: Path, patience: float) -> tuple[bool, list[str]]:
    """Whether it was hit before its end, and which promises it broke. place: keeps unbroken runs."""
    unbroken = place / f"{case.rule}-{case.n_trainers}"
    if not unbroken.exists():
        unbroken.mkdir()
        words = dataclasses.replace(case, signal="none").words()
        if Watched(unbroken, words).code(300) != 0:
            raise UserError(f"{unbroken}: the unbroken run did not end well")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        run = Watched(Path(folder), case.words())
        try:
            struck = strike(run, case)
            problems = list(problems_of(run, case, patience))
        finally:
            run.end()
        problems += going_on(Path(folder), case, unbroken)
    return struck, problems


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all promises were kept; 1: some case broke one."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=100, help="cases (100)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases (1)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a busy machine (1)")
    parser.add_argument("--results", type=Path, help="folder for chaos.md and chaos.json: docs/results, say")
    words = parser.parse_args(arguments)
    before = set(os.listdir("/dev/shm"))
    tally: Counter[tuple[str, str]] = Counter()
    broken = []
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(cases(words.n, words.seed), 1):
            struck, problems = run_case(case, Path(place), words.patience)
            kept = "broken" if problems else "kept" if struck else "kept; ended before it was hit"
            tally[case.signal, kept] += 1
            broken += [f"{number}: {case}: {problem}" for problem in problems]
            print(f"{number}/{words.n} {case}: {'; '.join(problems) or kept}", flush=True)
    left = sorted(set(os.listdir("/dev/shm")) - before)
    broken += [f"left in /dev/shm: {name}" for name in left]
    rows = [("what happened", "promises", "cases"), *((*key, str(n)) for key, n in sorted(tally.items()))]
    title = (
        f"{words.n} runs of train.py with 1 to 4 trainers, seed {words.seed}: {len(broken)} broken promises"
    )
    text = "\n".join([table(title, rows), *(f"- {line}" for line in broken)])
    print(text)
    if words.results:
        numbers = {"seed": words.seed, "cases": words.n, "broken": broken}
        command = f"python -m campaigns.chaos {words.n} --seed {words.seed}"
        write_results(words.results, "chaos", [(text, numbers)], command)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
