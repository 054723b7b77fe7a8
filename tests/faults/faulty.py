"""Programs whose file operations fail on purpose, by faults.c."""

import errno
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from campaigns.watching import processes_of_session
from forked_programs import ForkServer
from limits import limit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LASTING = ("ENOSPC", "EDQUOT", "EROFS")  # a disk that is full stays so
SECONDS = 30.0  # a program may take, on an idle machine


@dataclass(frozen=True)
class Fault:
    """A fault: the nth operation of a kind on matching files fails with an error, or kills the process."""

    kind: str
    name: str  # below the folder; a pattern
    nth: int
    error: str  # of errno's names, 'kill', or of a read 'short'

    def __str__(self) -> str:
        return f"{self.error} in {self.kind} {self.nth} of {self.name}"

    def environment(self) -> dict[str, str]:
        number = str(getattr(errno, self.error, self.error))
        lasts = "1" if self.error in LASTING else ""
        return {
            "FAULTS_KIND": self.kind,
            "FAULTS_NAME": self.name,
            "FAULTS_NTH": str(self.nth),
            "FAULTS_ERROR": number,
            "FAULTS_LASTS": lasts,
        }


NO_FAULT = dict.fromkeys(("FAULTS_KIND", "FAULTS_NAME", "FAULTS_NTH", "FAULTS_ERROR", "FAULTS_LASTS"), "")


@dataclass(frozen=True)
class Ended:
    """The result of a program: exit status, output, whether the fault occurred, and its file operations."""

    code: int
    output: str
    fired: bool
    operations: list[tuple[str, str]]  # kind, name below the folder

    def last_line(self) -> str:
        return (self.output.rstrip().splitlines() or [""])[-1]


def build(folder: Path) -> Path:
    """Return the compiled file layer, or skip the test without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here to build the file layer with")
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return library


class Runner:
    """Runs programs whose file operations fail, in forks of a process with the file layer."""

    def __init__(self, place: Path) -> None:
        self._place, self._number = place, 0
        self._environment = {**os.environ, "LD_PRELOAD": str(build(place)), "PYTHONPATH": str(ROOT)}
        self._server = ForkServer(self._environment)

    def run(self, program: str, words: Iterable[str], folder: Path, fault: Fault | None = None) -> Ended:
        """Run a program on `folder`; the fault affects files below it."""
        self._number += 1
        names = ("output", "log", "count", "fired")
        output, log, count, fired = (self._place / f"{name}{self._number}.txt" for name in names)
        notes = {"FAULTS_FOLDER": folder.resolve(), "FAULTS_LOG": log}
        notes |= {"FAULTS_COUNT": count, "FAULTS_FIRED": fired}
        environment = self._environment | {name: str(value) for name, value in notes.items()}
        environment |= fault.environment() if fault else NO_FAULT
        running = self._server.start([str(ROOT / program), *words], output, environment)
        assert running, "the file layer is loaded by the process that forks"
        code = running.wait(limit(SECONDS))
        while processes_of_session(running.pid):  # they hold locks, and the kernel ends them with a launcher
            time.sleep(0.005)
        lines = log.read_text().splitlines() if log.exists() else []
        operations = [(kind, name) for kind, _, name in (line.partition(" ") for line in lines)]
        return Ended(code, output.read_text(), fired.exists(), operations)

    def close(self) -> None:
        self._server.close()


def named_again(name: str) -> str:
    """Return a pattern of a file's name that matches tempfile's random letters in every run."""
    *folders, last = Path(name).parts
    if last.startswith(".") and last.count(".") > 2:
        last = f"{last.rpartition('.')[0]}.*"
    return "/".join([*folders, last])


def each_once(operations: Iterable[tuple[str, str]], errors: Iterable[str]) -> Iterator[Fault]:
    """Return a fault per operation except reads, errors alternating, and a torn first write per file."""
    counts: Counter[tuple[str, str]] = Counter()
    in_turn = list(errors)
    for number, (kind, name) in enumerate(each for each in operations if each[0] != "read"):
        pattern = named_again(name)
        counts[kind, pattern] += 1
        yield Fault(kind, pattern, counts[kind, pattern], in_turn[number % len(in_turn)])
        if kind == "write" and counts[kind, pattern] == 1:
            yield Fault(kind, pattern, counts[kind, pattern], "kill")
