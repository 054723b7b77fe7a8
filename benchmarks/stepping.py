"""Is loading hidden? The step on real data from a loader process, against the step on data that is already
there.

One trainer with one thread, so that on a machine with two cores the loader has a core.
AlexNet at batch 16, and the digits' net at batch 32.
"""

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.augmenting import make_folder
from benchmarks.measure import table
from lockstep.config import Config, Layer, resolve
from lockstep.feed import Feed, LoaderFeed
from lockstep.group import Group, World
from lockstep.loading import Batch
from lockstep.messages import Order, Stop, Subtract
from lockstep.order import minibatches
from lockstep.pipes import Pipe
from lockstep.plan import Plan
from lockstep.ranks import DEADLINE
from lockstep.status import StatusBoard
from proc_load import run_loader
from train_funcs import Trainer


class ResidentFeed(Feed):
    """The same batch again and again: what a step costs when loading costs nothing."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def next(self) -> Order:
        return self._batch.order

    def batch(self) -> Batch:
        return self._batch

    def release(self) -> None:
        """It stays."""

    def close(self) -> None:
        """Nothing to end."""


def measure(config: Config, n_steps: int) -> dict[str, float]:
    """Seconds per step with each feed: the median over blocks of steps, the feeds taking turns."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=load, args=(theirs, config), daemon=True).start()
    theirs.close()
    control, launcher = multiprocessing.Pipe()
    plan = Plan(config, Path("."), None)
    trainer = Trainer(
        plan, Group.on_one_host(0, {}), None, Pipe(control, "launcher", DEADLINE), StatusBoard.create()
    )
    trainer.begin_epoch()
    ring = trainer.backend.make_ring(config, config.n_slots, trainer.program.crop_size, trainer.dataset.mean)
    pipe = Pipe(ours, "loader 0", DEADLINE)
    pipe.send(Subtract(None))
    loaded = LoaderFeed(pipe, ring, endless(len(trainer.dataset.train), config.batch_size))
    loaded.next()
    resident = ResidentFeed(copy_of(loaded.batch()))
    loaded.release()

    def block(feed: Feed) -> float:
        while launcher.poll():  # ticks that nobody wants to see
            launcher.recv()
        return steps(trainer, feed, n_steps)

    seconds = measure_blocks({"loaded": lambda: block(loaded), "resident": lambda: block(resident)})
    pipe.send(Stop())
    return seconds


def measure_blocks(feeds: dict[str, Callable[[], float]], rounds: int = 7) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in feeds}
    for number in range(rounds + 1):
        for name, block in feeds.items():
            seconds = block()
            if number:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def steps(trainer: Trainer, feed: Feed, n_steps: int) -> float:
    """Seconds per step, not counting the first ones, for which the ring was full in advance."""
    trainer.feed = feed
    for _ in range(trainer.config.n_slots):
        trainer.train_step(n_steps)
    begin = time.perf_counter()
    for _ in range(n_steps):
        trainer.train_step(n_steps)
    return (time.perf_counter() - begin) / n_steps


def endless(n_samples: int, size: int) -> Iterator[Order]:
    """Training orders of full minibatches, epoch after epoch."""
    for epoch in itertools.count(1):
        for step, (start, stop) in enumerate(minibatches(n_samples // size * size, size), 1):
            yield Order("train", epoch, step, start, stop, start, stop)


def load(connection: Any, config: Config) -> None:
    """The loader process, without a launcher."""
    control, _keep_open = multiprocessing.Pipe()
    run_loader(
        Pipe(control, "launcher", DEADLINE), StatusBoard.create(), connection, World.on_one_host(1)[0], config
    )


def copy_of(batch: Batch) -> Batch:
    return Batch(batch.order, batch.images.clone(), batch.labels.clone(), batch.samples.clone())


def run() -> tuple[str, dict[str, Any]]:
    """The table and the numbers."""
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
            values = {"model": model, "devices": ["cpu"], "print_freq": 10**6, "para_load": False}
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


if __name__ == "__main__":
    print(run()[0])
