"""Two contenders that take turns, each in its own process."""

import os
import subprocess
import sys
from statistics import median
from typing import Any

PROGRAM = [sys.executable, "-m", "benchmarks.peers.contender"]


class Contender:
    """A process that takes steps on request."""

    def __init__(self, name: str, folder: str) -> None:
        command = [*PROGRAM, name]
        pipe, environment = subprocess.PIPE, {**os.environ, "PEERS_FOLDER": folder}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.name = name
        if self._answer() != "ready":
            raise RuntimeError(f"{name} can't begin: see above")

    def take(self, n_steps: int) -> tuple[float, float]:
        """Return the wall and CPU seconds per step."""
        assert self._process.stdin is not None
        print(n_steps, file=self._process.stdin, flush=True)
        wall, used = (float(word) / n_steps for word in self._answer().split())
        return wall, used

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def duel(ours: str, theirs: str, n_steps: int, repeats: int, folder: str) -> dict[str, Any]:
    """Return milliseconds per step of both, in turns (median, least, most), and the median ratio."""
    contenders = [Contender(name, folder) for name in (ours, theirs)]
    laps = [[contender.take(n_steps) for contender in contenders] for _ in range(repeats)]
    for contender in contenders:
        contender.close()
    found: dict[str, Any] = {"ratio": median(peer[0] / mine[0] for mine, peer in laps)}
    found["ratio of processor time"] = median(peer[1] / mine[1] for mine, peer in laps)
    for place, name in enumerate((ours, theirs)):
        walls = sorted(lap[place][0] * 1e3 for lap in laps)
        found[name] = {"ms": median(walls), "least": walls[0], "most": walls[-1]}
    return found


def columns(found: dict[str, Any], ours: str, theirs: str) -> tuple[str, ...]:
    """Return the columns of a duel: milliseconds of both, least to most, and both ratios."""
    times = (found[name] for name in (ours, theirs))
    spans = tuple(f"{time['ms']:.1f} ({time['least']:.1f} to {time['most']:.1f})" for time in times)
    return *spans, f"{found['ratio']:.2f} x", f"{found['ratio of processor time']:.2f} x"
