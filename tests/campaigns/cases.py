"""The cases of chaos.py: a signal, its victim and moment, the program, and the expected result."""

import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from campaigns.programs import STEPS, newest
from campaigns.watching import ROOT, Watched, free_port
from lockstep.errors import UserError
from lockstep.launch import resize as resize_command
from lockstep.runs.checkpoint_files import find_checkpoint

DATA = ROOT / "data" / "digits"
HOSTS = "two hosts"  # the program's name: train.py on each of two
STANDS_STILL = {
    "train.py": 4.0,
    HOSTS: 12.0,
    "synk": 15.0,
    "flow": 0.0,
}  # seconds until a stopped process is detected
RULES = ("weights", "gradients", "parts", "local", "outer", "elastic", "gossip")
OVER_HOSTS = ("weights", "gradients", "parts", "local", "outer")
OF_A_RUN = (
    "starting", "opening the dataset", "opening the arenas", "waiting for a minibatch", "forward, backward",
    "waiting for the others", "exchanging", "validating", "saving a checkpoint", "leaving",
)  # fmt: skip
POINTS = {
    "train.py": OF_A_RUN,
    HOSTS: OF_A_RUN,
    "synk": ("ranks are there", "step 1\n", "step 21\n", f"step {STEPS}\n"),
    "flow": ("step 1\n", "step 21\n", f"step {STEPS}\n"),
}
PROGRAMS = ("train.py",) * 6 + (HOSTS, HOSTS, "synk", "synk", "flow")  # in this proportion
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "SIGTERM", "SIGINT", "SIGHUP")
ASKED = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 143}  # exit statuses of a run that was asked to stop
LAUNCHER_DIED = "the launcher (pid"  # trainer 0 says so
PYTHONS_CTRL_C = (-signal.SIGINT, 130, 1)  # possible exit statuses of a plain program after Ctrl-C


@dataclass(frozen=True)
class Case:
    """One signal to one process of a program.

    Attributes:
        program: One of PROGRAMS.
        signal: The signal's name.
        victim: 'launcher' (or the program itself), 'trainer 1', 'loader 0', 'rank 2', 'the template' (the
            process that forks trainers and loaders) or 'the group'.
        moment: A point of POINTS, or seconds after the start.
        host: The victim's host, of two.
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
        """The name of the run without the signal: cases that share it have the same final weights."""
        return f"{self.program}-{self.rule}-{self.n_processes}"

    @property
    def is_for_all(self) -> bool:
        """True if the victim exists from the start and its process id is the program's."""
        return self.victim in ("launcher", "the group")

    @property
    def is_training(self) -> bool:
        """True for train.py on any number of hosts."""
        return self.program in ("train.py", HOSTS)

    def places(self, folder: Path) -> list[Path]:
        """Return the output folder of each of its programs."""
        return [folder / f"host {host}" for host in (0, 1)] if self.program == HOSTS else [folder]

    def start(self, folder: Path, patience: float) -> list[Watched]:
        """Start its programs (one, or a launcher per host), which resume from the folder."""
        still = STANDS_STILL[self.program] * patience
        if not self.is_training:
            words = [self.program, str(folder), str(self.n_processes), str(still)]
            return [Watched(folder, [], [sys.executable, str(ROOT / "tests/campaigns/programs.py"), *words])]
        words = [*self._keys(), "resume_train=auto"]
        if self.program == "train.py":
            deadline = [f"timeout={still:g}"] if self.signal == "SIGSTOP" else []
            return [Watched(folder, [*words, *deadline])]
        words += ["n_hosts=2", f"rendezvous=127.0.0.1:{free_port()}", f"timeout={still:g}"]
        for place in self.places(folder):
            place.mkdir(exist_ok=True)
        return [
            Watched(place, [*words, f"host_rank={host}"]) for host, place in enumerate(self.places(folder))
        ]

    def _keys(self) -> list[str]:
        """Return the run's configuration: two epochs of the digits with 23 steps or more each."""
        rule = {"parts": ["logical_ranks=4", "global_batch_size=48"]}.get(self.rule, [f"rule={self.rule}"])
        every = ["rule_args={every: 3}"] if self.rule in ("local", "outer", "elastic", "gossip") else []
        devices = ",".join(["cpu"] * self.n_processes)
        usual = ["batch_size=16", "n_epochs=2", "snapshot_freq=1", "cpu_threads=1", "trace=true"]
        return [f"data_folder={DATA}", f"devices=[{devices}]", *usual, *rule, *every]

    def has_come(self, run: Watched) -> bool:
        """Return True once the victim's run has reached the moment."""
        if not isinstance(self.moment, str):
            return time.time() - run.since > self.moment
        return run.is_at(self.moment) if self.is_training else self.moment in run.text()

    def prepare(self, run: Watched) -> None:
        """Do what comes right before the signal."""

    def pid(self, run: Watched) -> int:
        """Return the victim's process id, or 0 while it does not exist."""
        if self.is_for_all:
            return run.process.pid
        if self.victim == "the template":
            return next(iter(run.children("lockstep.launch.template")), 0)
        if self.program == "synk":
            ranks = run.children("lockstep.synk")
            return ranks[int(self.victim.split()[1]) - 1] if len(ranks) == self.n_processes - 1 else 0
        return run.pids().get(self.victim, 0)

    def expected(self, host: int) -> tuple[tuple[int, ...], str]:
        """Return the allowed exit statuses of a program hit during training, and a part of its last line."""
        number = int(getattr(signal, self.signal))
        # Ctrl-C and a closed terminal concern the launcher only; a rank of synk ignores only Ctrl-C.
        is_ignored = self.signal in (("SIGINT", "SIGHUP") if self.is_training else ("SIGINT",))
        if self.victim == "the template" and self.signal == "SIGTERM":
            return (ASKED["SIGTERM"], 0), ""  # 0: it had not imported anything yet, and ignored the signal
        if self.victim == "the template" or (is_ignored and not self.is_for_all):
            return (0,), ""
        if not self.is_training:
            if not self.is_for_all:
                return (1,), "RankLost"
            return (PYTHONS_CTRL_C if self.signal == "SIGINT" else (-number,)), ""
        if self.signal in ASKED:
            return (ASKED[self.signal],), "stopped as asked"
        if self.is_for_all and host != self.host:
            return (1,), f"host {self.host}: its launcher"
        if self.is_for_all:
            return (-number,), LAUNCHER_DIED if self.victim == "launcher" else ""
        if self.program == HOSTS or (self.program == "train.py" and self.n_processes > 1):
            return (0,), ""  # it recovers
        return (1,), "has stood still" if self.signal == "SIGSTOP" else f"was killed by {self.signal}"

    def broken_files(self, place: Path) -> str:
        """Return what is wrong with the newest checkpoint, or ''."""
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
        """Return the file with the final weights."""
        if not self.is_training:
            return place / f"{STEPS}.safetensors"
        return place / "run/checkpoints/epoch_0002.safetensors"


