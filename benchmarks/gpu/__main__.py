"""Every GPU test and benchmark, one section after the other.

Writes gpu-<date>.json, .md and .log into the folder (else $OUT, else docs/results), anew every few seconds.
Exit code: 0 everything ran; 1 something failed, or there was no time left for it. A target that is missed is
no failure; a test that fails is one.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import harness, machine, rehearsal, report
from benchmarks.gpu.harness import Outcome, Section
from benchmarks.gpu.section import NAMES, PARTS
from lockstep.errors import UserError

SECONDS = 500.0  # of everything: with what comes before and after, less than nine minutes
_LIMITS = {
    "preflight": 90.0,
    "alexnet": 100.0,
    "layers": 50.0,
    "compiled": 150.0,
    "loading": 110.0,
    "tests": 150.0,
    "tests2": 190.0,
    "table1": 110.0,
    "exchange": 80.0,
    "precisions": 80.0,
    "resnet50": 85.0,
    "functions": 60.0,
    "flow": 105.0,
    "hosts": 90.0,
}
_LEAST = 20.0
_PATIENCE = 6  # times as long for a rehearsal, which may have to share its two cores with others
_ROOT = Path(__file__).resolve().parents[2]
_REHEARSALS = Path(tempfile.gettempdir()) / "lockstep-rehearsal"


def main(words: list[str]) -> int:
    arguments = _read_words(words)
    folder = _folder_of(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-", ignore_cleanup_errors=True) as place:
        work = Path(place)
        environment = rehearsal.environment(work) if arguments.rehearse else dict(os.environ)
        os.environ["PATH"] = environment["PATH"]  # the rehearsal's nvidia-smi answers this process too
        until = time.monotonic() + (arguments.seconds or SECONDS * arguments.patience)  # builds take minutes
        run = Run(folder, arguments.rehearse, f"-part{arguments.part}" if arguments.part else "")
        for section in _sections(arguments, work):
            run.keep(section.name, take(section, until, work, run, environment))
    print(report.markdown(run.content))
    print(f"written to {run.path('.json')}, .md and .log")
    return 0 if run.all_ran() else 1


class Run:
    """All results so far, in three files that are written anew after each section."""

    def __init__(self, folder: Path, is_rehearsal: bool, part: str) -> None:
        facts = machine.facts()
        self._name = f"{'rehearsal' if is_rehearsal else 'gpu'}-{facts['date']}{part}"
        self._folder = folder
        self.content: dict[str, Any] = {"rehearsal": is_rehearsal, "machine": facts, "sections": {}}
        self.log = self.path(".log")
        self.log.write_text("")

    def path(self, suffix: str) -> Path:
        return self._folder / f"{self._name}{suffix}"

    def keep(self, name: str, outcome: Outcome) -> None:
        print(f"{name}: {outcome.status} {outcome.reason} ({outcome.seconds:.0f} s)", flush=True)
        self.write(name, outcome)

    def write(self, name: str, outcome: Outcome) -> None:
        """A section's figures, also of one that still runs: whatever ends this, they are there."""
        self.content["sections"][name] = asdict(outcome)
        self.content["targets"] = report.targets(self.content["sections"])
        self._write(".json", json.dumps(self.content, indent=1) + "\n")
        self._write(".md", report.markdown(self.content))

    def _write(self, suffix: str, text: str) -> None:
        """Write a file in which errors name the project's files by their places in it."""
        self.path(suffix).write_text(text.replace(f"{_ROOT}{os.sep}", ""), encoding="utf-8")

    def all_ran(self) -> bool:
        return all(section["status"] == "ran" for section in self.content["sections"].values())


def take(section: Section, until: float, work: Path, run: Run, environment: dict[str, str]) -> Outcome:
    """Runs a section in the time that is left, or says that there is none."""
    seconds = min(section.limit, until - time.monotonic())
    if seconds < section.least:
        return Outcome("not run", "out of time")
    print(f"{section.name}: at most {seconds:.0f} s ...", flush=True)
    watch = partial(run.write, section.name)
    return harness.run(section, seconds, work, run.log, environment, watch)


def _read_words(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="for the results (docs/results, or $OUT)")
    parser.add_argument(
        "--part", type=int, choices=PARTS, help="1: what is worth most; 2: tests; 3: the rest (all)"
    )
    parser.add_argument("--only", help="sections, with commas between them")
    parser.add_argument("--seconds", type=float, help=f"for everything ({SECONDS:.0f})")
    parser.add_argument("--rehearse", action="store_true", help="small, on the simulated driver")
    arguments = parser.parse_args(words)
    arguments.patience = _PATIENCE if arguments.rehearse else 1
    arguments.only = arguments.only or ",".join(PARTS.get(arguments.part, NAMES))
    unknown = [name for name in arguments.only.split(",") if name not in NAMES]
    if unknown:
        parser.error(f"--only: there is no section {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if arguments.rehearse and arguments.folder and arguments.folder.resolve() == _ROOT / "docs" / "results":
        parser.error("a rehearsal's figures mean nothing: not in docs/results")
    return arguments


def _folder_of(arguments: argparse.Namespace) -> Path:
    if arguments.folder:
        return Path(arguments.folder)
    if arguments.rehearse:
        return _REHEARSALS
    return Path(os.environ.get("OUT") or _ROOT / "docs" / "results")


def _sections(arguments: argparse.Namespace, work: Path) -> list[Section]:
    program = (sys.executable, "-m", "benchmarks.gpu.section")
    setting = "rehearsal" if arguments.rehearse else "real"
    names = [name for name in _LIMITS if name in arguments.only.split(",")]
    return [
        Section(name, (*program, name, str(work), setting), arguments.patience * _LIMITS[name], _LEAST)
        for name in names
    ]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # on the way out the section is ended
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"gpu.sh: {error}")
