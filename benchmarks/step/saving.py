"""The time for which a checkpoint delays a trainer's next step, beside one copy of its arena."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measure import medians, table, verdict
from lockstep.comm.group import World
from lockstep.config import Layer, resolve
from lockstep.memory.host import HostMemory
from lockstep.network.replica import Replica
from lockstep.runs import checkpoint
from lockstep.runs.plan import RunPlan
from lockstep.runs.state import State
from lockstep.trainer.saving import Saver

ROUNDS = 5
NAMES = {
    "copy": "one copy of the arena, into memory that is kept",
    "pause": "saving behind the training: what a step waits for",
    "new": "one copy of the arena, into new memory",
    "digests": "comparing replicas before, with several trainers: digests of all tensors",
    "written": "until the file is on the disk",
    "before": "saving before the next step, for comparison",
}


class DiscardingReporter:
    """A stand-in for a trainer's progress reporter."""

    def send(self, message: object) -> None:
        """Discard the message."""


def measure(folder: Path, model: str, picture: int) -> dict[str, float]:
    """Return the seconds of each of NAMES: the median over rounds of turns, after a warm-up."""
    (folder / "checkpoints").mkdir(parents=True)
    config = resolve([Layer("benchmark", {"model": model, "devices": ["cpu"], "keep_checkpoints": 1})])[0]
    shape = (picture, picture, 3)
    dataset = SimpleNamespace(n_classes=1000, image_shape=shape, train=range(10**7), digest="")
    replica = Replica(config, dataset, HostMemory())  # type: ignore[arg-type]
    (world,) = World.on_one_host(1)
    saver = Saver(RunPlan(config, folder, None), replica, DiscardingReporter(), dataset, world=world)  # type: ignore[arg-type]
    arena, room = replica.arena, torch.zeros_like(replica.arena.flat, device="cpu")
    state = State.now(1, 10**6, 10**7, 0.1, [], 1, config)
    implementations: dict[str, Callable[[], object]] = {
        "copy": lambda: room.copy_(arena.flat),
        "pause": lambda: saver.save(1, 10, [], {}),
        "written": saver.finish,
        "new": arena.flat.clone,
        "digests": arena.digests,
        "before": lambda: checkpoint.save(folder, arena.state(), state),
    }
    found = medians(implementations, ROUNDS)
    return {**found, "bytes": float(arena.flat.nbytes), "ratio": found["pause"] / found["copy"]}


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    rows: list[tuple[str, ...]] = [("what", "arena, MB", "ms", "copies of the arena", "")]
    numbers: dict[str, Any] = {}
    torch.set_num_threads(1)
    for model, picture in (("smallnet", 36), ("alexnet", 256)):
        with tempfile.TemporaryDirectory() as folder:
            found = numbers[f"saving_{model}"] = measure(Path(folder), model, picture)
        for key, name in NAMES.items():
            ratio = found[key] / found["copy"]
            row = name, f"{found['bytes'] / 1e6:,.1f}", f"{found[key] * 1e3:.2f}", f"{ratio:.2f}"
            rows.append((*row, verdict(found["ratio"], 1.0, at_most=True) if key == "pause" else ""))
    return table("A checkpoint: smallnet and AlexNet, momenta too; one thread", rows), numbers
