"""Any number of trainers and any shares give one checksum, and shares by measured times are faster.

    python -m benchmarks.shares                  200 random shares for each network and optimizer: an hour
    python -m benchmarks.shares --vectors 5
    python -m benchmarks.shares --speed          with two processes that keep one trainer's core busy
    python -m benchmarks.shares --overhead       processor time of a step beside that of its passes

The first two train the digits for two short epochs on 1 to 8 trainers with 8 and with 12 logical ranks, and
compare SHA-256 of weights, optimizer state and buffers. The third measures steps with equal shares and with
`shares: auto` in turns; it needs two cores without other work. The fourth measures processor time, because
three trainers do not fit two cores: what the trainer with most logical ranks uses for a whole step, over what
it uses for its forward and backward passes.
"""

import argparse
import hashlib
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lone import UnlaunchedTrainer
from benchmarks.measure import Journal, table, verdict, write_results
from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, Layer, resolve
from lockstep.config.rules import settle
from lockstep.launch.ranks import run_ranks

Shares = tuple[int, ...]
CASES: dict[str, dict[str, Any]] = {  # smallnet has dropout, resnet20 batch normalisation
    "smallnet, sgd": {"model": "smallnet", "learning_rate": 0.02},
    "smallnet, adamw": {"model": "smallnet", "optimizer": "adamw", "learning_rate": 0.001},
    "resnet20, sgd": {"model": "resnet20", "learning_rate": 0.02},
}
N_RESNET = 10  # vectors of shares for resnet20, which takes long
N_LOGICAL = (8, 12)
N_STEPS, BATCH, N_TURNS = 5, 48, 3
WARM_UP, TIMED = 40, 60  # steps: `auto` chooses after 20
SLOWED = 2  # processes beside the slowed trainer on its core: it gets a third


def config_of(n_trainers: int, n_logical: int, shares: Any, **keys: Any) -> Config:
    """Return the configuration of a run on the digits with logical ranks and shares."""
    values = {"data_folder": "data/digits", "global_batch_size": BATCH, "logical_ranks": n_logical}
    values |= {"devices": ["cpu"] * n_trainers, "shares": shares, "para_load": False, **keys}
    return settle(resolve([Layer("benchmark", values)])[0])[0]


def make_trainer(rank: int, pipes: dict[int, Pipe], config: Config) -> UnlaunchedTrainer:
    """Return a trainer with one thread."""
    torch.set_num_threads(1)
    return UnlaunchedTrainer(config, Group.on_one_host(rank, pipes))


def checksums(rank: int, pipes: dict[int, Pipe], configs: list[Config]) -> list[str]:
    """Return a checksum of the state after N_STEPS for each configuration, one after the other."""
    found = []
    for config in configs:
        trainer, sha256 = make_trainer(rank, pipes, config), hashlib.sha256()
        trainer.begin_epoch()
        for _ in range(N_STEPS):
            trainer.train_step(trainer.orders.n_steps("train"))
        state = {**trainer.program.arena.tensors, **trainer.exchange.rule.state()}
        for name in sorted(state):
            sha256.update(name.encode() + state[name].numpy().tobytes())
        found.append(sha256.hexdigest())
        trainer.close()
    return found


def vectors(n_vectors: int, n_logical: int) -> list[Shares]:
    """Return equal shares of 1 to 8 trainers, and random shares of random numbers of trainers."""
    random = np.random.default_rng(n_logical)
    found = []
    for _ in range(n_vectors):
        n_cuts = int(random.integers(1, 8))
        cuts = np.sort(random.choice(np.arange(1, n_logical), n_cuts, replace=False))
        found.append(tuple(int(n) for n in np.diff([0, *cuts, n_logical])))
    return found


def compare(case: str, n_logical: int, n_vectors: int) -> dict[str, Any]:
    """Return how many divisions were tried, and how many checksums they have."""
    divisions: list[tuple[int, Any]] = [(n, "equal") for n in range(1, 9)]
    divisions += [(len(shares), shares) for shares in vectors(n_vectors, n_logical)]
    found: dict[str, list[str]] = {}
    for n_trainers in range(1, 9):
        own = [shares for n, shares in divisions if n == n_trainers]
        configs = [config_of(n_trainers, n_logical, shares, **CASES[case]) for shares in own]
        for shares, sha256 in zip(own, run_ranks(checksums, n_trainers, configs)[0], strict=True):
            found.setdefault(sha256, []).append(f"{n_trainers} trainers, shares {shares}")
    return {"divisions": len(divisions), "checksums": len(found), "first": next(iter(found))}


def keep_busy(core: int) -> None:
    """Keep a core busy until the process is killed."""
    os.sched_setaffinity(0, [core])
    for _ in itertools.count():
        pass


def timed_steps(rank: int, pipes: dict[int, Pipe], config: Config, cores: list[int]) -> float:
    """Return the seconds of a step after WARM_UP steps."""
    os.sched_setaffinity(0, [cores[rank]])
    trainer = make_trainer(rank, pipes, config)
    n_done, begin = 0, 0.0
    while n_done < WARM_UP + TIMED:
        trainer.begin_epoch()
        while trainer.position < len(trainer.dataset.train) and n_done < WARM_UP + TIMED:
            if n_done == WARM_UP:
                begin = time.perf_counter()
            trainer.train_step(trainer.orders.n_steps("train"))
            n_done += 1
        trainer.validate()
        trainer.epoch, trainer.position = trainer.epoch + 1, 0
    seconds = (time.perf_counter() - begin) / TIMED
    trainer.close()
    return seconds


