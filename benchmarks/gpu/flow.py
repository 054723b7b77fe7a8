"""lockstep.flow on GPUs: what a launch costs, ResNet-50's step beside eager torch, what of merging is hidden,
and images a second on one device and more. Two devices of flow on one card count as two.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu import rehearsal
from benchmarks.gpu.lone import PlainTraining, compute_in
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import Turn, take_turns, take_turns_kept
from lockstep import flow
from lockstep.flow import collectives, gpu
from lockstep.flow.gpu import Cuda

PLAIN = "plain PyTorch, same network"
AT_THE_END = 4096  # MiB of one bucket that has all gradients, so that merging begins when backward has ended
Batch = tuple[torch.Tensor, torch.Tensor]
# Rounds, and steps before a turn's clock: a step of two devices on one card takes a fifth of a second.
_FEW = 3


def run(setting: Setting, work: Path, record: Record) -> None:
    setting = replace(setting, n_rounds=min(_FEW, setting.n_rounds), warm_steps=min(_FEW, setting.warm_steps))
    if setting.rehearsal:
        rehearsal.flow_on_the_host()
    place = gpu.torch_device("cuda:0")
    with record.attempt("launches"):
        record.keep("us an operation", launches(place, 50 if setting.rehearsal else 2000))
    with record.attempt("steps"):
        record.keep("steps", steps(setting, place, record))
    with record.attempt("merging"):
        record.keep("merging", merging(setting))
    with record.attempt("devices"):
        record.keep("images_per_second", speeds(setting))


def synchronize() -> None:
    """Wait for all operations of flow and of all GPUs."""
    flow.wait_all()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)


def best(function: Callable[[], object], rounds: int = 5) -> float:
    """Seconds of the fastest of some calls, each from device idle to device idle."""
    found = []
    for _ in range(rounds + 1):
        synchronize()
        begin = time.perf_counter()
        function()
        synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def launches(place: torch.device, n: int) -> dict[str, float]:
    """Microseconds from one small operation to the next that needs it: the gap between their launches."""
    devices, one = [flow.cuda(0), flow.cuda(0)], torch.ones(4)
    resident = one.to(place)

    def line(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = x + 1
        return x

    def ladder(x: torch.Tensor) -> torch.Tensor:
        for number in range(n):
            with flow.device(devices[number % 2]):
                x = x + 1
        return x

    found = {"eager torch": best(lambda: line(resident))}
    with flow.Engine(devices):
        straight, alternating = flow.capture(line, one), flow.capture(ladder, one)
        found["replayed on one lane"] = best(lambda: straight(one))
        for how in ("host", "events"):
            flow.waiting(how)  # type: ignore[arg-type]
            found[f"replayed on two lanes in turn, {how}"] = best(lambda: alternating(one))
    return {name: seconds / n * 1e6 for name, seconds in found.items()}


def network(setting: Setting) -> Any:
    """Return the residual network with seeded weights, channels last."""
    torch.manual_seed(0)
    made = importlib.import_module(f"models.{setting.residual_model}").Model(setting.n_classes)
    return made.to(memory_format=torch.channels_last)


def batch(setting: Setting, n: int) -> Batch:
    """Return n random images in bfloat16, channels last, and their labels."""
    size = setting.picture // 32 * 28
    images = torch.randn(n, 3, size, size, dtype=torch.bfloat16)
    return images.to(memory_format=torch.channels_last), torch.randint(0, setting.n_classes, (n,))


def loss(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch under autocast to bfloat16."""
    with torch.autocast(images.device.type, torch.bfloat16):
        return F.cross_entropy(model(images), labels)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the fused SGD that all ways use."""
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, weight_decay=0.0005, fused=True)


class Training:
    """ParallelExecutor's step on devices of its own, each with its part of a batch in its memory."""

    def __init__(self, setting: Setting, numbers: Sequence[int], n_each: int, **keys: Any) -> None:
        devices = [flow.cuda(number) for number in numbers]
        self.engine = flow.Engine(devices)
        self.executor = flow.ParallelExecutor(network(setting), loss, sgd, devices, **keys)
        self._feed = []
        for device in devices:
            with flow.device(device):
                images, labels = (flow.array(part) for part in batch(setting, n_each))
            self._feed.append({"images": images, "labels": labels})

    def step(self) -> None:
        self.executor.run(self._feed)

    def turn(self) -> Turn:
        return Turn(lambda: None, self.step)


def steps(setting: Setting, place: torch.device, record: Record) -> dict[str, dict[str, float]]:
    """A batch by eager torch, by flow on one device, and by two devices that share the card."""
    n = setting.batch_size
    images, labels = batch(setting, n)
    compute_in(None, place)
    plain = PlainTraining(network(setting), images.to(place), labels.to(place))
    ours = {
        "flow, 1 device": Training(setting, [0], n),
        "flow, 2 devices on one card": Training(setting, [0, 0], n // 2),
    }
    turns = {PLAIN: plain.turn(), **{name: training.turn() for name, training in ours.items()}}
    try:
        return take_turns_kept(turns, synchronize, setting, record)
    finally:
        for training in ours.values():
            training.engine.close()


def pair() -> list[int]:
    """Two GPUs, or one twice."""
    return [0, 1 if torch.cuda.is_available() and torch.cuda.device_count() > 1 else 0]


def merging(setting: Setting) -> dict[str, float]:
    """Milliseconds of a step that merges beside backward, of one that merges at its end, of merging only."""
    n = setting.batch_size // 2
    ours = {
        "beside backward": Training(setting, pair(), n),
        "at its end": Training(setting, pair(), n, bucket_mb=AT_THE_END),
    }
    try:
        turns = {name: training.turn() for name, training in ours.items()}
        found = {name: f["ms"] for name, f in take_turns(turns, synchronize, setting).items()}
    finally:
        for training in ours.values():
            training.engine.close()
    found["alone"] = merging_only(setting) * 1e3
    found["share hidden"] = (found["at its end"] - found["beside backward"]) / found["alone"]
    return found


def merging_only(setting: Setting) -> float:
    """Return the seconds of merging the gradients of two GPUs, without a step."""
    devices: list[Cuda] = [flow.cuda(number) for number in pair()]
    shapes = [p.shape for p in network(setting).parameters()]
    with flow.Engine(devices):
        parts = []
        for device in devices:
            with flow.device(device):
                parts.append([flow.ones(shape) for shape in shapes])
        return best(lambda: collectives.reduce(parts, devices[0], in_all=True))


def speeds(setting: Setting) -> dict[str, float]:
    """Images a second, half a batch a device."""
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 1
    n, found = setting.batch_size // 2, {}
    for numbers in [[0], *([*range(k)] for k in range(2, cards + 1))] if cards > 1 else ([0], [0, 0]):
        training = Training(setting, numbers, n)
        try:
            timed = take_turns({"": training.turn()}, synchronize, setting)
        finally:
            training.engine.close()
        name = f"{len(numbers)}" if len(set(numbers)) == len(numbers) else f"{len(numbers)}, on one card"
        found[name] = n * len(numbers) / timed[""]["ms"] * 1e3
    return found
