"""The process of a section, with a time limit and complete cleanup.

A section that crashes or hangs costs the others nothing but time: it is killed with everything that it has
started, and recorded as failed with the last lines of its output.
"""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST_LINES = 15
BEGAN = "LOCKSTEP_SECTION_BEGAN"  # when a section was started, by time.monotonic(), which all processes share
LOOK_SECONDS = 3.0
KILL_SECONDS = 10.0  # a process stuck inside the driver may survive a kill


@dataclass(frozen=True)
class Section:
    """One program. Its words are followed by two more: the file for its record, and its limit in seconds.

    least: seconds without which it is not worth starting.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    least: float


@dataclass
class Outcome:
    """The end of a section. status: 'ran', 'failed' or 'not run'; reason: why it failed or was not run.

    figures: what it has kept, good also where it failed later. problems: what failed inside, by name.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)


def _apart(environment: dict[str, str]) -> dict[str, str]:
    """Without what a pytest that runs this tells its workers: a pytest in a section is not one of them."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}


def run(
    section: Section,
    seconds: float,
    folder: Path,
    log: Path,
    environment: dict[str, str],
    watch: Callable[[Outcome], object] = lambda outcome: None,
) -> Outcome:
    """Runs a section for `seconds` at most. Its output goes to the end of `log`, its record into `folder`.

    watch: Called every few seconds with the progress so far.
    """
    record = folder / f"{section.name}.json"
    mark = f"{section.name}-{uuid.uuid4().hex}"
    begin = time.monotonic()
    with open(log, "a+b") as output:
        begins_at = output.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [*section.command, str(record), f"{seconds:.0f}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_apart(environment), "LOCKSTEP_SECTION": mark, BEGAN: str(begin)},
        )
        try:
            reason = _reason_of(_wait(process, seconds, lambda: watch(_so_far(record, begin))))
        except subprocess.TimeoutExpired:
            reason = f"still running after {seconds:.0f} s"
        finally:
            _end_all(mark)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        outcome = _read(record, reason)
        if outcome.status == "failed":
            output.seek(begins_at)
            outcome.last_lines = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def _wait(process: "subprocess.Popen[bytes]", seconds: float, look: Callable[[], object]) -> int:
    """Its exit code. Raises TimeoutExpired."""
    until = time.monotonic() + seconds
    while True:
        try:
            return process.wait(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until:
                raise
            look()


def _so_far(record: Path, begin: float) -> Outcome:
    outcome = _read(record, "still running")
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


def _reason_of(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _read(record: Path, reason: str) -> Outcome:
    content = json.loads(record.read_text()) if record.exists() else {}
    figures, problems = content.get("figures", {}), content.get("problems", {})
    if problems and content["complete"]:
        reason = f"failed in it: {', '.join(problems)}"
    elif not reason and not content.get("complete"):
        reason = "it left before its end, and without an error"
    return Outcome("failed" if reason else "ran", reason, figures=figures, problems=problems)


def _end_all(mark: str) -> None:
    """Kill all processes that a section left, in any session; they inherit a mark in their environment."""
    until = time.monotonic() + KILL_SECONDS
    while (found := _marked(mark.encode())) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: bytes) -> list[int]:
    """Processes with this in their environment. A zombie has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # gone meanwhile, or someone else's
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found