@dataclass(frozen=True)
class ResizedCase(Case):
    """One signal to a process of a run that was just asked for other devices.

    Attributes:
        change: The devices to add, or to remove if it is negative.
        delay: Seconds from the request to the signal.
    """

    change: int = 0
    delay: float = 0.0

    def prepare(self, run: Watched) -> None:
        with suppress(UserError):  # the run has ended, or has no folder yet
            resize_command.ask(run.run_folder, (), self.change)
        time.sleep(self.delay)

    def expected(self, host: int) -> tuple[tuple[int, ...], str]:
        statuses, word = super().expected(host)
        is_alone = 1 in (self.n_processes, self.n_processes + self.change)
        if is_alone and statuses in ((0,), (1,)) and self.victim.startswith(("trainer", "loader")):
            return (0, 1), ""  # it recovers, unless it has a single trainer at this moment
        return statuses, word


def resized_cases(n: int, seed: int) -> Iterator[ResizedCase]:
    """Draw cases of runs that are resized, from a seed."""
    dice = random.Random(seed)
    while n:
        n_processes = dice.choice((1, 2, 3, 4))
        change = dice.choice([count for count in (1, 2, 3, 4) if count != n_processes]) - n_processes
        both = [f"{kind} {rank}" for kind in ("trainer", "loader") for rank in range(n_processes)]
        victim = dice.choice(["launcher", "the group", "the template", *both])
        named = dice.random() < 0.3
        moment: str | float = dice.choice(OF_A_RUN[3:]) if named else round(dice.uniform(1, 6), 2)
        number, delay = dice.choice(SIGNALS), round(dice.choice((0.0, dice.uniform(0, 1.5))), 3)
        if number != "SIGSTOP" or victim not in ("launcher", "the group", "the template"):
            n -= 1
            yield ResizedCase("train.py", number, victim, moment, "parts", n_processes, 0, change, delay)


def cases(n: int, seed: int) -> Iterator[Case]:
    """Draw cases from a seed. Stopping a launcher or template only pauses the run, so it is no case."""
    dice = random.Random(seed)
    while n:
        program = dice.choice(PROGRAMS)
        rule = dice.choice({"train.py": RULES, HOSTS: OVER_HOSTS}.get(program, ("none",)))
        sizes = (1, 2) if program == HOSTS else (1, 2, 4) if rule == "parts" else (1, 1, 2, 2, 3, 4)
        n_processes = dice.choice(sizes)
        both = [f"{kind} {rank}" for kind in ("trainer", "loader") for rank in range(n_processes)]
        ranks = [f"rank {rank}" for rank in range(1, n_processes)]
        names = {"synk": ranks, "flow": []}.get(program, ["the template", *both])
        victim = dice.choice(["launcher", "the group", *names])
        named = dice.random() < 0.6
        moment: str | float = dice.choice(POINTS[program]) if named else round(dice.uniform(0, 6), 2)
        host = dice.choice((0, 1)) if program == HOSTS else 0
        case = Case(program, dice.choice(SIGNALS), victim, moment, rule, n_processes, host)
        if case.signal != "SIGSTOP" or case.victim not in ("launcher", "the group", "the template"):
            n -= 1
            yield case
