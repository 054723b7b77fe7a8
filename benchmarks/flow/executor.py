"""ParallelExecutor: images per second on one to four devices, and a step beside eager torch and DDP.

If there are more devices than cores, they share cores; their rows are marked as oversubscribed.
"""

import copy
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.flow.steps import FLAT_MB, Times, batch, in_turn, make_step, resident
from benchmarks.hosts.sums import free_port
from benchmarks.measure import table, verdict
from lockstep import flow
from lockstep.backends.devices import count_cores
from models import alexnet, resnet20, smallnet

# Images a second and speed-ups of ResNeXt-152 on TitanX, batch 12 a GPU, from Paddle's design document
DOCUMENT = {1: (17.9906, 1.0), 2: (25.771, 1.43247029), 3: (36.911, 2.05168255), 4: (48.8428, 2.71490667)}
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], int, int, int, int]] = {
    "smallnet 2 x 32": (lambda: smallnet.Model(10), 32, 64, 8, 9),  # size, batch, steps a turn, turns
    "ResNet-20 2 x 64": (lambda: resnet20.Model(10), 32, 128, 1, 7),
    "AlexNet 2 x 16": (lambda: alexnet.Model(1000), 227, 32, 1, 4),
    "AlexNet 2 x 4": (lambda: alexnet.Model(1000), 227, 8, 1, 4),  # 61 million gradients, twice
}

TARGETS = {
    "smallnet 2 x 32": (1.3, 1.2),
    "ResNet-20 2 x 64": (1.05, 1.05),
    "AlexNet 2 x 16": (1.0, 1.0),
}  # x eager, x DDP


def loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch."""
    return F.cross_entropy(model(images), labels)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with a rate so small that the weights stay as they are."""
    return torch.optim.SGD(parameters, 1e-6, 0.9, fused=True)


def repeating(made: flow.ParallelExecutor, inputs: Any, n_steps: int) -> Callable[[], object]:
    """Return a function that takes n_steps steps with the same batch."""
    feed = dict(zip(("images", "labels"), inputs, strict=True))
    return lambda: [made.run(feed) for _ in range(n_steps)]


