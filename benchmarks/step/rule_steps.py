"""Whole steps by rule: AlexNet beside DistributedDataParallel, `local`, and `logical_ranks`."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F

from benchmarks.loading.augmenting import make_folder
from benchmarks.lone import NEVER, LoneTrainer
from benchmarks.measure import both_medians, medians, table, verdict
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Layer, resolve
from lockstep.config.rules import settle
from lockstep.launch.ranks import run_ranks
from lockstep.optim.fused import FusedSGD
from models import alexnet

BATCH = 32
ALEXNET: dict[str, Any] = {"model": "alexnet", "model_args": {"variant": "theano_alexnet"}, "n_classes": 1000}
DIGITS = {"model": "smallnet", "data_folder": "data/digits"}
NAMES = {
    "weights": "rule: weights",
    "factors": "rule: gradients, factors, overlap",
    "gradients": "rule: gradients",
    "ddp": "DistributedDataParallel on gloo",
}


def make_step(group: Group, **keys: Any) -> Callable[[], None]:
    """Return the step of a trainer of `group` on a resident batch."""
    common = {"devices": ["cpu"] * group.world.size, "para_load": False, "print_freq": NEVER}
    common |= {"learning_rate": 1e-6, "batch_size": BATCH, "timeout": 600, **keys}
    config, _ = settle(resolve([Layer("benchmark", common)])[0])
    lone = LoneTrainer(config, group)
    lone.use(lone.resident)
    return lone.step


def make_ddp(store: str, group: Group) -> Callable[[], None]:
    """Return the step of the same network with channels-last images and torch's fused SGD."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=group.world.rank, world_size=group.world.size
    )
    model = alexnet.Model(1000, "theano_alexnet").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = FusedSGD([{"params": list(model.parameters()), "lr": 1e-6, "weight_decay": 5e-4}], 0.9, False)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    images = torch.randn(BATCH, 3, 227, 227).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (BATCH,))

    def step() -> None:
        network.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def measure_alexnet(rank: int, pipes: dict[int, Pipe], folder: str) -> dict[str, tuple[float, float]]:
    """Return the wall and CPU seconds per step, with one thread per rank."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    keys = {**ALEXNET, "data_folder": f"{folder}/set"}
    steps = {
        "weights": make_step(group, rule="weights", **keys),
        "factors": make_step(group, rule="gradients", factors=True, **keys),
        "gradients": make_step(group, rule="gradients", **keys),
        "ddp": make_ddp(f"{folder}/store", group),
    }
    seconds = both_medians(steps, rounds=5)
    torch.distributed.destroy_process_group()
    return seconds


def measure_local(rank: int, pipes: dict[int, Pipe]) -> dict[str, float]:
    """Return the seconds of 40 steps by one trainer, and by `local` between averages."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    local = make_step(group, rule="local", rule_args={"every": NEVER}, **DIGITS)
    single = make_step(Group.on_one_host(0, {}), **DIGITS)

    def block(step: Callable[[], None]) -> None:
        for _ in range(40 if rank == 0 else 0):
            step()

    return medians(
        {
            "alone": lambda: block(single),
            "local": lambda: block(local),
            "rest": lambda: group.barrier("a round"),
        },
        rounds=9,
    )


def measure_parts(rank: int, pipes: dict[int, Pipe]) -> dict[str, float]:
    """Return the seconds per step of 64 images, with one logical rank per trainer and with more."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    keys = {**DIGITS, "rule": "gradients", "global_batch_size": 2 * BATCH}
    steps = {"one": make_step(group, **keys)}
    steps |= {f"parts {n}": make_step(group, logical_ranks=n, **keys) for n in (2, 4, 8)}
    return medians(steps, rounds=21)


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder) / "set")
        whole = run_ranks(measure_alexnet, 2, folder)[0]
    rows: list[tuple[str, ...]] = [
        ("AlexNet, 32 images a trainer", "ms", "of processor time", "factors against it", "")
    ]
    for key, name in NAMES.items():
        (wall, used), ratio = whole[key], whole[key][0] / whole["factors"][0]
        words = verdict(ratio, 1.0) if key in ("weights", "ddp") else ""
        rows.append((name, f"{wall * 1e3:.0f}", f"{used * 1e3:.0f}", f"{ratio:.2f} x", words))
    local, parts = run_ranks(measure_local, 2)[0], run_ranks(measure_parts, 2)[0]
    others: list[tuple[str, ...]] = [("digits' net", "ms a step", "ratio", "")]
    ratio = local["local"] / local["alone"]
    others.append(("one trainer alone, 32 images", f"{local['alone'] / 40 * 1e3:.2f}", "1.00 x", ""))
    words = verdict(ratio, 1.02, at_most=True)
    others.append(
        ("rule: local, without synchronization", f"{local['local'] / 40 * 1e3:.2f}", f"{ratio:.2f} x", words)
    )
    for name, seconds in parts.items():
        words = "rule: gradients, 64 images" if name == "one" else f"... in {name}"
        others.append((words, f"{seconds * 1e3:.2f}", f"{seconds / parts['one']:.2f} x", ""))
    title = "Whole steps by rule, 2 trainers, one thread each"
    text = table(title, rows) + "\n" + table("Steps between synchronizations, and steps in parts", others)
    return text, {"rule_steps": whole, "local": local, "parts": parts}
