"""The cases of chaos.py: what is done to which process of which program, when, and what must come of it."""

import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from campaigns.programs import STEPS, newest
from campaigns.watching import ROOT, Watched
from lockstep.errors import UserError
from lockstep.runs.folder import find_checkpoint

DATA = ROOT / "data" / "digits"
STANDS_STILL = {"train.py": 4.0, "synk": 15.0, "flow": 0.0}  # seconds after which who is stopped is missed
RULES = ("weights", "gradients", "parts", "local", "outer", "elastic", "gossip")
POINTS = {
    "train.py": (
        "starting", "opening the dataset", "opening the arenas", "waiting for a minibatch",
        "forward, backward", "meeting the others", "exchanging", "validating", "saving a checkpoint",
        "leaving",
    ),
    "synk": ("ranks are there", "step 1\n", "step 21\n", f"step {STEPS}\n"),
    "flow": ("step 1\n", "step 21\n", f"step {STEPS}\n"),
}  # fmt: skip
PROGRAMS = ("train.py",) * 6 + ("synk", "synk", "flow")  # in this proportion
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM", "SIGINT")
ASKED = {"SIGINT": 130, "SIGTERM": 143}  # the exit codes of a run that was asked to stop
PYTHONS_CTRL_C = (-signal.SIGINT, 130, 1)  # a plain program's exit code


@dataclass(frozen=True)
class Case:
    """program: 'train.py', or what programs.py has. signal: what happens. victim: 'launcher' (or the program
    itself), 'trainer 1', 'loader 0', 'rank 2', 'the helper' (a process of multiprocessing's own) or 'the
    group'. moment: a point of POINTS, or seconds after the start.
    """

    program: str
    signal: str
    victim: str
    moment: str | float
    rule: str
    n_processes: int

    @property
    def name(self) -> str:
        """Of what it is done to: cases with the same one have the same end."""
        return f"{self.program}-{self.rule}-{self.n_processes}"

    @property
    def is_for_all(self) -> bool:
        """Whether the victim is there from the start, and needs no number of its own."""
        return self.victim in ("launcher", "the group")

    def start(self, folder: Path, patience: float) -> Watched:
        """The program, going on with what is in the folder."""
        still = STANDS_STILL[self.program] * patience
        if self.program != "train.py":
            words = [self.program, str(folder), str(self.n_processes), str(still)]
            return Watched(folder, [], [sys.executable, "-m", "campaigns.programs", *words])
        deadline = [f"wait_deadline={still:g}"] if self.signal == "SIGSTOP" else []
        return Watched(folder, [*self._keys(), *deadline, "resume_train=auto"])

    def _keys(self) -> list[str]:
        """The run's configuration: 60 steps of the digits in three epochs, more or less."""
        rule = {"parts": ["parts=4", "minibatch=48"]}.get(self.rule, [f"rule={self.rule}"])
        every = ["rule_args={every: 3}"] if self.rule in ("local", "outer", "elastic", "gossip") else []
        devices = ",".join(["cpu"] * self.n_processes)
        usual = ["batch_size=16", "n_epochs=3", "snapshot_freq=1", "cpu_threads=1", "trace=true"]
        return [f"data_folder={DATA}", f"devices=[{devices}]", *usual, *rule, *every]

    def has_come(self, run: Watched) -> bool:
        """Whether the moment is there."""
        if not isinstance(self.moment, str):
            return time.time() - run.since > self.moment
        return run.is_at(self.moment) if self.program == "train.py" else self.moment in run.text()

    def pid(self, run: Watched) -> int:
        """The victim's number, 0 while it is not there."""
        if self.is_for_all:
            return run.process.pid
        if self.victim == "the helper":
            return next(iter(run.children("resource_tracker")), 0)
        if self.program == "synk":
            ranks = run.children("lockstep.synk")
            return ranks[int(self.victim.split()[1]) - 1] if len(ranks) == self.n_processes - 1 else 0
        return run.pids().get(self.victim, 0)

    def expected(self) -> tuple[tuple[int, ...], str]:
        """The exit codes of a run that is hit while it trains, and what its last line has in it."""
        number = int(getattr(signal, self.signal))
        if self.victim == "the helper" or (self.signal == "SIGINT" and not self.is_for_all):
            return (0,), ""  # nobody needs it; Ctrl-C is the launcher's business
        if self.program != "train.py":
            if not self.is_for_all:
                return (1,), "RankLost"
            return (PYTHONS_CTRL_C if self.signal == "SIGINT" else (-number,)), ""
        if self.signal in ASKED:
            return (ASKED[self.signal],), "stopped as asked"
        if self.is_for_all:
            return (-number,), "the launcher (pid" if self.victim == "launcher" else ""
        return (1,), "has stood still" if self.signal == "SIGSTOP" else f"was killed by {self.signal}"

    def broken_files(self, folder: Path) -> str:
        """What is wrong with the newest that was kept, or ''."""
        try:
            if self.program != "train.py":
                _, path = newest(folder)
                load_file(path) if path else None
            elif any((folder / "run/checkpoints").glob("*.json")):
                find_checkpoint(folder / "run", "latest")
        except (UserError, ValueError, OSError) as error:
            return str(error)
        return ""

    def end(self, folder: Path) -> Path:
        """The file with the last weights."""
        if self.program != "train.py":
            return folder / f"{STEPS}.safetensors"
        return folder / "run/checkpoints/epoch_0003.safetensors"


def cases(n: int, seed: int) -> Iterator[Case]:
    """The same for the same seed. A stopped launcher or helper is only a pause, so that is no case."""
    dice = random.Random(seed)
    while n:
        program = dice.choice(PROGRAMS)
        rule = dice.choice(RULES) if program == "train.py" else "none"
        n_processes = dice.choice((1, 2, 4) if rule == "parts" else (1, 2, 3, 4))
        both = [f"{kind} {rank}" for kind in ("trainer", "loader") for rank in range(n_processes)]
        names = {
            "train.py": ["the helper", *both],
            "synk": [f"rank {rank}" for rank in range(1, n_processes)],
            "flow": [],
        }[program]
        victim = dice.choice(["launcher", "the group", *names])
        named = dice.random() < 0.6
        moment: str | float = dice.choice(POINTS[program]) if named else round(dice.uniform(0, 6), 2)
        case = Case(program, dice.choice(SIGNALS), victim, moment, rule, n_processes)
        if case.signal != "SIGSTOP" or case.victim not in ("launcher", "the group", "the helper"):
            n -= 1
            yield case
