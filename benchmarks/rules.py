"""Validation error of each rule on real images: 4 trainers, 64 images per step, several seeds.

    python -m benchmarks.rules            five seeds (make rules)
    python -m benchmarks.rules 2          two

The quick start's network trains with momentum SGD and a cosine schedule: on the digits for 14 epochs of 23
steps, and on Fashion-MNIST for 2 epochs of 938 steps if data/fashion_mnist is a dataset folder. Error and
loss are those of the last validation, as mean and standard error over seeds. Bytes and seconds are trainer
0's per epoch, the least over all seeds. A journal beside the results resumes an interrupted run.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lone import UnlaunchedTrainer
from benchmarks.measure import table, write_results
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, Layer, resolve
from lockstep.config.rules import settle
from lockstep.launch.ranks import run_ranks

N_TRAINERS, SEEDS = 4, 5
RESULTS = Path("docs/results")
JOURNAL = RESULTS / "rules.unfinished.jsonl"
DATASETS = {
    "the digits": ("data/digits", 14),
    "Fashion-MNIST": ("data/fashion_mnist", 2),
}  # with their epochs
KEYS: dict[str, Any] = {"learning_rate": 0.02, "lr_policy": "cosine", "global_batch_size": 64}
RULES: dict[str, dict[str, Any]] = {
    "weights": {"rule": "weights"},
    "gradients": {"rule": "gradients"},
    "local, every 4": {"rule": "local", "rule_args": {"every": 4}},
    "local, every 16": {"rule": "local", "rule_args": {"every": 16}},
    "local, every 16 in the second half": {"rule": "local", "rule_args": {"every": 16, "from_epoch": 0.5}},
    "outer, every 16": {"rule": "outer", "rule_args": {"every": 16}},
    "elastic, every 4": {"rule": "elastic", "rule_args": {"every": 4}},
    "gossip, every 1": {"rule": "gossip"},
    "gossip, every 4": {"rule": "gossip", "rule_args": {"every": 4}},
}
Results = dict[tuple[str, str, int], dict[str, float]]  # by dataset, rule and seed


def train(rank: int, pipes: dict[int, Pipe], config: Config) -> dict[str, float]:
    """Return the last validation, and bytes, seconds and CPU seconds per epoch."""
    torch.set_num_threads(1)
    trainer = UnlaunchedTrainer(config, Group.on_one_host(rank, pipes))
    n_bytes, begin, begin_cpu = 0, time.perf_counter(), time.process_time()
    for _ in range(config.n_epochs):
        trainer.begin_epoch()
        while trainer.position < len(trainer.dataset.train):
            trainer.train_step(sys.maxsize)  # longer than an epoch: no lines of progress
            trainer.discard_messages()  # a pipe that is full would stop the trainer
            n_bytes, trainer.recorder.n_bytes = n_bytes + trainer.recorder.n_bytes, 0
        with trainer.exchange.rule.averaged():
            trainer.validate()
        trainer.epoch, trainer.position = trainer.epoch + 1, 0
    spent = time.perf_counter() - begin, time.process_time() - begin_cpu
    by_epoch = dict(zip(("bytes", "seconds", "cpu_seconds"), (n_bytes, *spent), strict=True))
    last = trainer.val_record[-1]
    return {**last, **{key: value / config.n_epochs for key, value in by_epoch.items()}}


def learn(dataset: str, rule: str, seed: int) -> dict[str, float]:
    """Train with a rule and a seed. Return its accuracies, and the load of the machine."""
    folder, n_epochs = DATASETS[dataset]
    keys: dict[str, Any] = {**KEYS, **RULES[rule], "data_folder": folder, "n_epochs": n_epochs, "seed": seed}
    if args := keys.get("rule_args"):
        keys["rule_args"] = {**args, **({"from_epoch": n_epochs // 2} if "from_epoch" in args else {})}
    run = {"devices": ["cpu"] * N_TRAINERS, "para_load": False, "print_freq": 10**6, "rand_mirror": False}
    config, _ = settle(resolve([Layer("benchmark", {**keys, **run})])[0])
    first: dict[str, float] = run_ranks(train, N_TRAINERS, config)[0]
    return {**first, "load": os.getloadavg()[0]}


def read_journal() -> Results:
    """Return the results of an interrupted run."""
    lines = JOURNAL.read_text().splitlines() if JOURNAL.exists() else []
    return {tuple(key): result for key, result in map(json.loads, lines)}


def learn_all(datasets: list[str], n_seeds: int) -> Results:
    """Train all rules in turns, so that other work on the machine affects all of them."""
    found = read_journal()
    RESULTS.mkdir(parents=True, exist_ok=True)
    keys = [(data, rule, seed) for data in datasets for seed in range(n_seeds) for rule in RULES]
    for key in keys:
        if key not in found:
            found[key] = learn(*key)
            with JOURNAL.open("a") as file:
                file.write(json.dumps([key, found[key]]) + "\n")
        data, rule, seed = key
        print(f"{data}, seed {seed}, {rule}: error {found[key]['error_top1']:.2%}", flush=True)
    return {key: found[key] for key in keys}


def with_error(values: list[float], scale: float, digits: int) -> str:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} +- {scale * error:.{digits}f}"


def section(dataset: str, found: Results, n_seeds: int) -> tuple[str, dict[str, Any]]:
    """Return the table of a dataset, and the numbers."""
    head = "rule", "error in %", "loss", "MB an epoch", "seconds an epoch", "seconds of a core"
    rows: list[tuple[str, ...]] = [head]
    numbers = {rule: [found[dataset, rule, seed] for seed in range(n_seeds)] for rule in RULES}
    for rule, results in numbers.items():
        values = {key: [result[key] for result in results] for key in results[0]}
        cost = [min(values[key]) for key in ("bytes", "seconds", "cpu_seconds")]
        learned = with_error(values["error_top1"], 100, 2), with_error(values["loss"], 1, 4)
        rows.append((rule, *learned, f"{cost[0] / 1e6:.1f}", f"{cost[1]:.2f}", f"{cost[2]:.2f}"))
    text = f"Rules: {dataset}, {N_TRAINERS} trainers, {DATASETS[dataset][1]} epochs, seeds 0 to {n_seeds - 1}"
    return table(text, rows), {f"rules: {dataset}: {rule}": results for rule, results in numbers.items()}


def remarks(datasets: list[str], found: Results) -> str:
    """Return the notes on how to read the table."""
    load = statistics.mean(result["load"] for result in found.values())
    lines = [
        "Seconds are trainer 0's, the least of all seeds: with four trainers on these cores, and other work",
        f"beside them, {load:.1f} processes wanted a core on the average. Those of a core depend on it less.",
    ]
    for name, (folder, _) in DATASETS.items():
        if name not in datasets:
            lines.append(f"{name} was not trained on: there is no dataset in {folder}.")
    return "\n".join([*lines, ""])


def main(n_seeds: int) -> None:
    datasets = [name for name, (folder, _) in DATASETS.items() if Path(folder, "manifest.json").exists()]
    found = learn_all(datasets, n_seeds)
    sections = [section(name, found, n_seeds) for name in datasets]
    write_results(RESULTS, "rules", [*sections, (remarks(datasets, found), {})], "python -m benchmarks.rules")
    JOURNAL.unlink()
    print((RESULTS / "rules.md").read_text())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS)