def serve_ddp(rank: int, port: int, name: str, pipe: Connection) -> None:
    """Run a turn of DDP for each message."""
    make, size, n, n_steps, _ = MODELS[name]
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % count_cores()]})
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make())
    step, inputs = make_step(model), batch(size, n // 2, 10)
    pipe.send("ready")
    while pipe.recv():
        for _ in range(n_steps):
            step(*inputs)
        pipe.send(time.process_time())
    dist.destroy_process_group()


class Ddp:
    """Two processes of DDP, which wait between their turns."""

    def __init__(self, name: str) -> None:
        port = free_port()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            self._processes.append(context.Process(target=serve_ddp, args=(rank, port, name, theirs)))
            self._processes[-1].start()
        for pipe in self._pipes:
            pipe.recv()

    def turn(self) -> None:
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(False)
        for process in self._processes:
            process.join()


def measure_against_peers(name: str) -> Times:
    """Return the seconds per step on two devices with a thread each, of eager torch with two, and of DDP."""
    make, size, n, n_steps, rounds = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make(), batch(size, n, 10)
    eager, ddp, devices = make_step(copy.deepcopy(model)), Ddp(name), flow.cpus(2, threads=1)
    try:
        with flow.Engine(devices):
            turns: dict[str, Callable[[], object]] = {
                strategy: repeating(
                    flow.ParallelExecutor(model, loss, sgd, devices, strategy=strategy), inputs, n_steps
                )
                for strategy in ("all_reduce", "reduce")
            }
            turns["eager"] = lambda: [eager(*inputs) for _ in range(n_steps)]
            turns["DDP gloo"] = ddp.turn
            times = in_turn(turns, rounds)
    finally:
        ddp.close()
    return {key: (wall / n_steps, used / n_steps) for key, (wall, used) in times.items()}


def measure_devices(n_steps: int = 6, rounds: int = 5) -> dict[int, float]:
    """Return the images per second of smallnet with 32 images per device, on 1 to 4 devices."""
    torch.manual_seed(0)
    model, found = smallnet.Model(10), {}
    for n in DOCUMENT:
        devices = flow.cpus(n, threads=1)
        with flow.Engine(devices):
            made = flow.ParallelExecutor(model, loss, sgd, devices)
            times = in_turn({"": repeating(made, batch(32, 32 * n, 10), n_steps)}, rounds)
        found[n] = 32 * n * n_steps / times[""][0]
    return found


def measure_memory() -> float:
    """Return the growth over 2,000 steps in MB."""
    devices = flow.cpus(2, threads=1)
    with flow.Engine(devices):
        small = repeating(
            flow.ParallelExecutor(smallnet.Model(10), loss, sgd, devices), batch(32, 4, 10), 100
        )
        for _ in range(3):
            small()
        before = resident()
        for _ in range(20):
            small()
        return resident() - before


def measure_copies() -> dict[str, float]:
    """Return the MB of AlexNet's weights and optimizer state on two devices, counting each memory once."""
    images, labels = batch(227, 2, 1000)
    found = {}
    for strategy in ("all_reduce", "reduce"):
        devices = flow.cpus(2, threads=1)
        with flow.Engine(devices):
            made = flow.ParallelExecutor(alexnet.Model(1000), loss, sgd, devices, strategy=strategy)
            made.run({"images": images, "labels": labels})
            found[strategy] = sum(made.memory().values()) / 1e6
    return found


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    steps = {name: measure_against_peers(name) for name in MODELS}
    rows: list[tuple[str, ...]] = [("ms a step", "all_reduce", "reduce", "eager, 2 threads", "DDP gloo")]
    ratios: list[tuple[str, ...]] = [("the better strategy", "speed-up", "")]
    for name, times in steps.items():
        best = min(times["all_reduce"][0], times["reduce"][0])
        rows.append((name, *(f"{wall * 1e3:.1f}" for wall, _ in times.values())))
        for number, peer in enumerate(("eager", "DDP gloo")):
            ratio = times[peer][0] / best
            aim = verdict(ratio, TARGETS[name][number]) if name in TARGETS else ""
            ratios.append((f"{name} against {peer}", f"{ratio:.2f} x", aim))
    text = [table("ParallelExecutor: 2 devices x 1 thread", rows)]
    text.append(table("ParallelExecutor: against its peers", ratios))

    speeds, cores = measure_devices(), count_cores()
    rows = [("devices", "smallnet, images/s", "speed-up", "document: ResNeXt-152, images/s", "speed-up")]
    for n, speed in speeds.items():
        name = f"{n} (oversubscribed: {cores} cores)" if n > cores else str(n)
        theirs = DOCUMENT[n]
        rows.append(
            (name, f"{speed:.0f}", f"{speed / speeds[1]:.2f}", f"{theirs[0]:.1f}", f"{theirs[1]:.2f}")
        )
    text.append(table("ParallelExecutor: images a second, 32 a device", rows))
    grown, copies = measure_memory(), measure_copies()
    share = copies["reduce"] / copies["all_reduce"]
    rows = [
        ("memory", "", ""),
        ("growth over 2,000 steps, MB", f"{grown:+.1f}", verdict(grown, FLAT_MB, at_most=True)),
        ("AlexNet's weights and momenta on 2 devices, MB", f"{copies['all_reduce']:.1f}", "", ""),
        ("the same with reduce, MB", f"{copies['reduce']:.1f}", "", ""),
        ("that is of the other", f"{share:.3f}", verdict(share, 0.5, at_most=True)),
    ]
    text.append(table("ParallelExecutor: memory", rows))
    numbers = {
        "executor_step_seconds": steps,
        "executor_images": speeds,
        "executor_memory_mb": grown,
        "executor_copies_mb": copies,
    }
    return "\n".join(text), numbers
