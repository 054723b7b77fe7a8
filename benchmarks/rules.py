"""What rules learn on real pictures: the digits, 4 trainers, 64 pictures a step, several seeds.

    python -m benchmarks.rules            five seeds (make rules)
    python -m benchmarks.rules 2          two

Momentum SGD, cosine, 14 epochs of 23 steps, the quick start's net. Error and loss are of the last epoch's
validation, the mean over seeds and its standard error; bytes and seconds are trainer 0's, by epoch.
"""

import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import table, write_results
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, Layer, resolve
from lockstep.config.rules import settle
from lockstep.launch.ranks import DEADLINE, run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.runs.plan import Plan
from train_funcs import Trainer

N_TRAINERS, N_EPOCHS, SEEDS = 4, 14, 5
KEYS: dict[str, Any] = {"data_folder": "data/digits", "learning_rate": 0.02, "lr_policy": "cosine"}
RULES: dict[str, dict[str, Any]] = {
    "weights": {"rule": "weights"},
    "gradients": {"rule": "gradients"},
    "local, every 4": {"rule": "local", "rule_args": {"every": 4}},
    "local, every 16": {"rule": "local", "rule_args": {"every": 16}},
    "local, every 16 from epoch 7": {"rule": "local", "rule_args": {"every": 16, "from_epoch": 7}},
    "outer, every 16": {"rule": "outer", "rule_args": {"every": 16}},
    "elastic, every 4": {"rule": "elastic", "rule_args": {"every": 4}},
    "gossip, every 1": {"rule": "gossip"},
    "gossip, every 4": {"rule": "gossip", "rule_args": {"every": 4}},
}


def train(rank: int, pipes: dict[int, Pipe], config: Config) -> dict[str, float]:
    """The last validation, and bytes and seconds by epoch."""
    torch.set_num_threads(1)
    launcher, _keep_open = multiprocessing.Pipe()
    control = Pipe(launcher, "the launcher", DEADLINE)
    plan = Plan(config, Path(), None)  # nothing is written
    trainer = Trainer(plan, Group.on_one_host(rank, pipes), None, control, StatusBoard.create())
    n_bytes, begin = 0, time.perf_counter()
    for _ in range(N_EPOCHS):
        trainer.begin_epoch()
        while trainer.position < len(trainer.dataset.train):
            trainer.train_step(sys.maxsize)  # so long an epoch that nothing is printed before print_freq
            n_bytes, trainer.recorder.n_bytes = n_bytes + trainer.recorder.n_bytes, 0
        with trainer.rule.as_one():
            trainer.validate()
        trainer.epoch, trainer.position = trainer.epoch + 1, 0
    last = trainer.val_record[-1]
    seconds = time.perf_counter() - begin
    return {**last, "bytes": n_bytes / N_EPOCHS, "seconds": seconds / N_EPOCHS}


def learn(keys: dict[str, Any], seed: int) -> dict[str, float]:
    run = {"devices": ["cpu"] * N_TRAINERS, "para_load": False, "minibatch": 64, "n_epochs": N_EPOCHS}
    run |= {"seed": seed, "print_freq": 10**6, "rand_mirror": False}
    config, _ = settle(resolve([Layer("benchmark", {**KEYS, **run, **keys})])[0])
    first: dict[str, float] = run_ranks(train, N_TRAINERS, config)[0]
    return first


def with_error(values: list[float], scale: float, digits: int) -> str:
    """Their mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} +- {scale * error:.{digits}f}"


def run(n_seeds: int) -> tuple[str, dict[str, Any]]:
    """The table and the numbers. Rules take turns, so that a busy machine is busy for all."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in RULES}
    for seed in range(n_seeds):
        for name, keys in RULES.items():
            found[name].append(learn(keys, seed))
            print(f"seed {seed}, {name}: error {found[name][-1]['error_top1']:.2%}", flush=True)
    rows: list[tuple[str, ...]] = [("rule", "error in %", "loss", "MB an epoch", "seconds an epoch")]
    for name, results in found.items():
        error, loss = ([result[key] for result in results] for key in ("error_top1", "loss"))
        size, seconds = (statistics.median(result[key] for result in results) for key in ("bytes", "seconds"))
        row = name, with_error(error, 100, 2), with_error(loss, 1, 3), f"{size / 1e6:.1f}", f"{seconds:.2f}"
        rows.append(row)
    title = f"Rules: the digits' net, {N_TRAINERS} trainers, {N_EPOCHS} epochs, {n_seeds} seeds"
    return table(title, rows), {f"rules: {name}": results for name, results in found.items()}


if __name__ == "__main__":
    section = run(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
    print(section[0])
    write_results(Path("docs/results"), "rules", [section], "python -m benchmarks.rules")
