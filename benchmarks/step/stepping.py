"""A step on data from a loader process beside a step on a resident batch, which shows if loading is hidden.

One trainer uses one thread, so that on two cores the loader has its own. The networks are AlexNet with
batches of 16 and the digits' network with batches of 32. AlexNet's step also takes turns with one in plain
PyTorch (benchmarks/peers).
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading.augmenting import make_folder
from benchmarks.lone import NEVER, LoneTrainer
from benchmarks.measure import table, verdict
from benchmarks.peers.contender import BATCH
from benchmarks.peers.duel import columns, duel
from lockstep.config import Config, Layer, resolve
from lockstep.loading.feed import Feed

# our precision, the peer's, the ratio aimed at (None: no target)
STOCK = (("fp32", "fp32", 1.5), ("bf16", "bf16", 2.6), ("bf16", "fp32", None))


def measure(config: Config, n_steps: int) -> dict[str, float]:
    """Return the seconds per step with each feed: the median over blocks of steps, in turns."""
    torch.set_num_threads(1)
    lone = LoneTrainer(config)
    feeds = {"loaded": lone.loaded, "resident": lone.resident}
    seconds = measure_blocks({name: partial(steps, lone, feed, n_steps) for name, feed in feeds.items()})
    lone.close()
    return seconds


def measure_blocks(feeds: dict[str, Callable[[], float]], rounds: int = 7) -> dict[str, float]:
    """Return the median of what each function returns. They take turns; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in feeds}
    for number in range(rounds + 1):
        for name, block in feeds.items():
            seconds = block()
            if number:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def steps(lone: LoneTrainer, feed: Feed, n_steps: int) -> float:
    """Return the seconds per step after the first steps, for which the ring was already full."""
    lone.use(feed)
    for _ in range(lone.config.n_slots):
        lone.step()
    begin = time.perf_counter()
    for _ in range(n_steps):
        lone.step()
    return (time.perf_counter() - begin) / n_steps


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    loading, numbers = run_loading()
    stock, more = run_stock()
    return f"{loading}\n{stock}", numbers | more


def run_stock(repeats: int = 5) -> tuple[str, dict[str, Any]]:
    """Compare AlexNet's step in both precisions with stock PyTorch in the same and in float32."""
    rows: list[tuple[str, ...]] = [("ours", "peer", "ours, ms", "peer, ms", "ratio", "of processor time", "")]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision, peer, aim in STOCK:
            ours, theirs = f"Lockstep, AlexNet {precision}", f"stock PyTorch, AlexNet {peer}"
            found = numbers[f"{ours} / {theirs}"] = duel(ours, theirs, 2, repeats, folder)
            rows.append(
                (ours, theirs, *columns(found, ours, theirs), verdict(found["ratio"], aim) if aim else "")
            )
    title = f"AlexNet's step beside plain PyTorch: batch {BATCH}, two threads, in turns; least to most"
    return table(title, rows), numbers


def run_loading() -> tuple[str, dict[str, Any]]:
    """Compare the step with and without a loader process."""
    rows: list[tuple[str, ...]] = [("network", "resident data, ms", "loader process, ms", "ratio")]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "set")
        cases = (
            (
                "alexnet",
                {
                    "data_folder": f"{folder}/set",
                    "n_classes": 1000,
                    "batch_size": 16,
                    "model_args": {"variant": "theano_alexnet"},
                },
                12,
            ),
            ("smallnet", {"data_folder": "data/digits", "batch_size": 32}, 40),
        )
        for model, keys, n_steps in cases:
            values = {"model": model, "devices": ["cpu"], "print_freq": NEVER}
            values |= {
                "learning_rate": 1e-6,
                **keys,
            }  # random labels can't be learned, and nothing is to overflow
            seconds = measure(resolve([Layer("benchmark", values)])[0], n_steps)
            numbers[f"step_seconds_{model}"] = seconds
            ratio = seconds["loaded"] / seconds["resident"]
            milliseconds = [f"{seconds[name] * 1e3:.1f}" for name in ("resident", "loaded")]
            rows.append((f"{model}, batch {keys['batch_size']}", *milliseconds, f"{ratio:.3f}"))
    title = "Step time with and without loading: 1 trainer with one thread, 1 loader on the other core"
    return table(title, rows), numbers