def speed() -> dict[str, float]:
    """Return seconds a step with equal shares and with `auto`, one of two trainers slowed to a third."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("benchmarks.shares: --speed needs two cores, and this process may use one")
    busy = [multiprocessing.Process(target=keep_busy, args=(cores[1],), daemon=True) for _ in range(SLOWED)]
    for process in busy:
        process.start()
    found: dict[str, list[float]] = {"equal": [], "auto": []}
    for _ in range(N_TURNS):
        for shares, seconds in found.items():
            config = config_of(2, 8, shares, n_epochs=20, model="smallnet")
            seconds.append(max(run_ranks(timed_steps, 2, config, cores)))
    for process in busy:
        process.terminate()
    return {shares: statistics.median(seconds) for shares, seconds in found.items()}


def processor_times(rank: int, pipes: dict[int, Pipe], config: Config) -> tuple[float, float]:
    """Return this trainer's processor seconds in TIMED steps, and in their forward and backward passes."""
    trainer, passes = make_trainer(rank, pipes, config), 0.0
    compute = trainer._forward_backward

    def timed() -> Order:
        nonlocal passes
        begin = time.process_time()
        order = compute()
        passes += time.process_time() - begin
        return order

    trainer._forward_backward = timed  # type: ignore[method-assign]
    trainer.begin_epoch()
    for number in range(WARM_UP + TIMED):
        if number == WARM_UP:
            begin, passes = time.process_time(), 0.0
        if trainer.position >= len(trainer.dataset.train):
            trainer.validate()
            trainer.epoch, trainer.position = trainer.epoch + 1, 0
            trainer.begin_epoch()
        trainer.train_step(trainer.orders.n_steps("train"))
    whole = time.process_time() - begin
    trainer.close()
    return whole, passes


def overhead() -> dict[str, list[float]]:
    """Return a step's processor time over that of its passes, in turns, by network and trainers."""
    found: dict[str, list[float]] = {}
    for _, model, n_trainers in itertools.product(range(N_TURNS), ("smallnet", "resnet20"), (2, 3)):
        config = config_of(n_trainers, 8, "equal", n_epochs=20, model=model, learning_rate=0.01)
        whole, passes = run_ranks(processor_times, n_trainers, config)[0]  # it has most logical ranks
        found.setdefault(f"{model}, {n_trainers} trainers", []).append(whole / passes)
    return found


def write_overhead(command: str) -> None:
    """Measure what sums and exchange cost, and write the page."""
    ratios = overhead()
    rows: list[tuple[str, ...]] = [("8 logical ranks", "step / its passes, processor time", "")]
    for name, each in ratios.items():
        rows.append((name, f"{statistics.median(each):.3f}", verdict(statistics.median(each), 1.05, True)))
    section = (
        table("What sums and exchange cost the trainer with most logical ranks", rows),
        {"ratios": ratios},
    )
    print(section[0])
    write_results(Path("docs/results"), "shares_overhead", [section], command)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vectors", type=int, default=200, help="random shares for each network")
    parser.add_argument("--speed", action="store_true", help="measure `auto` instead")
    parser.add_argument("--overhead", action="store_true", help="measure the cost of sums instead")
    arguments = parser.parse_args()
    command = "python -m benchmarks.shares " + " ".join(sys.argv[1:])
    if arguments.overhead:
        write_overhead(command)
        return 0
    if arguments.speed:
        seconds = speed()
        rows = [("shares", "ms a step"), *((name, f"{1e3 * each:.1f}") for name, each in seconds.items())]
        rows.append(("ratio", f"{seconds['equal'] / seconds['auto']:.2f}"))
        section = (
            table("Two trainers, one slowed to a third, 8 logical ranks", rows),
            {"shares: speed": seconds},
        )
        print(section[0])
        write_results(Path("docs/results"), "shares_speed", [section], command)
        return 0
    numbers, path = {}, Path("docs/results/shares.unfinished.jsonl")
    journal = Journal(path)
    for case, n_logical in itertools.product(CASES, N_LOGICAL):
        n_vectors = min(arguments.vectors, N_RESNET) if "resnet" in case else arguments.vectors
        measure = partial(compare, case, n_logical, n_vectors)
        numbers[f"{case}, {n_logical} logical ranks"] = journal.once([case, n_logical, n_vectors], measure)
    names = ("divisions", "checksums", "first")
    rows = [
        ("network", *names),
        *((case, *(str(n[name])[:12] for name in names)) for case, n in numbers.items()),
    ]
    section = table(f"Checksums after {N_STEPS} steps of {BATCH} images", rows), {"shares": numbers}
    print(section[0])
    write_results(Path("docs/results"), "shares", [section], command.strip())
    path.unlink()
    return int(any(each["checksums"] > 1 for each in numbers.values()))


if __name__ == "__main__":
    sys.exit(main())
