"""The experiments of Stooke and Abbeel 2017 (section 6) with ResNet-20 as a torch callable, on CPU ranks.

Batches have 64 images in total or 64 per rank; all_reduce and shuffle are switched on and off; table 1
divides the time of a step. Each figure is relative to a single rank with a batch of 64, measured in turn.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure import table
from benchmarks.synk.functions import N_RANKS, in_turns
from lockstep import synk
from lockstep.synk import callables, calling, team
from models import resnet20

BATCH = 64
N_PICTURES = 2048
ROUNDS = 5


class Training:
    """A network, its data and an SGD step, on all ranks or one; images have `side` rows and columns."""

    def __init__(self, network: torch.nn.Module, n_classes: int, side: int, n_pictures: int) -> None:
        self.net, self.n_pictures = synk.share(network), n_pictures
        optimizer, net = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9), self.net

        def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        def update() -> None:
            optimizer.step()

        self.compute = synk.function(compute, "avg", updates=[synk.grads(self.net)], name="gradient")
        self.update = synk.function(update, None, updates=[synk.weights(self.net)], name="update")
        synk.distribute()
        random = np.random.default_rng(0)
        self.x = random.standard_normal((n_pictures, 3, side, side), np.float32)
        self.y = random.integers(0, n_classes, n_pictures)
        self.data = synk.data(self.x), synk.data(self.y)

    def step(self, n_rows: int, shuffle: bool, all_reduce: bool) -> None:
        self.compute(*self.data, batch=self.choose(n_rows, shuffle))
        if all_reduce:
            synk.all_reduce(synk.grads(self.net))
        self.update()

    def single_step(self, n_rows: int, shuffle: bool) -> None:
        batch = self.choose(n_rows, shuffle)
        self.compute.alone(self.x[batch], self.y[batch])
        self.update.alone()

    def choose(self, n_rows: int, shuffle: bool) -> Any:
        """Return the rows of a batch."""
        return np.random.default_rng(1).permutation(self.n_pictures)[:n_rows] if shuffle else slice(0, n_rows)


def ablations(training: Training) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
    """Return the images per second relative to one rank with a batch of 64."""
    rows: list[tuple[str, ...]] = [("batch", "shuffle", "all_reduce", "x CPU time", "x wall")]
    numbers = {}
    for shuffle in (True, False):
        functions: dict[str, Callable[[], object]] = {"one": lambda s=shuffle: training.single_step(BATCH, s)}
        for n_rows in (BATCH, BATCH * N_RANKS):
            for reduces in (True, False):
                functions[f"{n_rows} {reduces}"] = lambda n=n_rows, s=shuffle, r=reduces: training.step(
                    n, s, r
                )
        found = in_turns(functions, ROUNDS)
        for n_rows in (BATCH, BATCH * N_RANKS):
            for reduces in (True, False):
                cpu, wall = (
                    found["one"][i] / found[f"{n_rows} {reduces}"][i] * n_rows / BATCH for i in (0, 1)
                )
                words = "yes" if shuffle else "no", "yes" if reduces else "no"
                rows.append((f"{n_rows}", *words, f"{cpu:.2f}", f"{wall:.2f}"))
                numbers[f"{n_rows} shuffle {words[0]} all_reduce {words[1]}"] = [cpu, wall]
    return rows, numbers


def split(training: Training, n_steps: int = 10) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return how this rank's time of a step with 64 images per rank divides."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(place: Any, name: str, item: str) -> Callable[[], None]:
        original = getattr(place, name)

        def wrapper(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                seconds[item] += time.perf_counter() - begin

        setattr(place, name, wrapper)
        return lambda: setattr(place, name, original)

    undo = [
        timed(callables.CallableProgram, "call_whole", "functions"),
        timed(calling._Part, "_excerpt", "shuffle"),
        timed(team.Team, "_collect", "waiting for the slowest, and messages"),
    ]
    reducing = 0.0
    begin = time.perf_counter()
    for _ in range(n_steps):
        training.compute(*training.data, batch=training.choose(BATCH * N_RANKS, True))
        waited, start = seconds["waiting for the slowest, and messages"], time.perf_counter()
        synk.all_reduce(synk.grads(training.net))
        reducing += time.perf_counter() - start
        seconds["waiting for the slowest, and messages"] = waited
        training.update()
    total = time.perf_counter() - begin
    for function in undo:
        function()
    seconds["all_reduce"] = reducing
    seconds["all else"] = total - sum(seconds.values())
    shown = {item: value / n_steps for item, value in seconds.items()}
    rows: list[tuple[str, ...]] = [("item", "ms a step", "share")]
    rows += [(item, f"{value * 1e3:.2f}", f"{value * n_steps / total:.1%}") for item, value in shown.items()]
    return rows, shown


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    torch.set_num_threads(1)
    synk.fork(N_RANKS)
    try:
        torch.manual_seed(0)
        training = Training(resnet20.Model(10), 10, 32, N_PICTURES)
        training.step(BATCH, True, True)
        speeds, numbers = ablations(training)
        parts, seconds = split(training)
    finally:
        synk.close()
    title = f"ResNet-20 on {N_RANKS} CPU ranks, against one rank with a batch of {BATCH}"
    text = table(title, speeds) + "\n" + table("Where a step's time goes, 64 images a rank, shuffled", parts)
    return text, {"ablations": numbers, "split_seconds": seconds}


if __name__ == "__main__":
    print(run()[0])
