"""What a step costs by rule: two trainers with a thread each, on data that is there, against each one alone.

    python -m benchmarks.rule_steps

All take turns in the same two processes, which compute at once when each trains alone, too.
"""

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lone import NEVER, ResidentFeed
from benchmarks.measure import medians, table, write_results
from benchmarks.rules import hear
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Layer, resolve
from lockstep.config.rules import settle
from lockstep.launch.ranks import DEADLINE, run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.runs.plan import Plan
from train_funcs import Trainer

N_TRAINERS, N_STEPS, ALONE = 2, 4, "each alone"
NETWORKS: dict[str, dict[str, Any]] = {
    "smallnet": {"model": "smallnet"},
    "resnet20": {"model": "resnet20"},
}
RULES: dict[str, dict[str, Any]] = {
    ALONE: {"devices": ["cpu"], "minibatch": 32},
    "weights": {"rule": "weights"},
    "gradients": {"rule": "gradients"},
    "local, without a meeting": {"rule": "local", "rule_args": {"every": NEVER}},
    "parts: 2": {"parts": 2},
    "parts: 8": {"parts": 8},
    "weights, sync_batch_norm": {"rule": "weights", "sync_batch_norm": True},
}


def make_step(group: Group, keys: dict[str, Any]) -> Callable[[], None]:
    """N_STEPS steps of a trainer, again and again with its first minibatch."""
    both = {"devices": ["cpu"] * N_TRAINERS, "minibatch": 64, "data_folder": "data/digits"}
    fixed = {"para_load": False, "print_freq": NEVER, "learning_rate": 1e-6}
    config, _ = settle(resolve([Layer("benchmark", {**both, **fixed, **keys})])[0])
    launcher, theirs = multiprocessing.Pipe()
    threading.Thread(target=hear, args=(theirs,), daemon=True).start()
    control = Pipe(launcher, "the launcher", DEADLINE)
    trainer = Trainer(Plan(config, Path(), None), group, None, control, StatusBoard.create())
    trainer.begin_epoch()
    trainer.feed.next()
    trainer.feed = ResidentFeed(trainer.feed.batch())

    def step() -> None:
        for _ in range(N_STEPS):
            trainer.train_step(NEVER)

    return step


def measure(rank: int, pipes: dict[int, Pipe], network: str) -> dict[str, float]:
    """Seconds a step."""
    torch.set_num_threads(1)
    together, alone = Group.on_one_host(rank, pipes), Group.on_one_host(0, {})
    functions: dict[str, Callable[[], object]] = {}
    for name, keys in RULES.items():
        if network != "resnet20" and "sync_batch_norm" in keys:
            continue
        step = make_step(alone if name == ALONE else together, {**NETWORKS[network], **keys})

        def begin_together(step: Callable[[], None] = step) -> None:
            together.barrier("all begin")
            step()

        functions[name] = begin_together
    return {name: seconds / N_STEPS for name, seconds in medians(functions, rounds=9).items()}


def run() -> tuple[str, dict[str, Any]]:
    """The table and the numbers."""
    rows: list[tuple[str, ...]] = [("network", "rule", "ms a step", "of a trainer alone")]
    numbers: dict[str, Any] = {}
    for network in NETWORKS:
        found = run_ranks(measure, N_TRAINERS, network)[0]
        numbers[f"rule_steps_{network}"] = found
        for name, seconds in found.items():
            rows.append((network, name, f"{seconds * 1e3:.2f}", f"{seconds / found[ALONE]:.2f} x"))
    return table("A step by rule: 2 trainers, 32 pictures and one thread each", rows), numbers


if __name__ == "__main__":
    section = run()
    print(section[0])
    write_results(Path("docs/results"), "rule_steps", [section], "python -m benchmarks.rule_steps")
