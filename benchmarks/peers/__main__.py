"""Compares all contenders in turns: python -m benchmarks.peers, or make bench-peers.

Prints a table with ratios, targets, and whether each is met; keeps it in docs/results/peers.md and .json.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import table, verdict, write_results
from benchmarks.peers import pair
from benchmarks.peers.contender import BATCH

PROGRAM = [sys.executable, "-m", "benchmarks.peers.contender"]
# ours, a peer, the ratio aimed at (None: no target), steps of a turn
_DUELS = (
    ("Lockstep, AlexNet fp32", "stock PyTorch, AlexNet fp32", 1.5, 2),
    ("Lockstep, AlexNet bf16", "stock PyTorch, AlexNet bf16", 2.6, 3),
    ("Lockstep, AlexNet fp32", "torchvision's AlexNet fp32", None, 2),
    ("Lockstep, AlexNet bf16", "torchvision's AlexNet bf16", None, 3),
    ("Lockstep, digits", "DataLoader on JPEGs, digits", None, 20),
    ("Lockstep, digits", "hickle.load as theano_alexnet, digits", None, 20),
)


class Contender:
    """A process that takes steps when it is told to."""

    def __init__(self, name: str, folder: str) -> None:
        command = [*PROGRAM, name]
        pipe, environment = subprocess.PIPE, {**os.environ, "PEERS_FOLDER": folder}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.name = name
        if self._answer() != "ready":
            raise RuntimeError(f"{name} can't begin: see above")

    def take(self, n_steps: int) -> tuple[float, float]:
        """Seconds a step: by the clock, and of its processor time."""
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
    """Milliseconds a step of both, in turns: medians, least and most; the ratio's median over the repeats."""
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


def pairs(repeats: int, folder: str) -> dict[str, Any]:
    """Images a second of two trainers and of DistributedDataParallel, in turns."""
    rates = [(pair.lockstep(Path(folder), n), pair.ddp(Path(folder), n)) for n in range(repeats)]
    mine, theirs = (median(column) for column in zip(*rates, strict=True))
    return {"Lockstep": mine, "DistributedDataParallel": theirs, "ratio": median(a / b for a, b in rates)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    words = parser.parse_args()
    rows: list[tuple[str, ...]] = [("ours", "peer", "ours, ms", "peer, ms", "ratio", "of processor time", "")]
    numbers: dict[str, Any] = {"repeats": words.repeats, "batch": BATCH}
    with tempfile.TemporaryDirectory() as folder:
        for ours, theirs, aim, n_steps in _DUELS:
            if "torchvision" in theirs and importlib.util.find_spec("torchvision") is None:
                numbers[theirs] = "not measured: torchvision is not here"
                continue
            found = numbers[f"{ours} / {theirs}"] = duel(ours, theirs, n_steps, words.repeats, folder)
            rows.append(
                (ours, theirs, *_columns(found, ours, theirs), verdict(found["ratio"], aim) if aim else "")
            )
        found = numbers["two processes, digits"] = pairs(words.repeats, folder)
    section = table(f"The same network, data and batch of {BATCH}, in turns; least to most", rows)
    rates = f"{found['Lockstep']:,.0f} images/s, {found['DistributedDataParallel']:,.0f}"
    section += f"\nTwo processes, digits, {2 * BATCH} pictures a step: Lockstep with two loaders, and "
    section += f"DistributedDataParallel on gloo without loading: {rates}: {found['ratio']:.2f} x.\n"
    print(section)
    write_results(words.results, "peers", [(section, numbers)], "make bench-peers")


def _columns(found: dict[str, Any], ours: str, theirs: str) -> tuple[str, ...]:
    times = (found[name] for name in (ours, theirs))
    spans = tuple(f"{time['ms']:.1f} ({time['least']:.1f} to {time['most']:.1f})" for time in times)
    return *spans, f"{found['ratio']:.2f} x", f"{found['ratio of processor time']:.2f} x"


if __name__ == "__main__":
    main()
