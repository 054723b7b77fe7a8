"""Compare all contenders in turns: python -m benchmarks.peers, or make bench-peers.

The table of ratios and targets is printed and written to docs/results/peers.md and .json.
"""

import argparse
import importlib.util
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import table, verdict, write_results
from benchmarks.peers import pair
from benchmarks.peers.contender import BATCH
from benchmarks.peers.duel import columns, duel

# ours, a peer, the ratio aimed at (None: no target), steps of a turn
_DUELS = (
    ("Lockstep, AlexNet fp32", "stock PyTorch, AlexNet fp32", 1.5, 2),
    ("Lockstep, AlexNet bf16", "stock PyTorch, AlexNet bf16", 2.6, 3),
    ("Lockstep, AlexNet fp32", "torchvision's AlexNet fp32", None, 2),
    ("Lockstep, AlexNet bf16", "torchvision's AlexNet bf16", None, 3),
    ("Lockstep, digits", "DataLoader on JPEGs, digits", None, 20),
    ("Lockstep, digits", "hickle.load as theano_alexnet, digits", None, 20),
)


def pairs(repeats: int, folder: str) -> dict[str, Any]:
    """Return the images per second of two trainers and of DistributedDataParallel, in turns."""
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
            met = verdict(found["ratio"], aim) if aim else ""
            rows.append((ours, theirs, *columns(found, ours, theirs), met))
        found = numbers["two processes, digits"] = pairs(words.repeats, folder)
    section = table(f"The same network, data and batch of {BATCH}, in turns; least to most", rows)
    rates = f"{found['Lockstep']:,.0f} images/s, {found['DistributedDataParallel']:,.0f}"
    section += f"\nTwo processes, digits, {2 * BATCH} images a step: Lockstep with two loaders, and "
    section += f"DistributedDataParallel on gloo without loading: {rates}: {found['ratio']:.2f} x.\n"
    print(section)
    write_results(words.results, "peers", [(section, numbers)], "make bench-peers")


if __name__ == "__main__":
    main()
