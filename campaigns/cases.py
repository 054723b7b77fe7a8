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
from campaigns.watching import ROOT, Watched, free_port
from lockstep.errors import UserError
from lockstep.runs.folder import find_checkpoint

DATA = ROOT / "data" / "digits"
HOSTS = "two hosts"  # the program's name: train.py on each of two
STANDS_STILL = {
    "train.py": 4.0,
    HOSTS: 12.0,
    "synk": 15.0,
    "flow": 0.0,
}  # seconds until who is stopped is missed
RULES = ("weights", "gradients", "parts", "local", "outer", "elastic", "gossip")
OVER_HOSTS = ("weights", "gradients", "parts", "local", "outer")
OF_A_RUN = (
    "starting", "opening the dataset", "opening the arenas", "waiting for a minibatch", "forward, backward",
    "meeting the others", "exchanging", "validating", "saving a checkpoint", "leaving",
)  # fmt: skip
POINTS = {
    "train.py": OF_A_RUN,
    HOSTS: OF_A_RUN,
    "synk": ("ranks are there", "step 1\n", "step 21\n", f"step {STEPS}\n"),
    "flow": ("step 1\n", "step 21\n", f"step {STEPS}\n"),
}
PROGRAMS = ("train.py",) * 6 + (HOSTS, HOSTS, "synk", "synk", "flow")  # in this proportion
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM", "SIGINT")
ASKED = {"SIGINT": 130, "SIGTERM": 143}  # the exit codes of a run that was asked to stop
PYTHONS_CTRL_C = (-signal.SIGINT, 130, 1)  # a plain program's exit code


@dataclass(frozen=True)
class Case:
    """program: one of PROGRAMS. signal: what happens. victim: 'launcher' (or the program itself),
    'trainer 1', 'loader 0', 'rank 2', 'the helper' (a process of multiprocessing's own) or 'the group'.
    moment: a point of POINTS, or seconds after the start. host: of two hosts, the victim's.
    """

    program: str
    signal: str
    victim: str
    moment: str | float
    rule: str
    n_processes: int
    host: int = 0

    @property
    def name(self) -> str:
        """Of what it is done to: cases with the same one have the same end."""
        return f"{self.program}-{self.rule}-{self.n_processes}"

    @property
    def is_for_all(self) -> bool:
        """Whether the victim is there from the start, and needs no number of its own."""
        return self.victim in ("launcher", "the group")

    @property
    def is_training(self) -> bool:
        """Whether it is train.py, on whatever number of hosts."""
        return self.program in ("train.py", HOSTS)

    def places(self, folder: Path) -> list[Path]:
        """Where its programs keep what they make: a folder for each of them."""
        return [folder / f"host {host}" for host in (0, 1)] if self.program == HOSTS else [folder]

    def start(self, folder: Path, patience: float) -> list[Watched]:
        """Its programs (one, or a launcher for each host), going on with what is in the folder."""
        still = STANDS_STILL[self.program] * patience
        if not self.is_training:
            words = [self.program, str(folder), str(self.n_processes), str(still)]
            return [Watched(folder, [], [sys.executable, "-m", "campaigns.programs", *words])]
        words = [*self._keys(), "resume_train=auto"]
        if self.program == "train.py":
            deadline = [f"wait_deadline={still:g}"] if self.signal == "SIGSTOP" else []
            return [Watched(folder, [*words, *deadline])]
        words += ["hosts=2", f"meeting_point=127.0.0.1:{free_port()}", f"wait_deadline={still:g}"]
        for place in self.places(folder):
            place.mkdir(exist_ok=True)
        return [Watched(place, [*words, f"host={host}"]) for host, place in enumerate(self.places(folder))]

    def _keys(self) -> list[str]:
        """The run's configuration: two epochs of the digits, of 23 steps or more each."""
        rule = {"parts": ["parts=4", "minibatch=48"]}.get(self.rule, [f"rule={self.rule}"])
        every = ["rule_args={every: 3}"] if self.rule in ("local", "outer", "elastic", "gossip") else []
        devices = ",".join(["cpu"] * self.n_processes)
        usual = ["batch_size=16", "n_epochs=2", "snapshot_freq=1", "cpu_threads=1", "trace=true"]
        return [f"data_folder={DATA}", f"devices=[{devices}]", *usual, *rule, *every]

    def has_come(self, run: Watched) -> bool:
        """Whether the moment is there. run: the one that is to be hit."""
        if not isinstance(self.moment, str):
            return time.time() - run.since > self.moment
        return run.is_at(self.moment) if self.is_training else self.moment in run.text()

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

    def expected(self, host: int) -> tuple[tuple[int, ...], str]:
        """The exit codes of a program that is hit while it trains, and what its last line has in it."""
        number = int(getattr(signal, self.signal))
        if self.victim == "the helper" or (self.signal == "SIGINT" and not self.is_for_all):
            return (0,), ""  # nobody needs it; Ctrl-C is the launcher's business
        if not self.is_training:
            if not self.is_for_all:
                return (1,), "RankLost"
            return (PYTHONS_CTRL_C if self.signal == "SIGINT" else (-number,)), ""
        if self.signal in ASKED:
            return (ASKED[self.signal],), "stopped as asked"
        if self.is_for_all and host != self.host:
            return (1,), f"host {self.host}: its launcher"
        if self.is_for_all:
            return (-number,), "the launcher (pid" if self.victim == "launcher" else ""
        return (1,), "has stood still" if self.signal == "SIGSTOP" else f"was killed by {self.signal}"

    def broken_files(self, place: Path) -> str:
        """What is wrong with the newest that was kept, or ''."""
        try:
            if not self.is_training:
                _, path = newest(place)
                load_file(path) if path else None
            elif any((place / "run/checkpoints").glob("*.json")):
                find_checkpoint(place / "run", "latest")
        except (UserError, ValueError, OSError) as error:
            return str(error)
        return ""

    def end(self, place: Path) -> Path:
        """The file with the last weights."""
        if not self.is_training:
            return place / f"{STEPS}.safetensors"
        return place / "run/checkpoints/epoch_0002.safetensors"


def cases(n: int, seed: int) -> Iterator[Case]:
    """The same for the same seed. A stopped launcher or helper is only a pause, so that is no case."""
    dice = random.Random(seed)
    while n:
        program = dice.choice(PROGRAMS)
        rule = dice.choice({"train.py": RULES, HOSTS: OVER_HOSTS}.get(program, ("none",)))
        sizes = (1, 2) if program == HOSTS else (1, 2, 4) if rule == "parts" else (1, 1, 2, 2, 3, 4)
        n_processes = dice.choice(sizes)
        both = [f"{kind} {rank}" for kind in ("trainer", "loader") for rank in range(n_processes)]
        ranks = [f"rank {rank}" for rank in range(1, n_processes)]
        names = {"synk": ranks, "flow": []}.get(program, ["the helper", *both])
        victim = dice.choice(["launcher", "the group", *names])
        named = dice.random() < 0.6
        moment: str | float = dice.choice(POINTS[program]) if named else round(dice.uniform(0, 6), 2)
        host = dice.choice((0, 1)) if program == HOSTS else 0
        case = Case(program, dice.choice(SIGNALS), victim, moment, rule, n_processes, host)
        if case.signal != "SIGSTOP" or case.victim not in ("launcher", "the group", "the helper"):
            n -= 1
            yield case
