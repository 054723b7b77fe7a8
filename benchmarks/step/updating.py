"""The update from gradients to new weights: AlexNet's 61 M parameters with SGD, by rule and by gloo.

One more algorithm, which is no rule, averages only the momenta; each trainer then updates all weights.
"""

import os
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from benchmarks.measure import medians, table, verdict
from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Layer, resolve
from lockstep.exchange.host import HostTransport
from lockstep.exchange.reduction import CHUNK
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory
from lockstep.network.optimizer import ShardedUpdater
from lockstep.network.replica import Replica
from lockstep.optim.fused import FusedSGD
from lockstep.sync import Rule, StepBarrier
from lockstep.sync.factory import make_rule

RULES = ("weights", "gradients")
# times the rule weights, and gloo with torch's fused SGD, by number of trainers
AIMS = {2: (1.6, 3.5), 4: (1.8, 3.5)}


def set_up(rule: str, group: Group, **others: Any) -> tuple[Replica, Rule]:
    """Return a replica of AlexNet and its rule."""
    keys = {"model": "alexnet", "devices": ["cpu"] * group.world.size, "rule": rule, **others}
    config, memory = resolve([Layer("benchmark", keys)])[0], HostMemory()
    replica = Replica(config, SimpleNamespace(n_classes=1000, image_shape=(256, 256, 3)), memory)  # type: ignore[arg-type]
    arena = replica.arena
    transport = HostTransport.open(arena.block, "f4", len(arena.flat), group)
    made = make_rule(config, replica, transport, {})
    replica.begin_epoch(1, 100, 1e-6)
    return replica, made


def make_momenta(group: Group, n_elements: int) -> Callable[[], None]:
    """Return the fastest step by averaged momenta: one tensor, in pieces that stay in the cache.

    v = 0.9 v + gradient + decay w, in every trainer; the mean of all v; w -= rate v, in every trainer.
    """
    block = HostMemory().allocate(4 * n_elements, "momenta")
    momenta, weights, gradients = block.tensor(torch.float32, (n_elements,)), *torch.ones(2, n_elements)
    transport = HostTransport.open(block, "f4", n_elements, group)
    pieces = list(zip(*(flat.split(CHUNK) for flat in (momenta, weights, gradients)), strict=True))

    def step() -> None:
        for momentum, weight, gradient in pieces:
            momentum.mul_(0.9).add_(gradient).add_(weight, alpha=5e-4)
        transport.all_reduce((0, n_elements), "mean")
        weights.add_(momenta, alpha=-1e-6)

    return step


def measure(rank: int, pipes: dict[int, Pipe], store: str) -> dict[str, float]:
    """Return the seconds of each algorithm, and bytes of state, with one thread per rank."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    (weights_replica, weights), (gradients_replica, gradients) = (set_up(rule, group) for rule in RULES)
    given = {value: torch.ones_like(value) for value in weights_replica.model.parameters()}

    def by_weights() -> None:
        for parameter, gradient in given.items():
            parameter.grad = gradient
        weights.update(
            weights_replica.optimizer, StepBarrier(group, Order("train", 1, 1, 0, 1, 0, 1), None, str)
        )

    def by_gradients() -> None:
        gradients.update(
            gradients_replica.optimizer, StepBarrier(group, Order("train", 1, 1, 0, 1, 0, 1), None, str)
        )

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=group.world.size
    )
    n_elements = weights_replica.arena.n_weights
    flat, momentum = torch.zeros(n_elements), torch.zeros(n_elements)
    flat.grad = torch.ones(n_elements)
    plain = FusedSGD([{"params": [flat], "lr": 1e-6, "weight_decay": 5e-4}], 0.9, False)
    plain.state[flat]["momentum_buffer"] = momentum

    def by_gloo() -> None:
        torch.distributed.all_reduce(flat.grad)
        flat.grad.div_(group.world.size)
        plain.step()

    implementations = {
        "weights": by_weights,
        "momenta": make_momenta(group, n_elements),
        "gradients": by_gradients,
    }
    seconds = medians({**implementations, "gloo": by_gloo}, rounds=7)
    torch.distributed.destroy_process_group()
    return {**seconds, "state": share_of_state(gradients_replica)}


def share_of_state(replica: Replica) -> float:
    """Return the share of the optimizer state that this trainer holds."""
    assert isinstance(replica.optimizer, ShardedUpdater)
    kinds = replica.optimizer.state.values()
    n_own = sum(values.numel() for pieces in kinds for values in pieces.values())
    return n_own / (len(kinds) * replica.arena.n_weights)


def measure_adamw(rank: int, pipes: dict[int, Pipe]) -> float:
    """Return this trainer's share of AdamW's state."""
    return share_of_state(set_up("gradients", Group.on_one_host(rank, pipes), optimizer="adamw")[0])


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    names = {
        "weights": "rule: weights",
        "momenta": "momenta averaged alone, no rule",
        "gradients": "rule: gradients",
        "gloo": "gloo's all-reduce, torch's fused SGD",
    }
    rows: list[tuple[str, ...]] = [("what", "trainers", "ms", "against gloo", "state of a trainer", "")]
    numbers: dict[str, Any] = {}
    for n_trainers in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(measure, n_trainers, os.path.join(folder, "store"))[0]
        numbers[f"updating_{n_trainers}"] = found
        for key, name in names.items():
            ratio, share = found["gloo"] / found[key], found["state"] if key == "gradients" else 1.0
            row = name, str(n_trainers), f"{found[key] * 1e3:.0f}", f"{ratio:.1f} x", f"{share:.2f}"
            rows.append((*row, _verdicts(n_trainers, found) if key == "gradients" else ""))
        shares = numbers[f"adamw_state_{n_trainers}"] = run_ranks(measure_adamw, n_trainers)
        words = f"target 1/{n_trainers}: {'pass' if max(shares) <= 1.01 / n_trainers else 'short'}"
        rows.append(("rule: gradients, AdamW", str(n_trainers), "", "", f"{max(shares):.2f}", words))
    title = "Optimizer and exchange: AlexNet's 61 M parameters, SGD with momentum, one thread a trainer"
    return table(title, rows), numbers


def _verdicts(n_trainers: int, found: dict[str, float]) -> str:
    of_weights, of_gloo = (found[name] / found["gradients"] for name in ("weights", "gloo"))
    aims = AIMS[n_trainers]
    text = f"{of_weights:.2f} x weights: {verdict(of_weights, aims[0])}"
    text += f"; {of_gloo:.1f} x gloo: {verdict(of_gloo, aims[1])}"
    return f"{text}; {found['momenta'] / found['gradients']:.2f} x momenta alone"
