"""Shared functions of the benchmarks: timing in turns, tables, and a record of the machine."""

import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.backends.devices import count_cores, processor


def medians(functions: dict[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Return the seconds of each function: the median over rounds of turns, after a warm-up."""
    return {name: wall for name, (wall, _) in both_medians(functions, rounds).items()}


def both_medians(
    functions: dict[str, Callable[[], object]], rounds: int = 9
) -> dict[str, tuple[float, float]]:
    """Return the medians of seconds and of this process's CPU seconds, which other processes disturb less."""
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            begin, used = time.perf_counter(), time.process_time()
            function()
            if number:
                laps[name].append((time.perf_counter() - begin, time.process_time() - used))
    columns = {name: zip(*values, strict=True) for name, values in laps.items()}
    return {name: tuple(map(statistics.median, both)) for name, both in columns.items()}  # type: ignore[misc]


def processor_seconds(function: Callable[[], object], rounds: int = 5) -> float:
    """Return the least CPU seconds of a few calls, which with one thread equal the time on an idle core."""
    found = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        function()
        found.append(time.process_time() - begin)
    return min(found[1:])


class Journal:
    """The results so far, in a file from which an interrupted run resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._results = {json.dumps(key): result for key, result in map(json.loads, lines)}

    def once(self, key: list[Any], measure: Any) -> Any:
        """Return the result of a key, measured unless the file has it."""
        name = json.dumps(key)
        if name not in self._results:
            self._results[name] = measure()
            with self._path.open("a") as file:
                file.write(json.dumps([key, self._results[name]]) + "\n")
        print(name, str(self._results[name])[-120:], flush=True)
        return self._results[name]


def machine() -> dict[str, object]:
    """Return the machine and the versions of a measurement."""
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "cores": count_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def as_line(where: dict[str, object]) -> str:
    """Return the machine and the versions of a measurement as a line of its page."""
    return ", ".join(f"{key} {value}" for key, value in where.items())


def commit() -> str:
    """Return git's commit, or $LOCKSTEP_COMMIT outside a checkout."""
    otherwise = os.environ.get("LOCKSTEP_COMMIT") or "unknown"
    if shutil.which("git") is None:
        return otherwise
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or otherwise


def table(title: str, rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table whose first row is the head."""
    head, *body = rows
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body), ""])


def verdict(value: float, target: float, at_most: bool = False) -> str:
    """Return a text with the target and whether it was met."""
    reached, sign = (value <= target, "<=") if at_most else (value >= target, ">=")
    return f"target {sign} {target:g}: {'pass' if reached else 'short'}"


def write_results(folder: Path, name: str, sections: list[tuple[str, dict[str, Any]]], command: str) -> None:
    """Write a Markdown and a JSON file with all results, and the command that makes them."""
    where = machine()
    text = "\n".join(
        [f"# Results of `{command}`", "", as_line(where), "", *(section for section, _ in sections)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    numbers = {key: value for _, values in sections for key, value in values.items()}
    (folder / f"{name}.json").write_text(json.dumps({"machine": where, **numbers}, indent=1) + "\n")
