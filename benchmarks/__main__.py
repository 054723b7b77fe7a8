"""Runs all benchmarks, prints their tables, and keeps them in docs/results/.

    python -m benchmarks hosts flow    these only, and nothing is kept

Each runs in a process of its own: how many threads one asks of torch is not to count for the next.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks import (
    augmenting,
    decoding,
    exchange,
    executor,
    factors,
    flow,
    hosts,
    reading,
    rule_steps,
    sleeping,
    starting,
    stepping,
    updating,
)
from benchmarks.measure import write_results


def main(names: list[str]) -> None:
    sections = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for benchmark in (
            exchange, updating, factors, rule_steps, reading, augmenting, decoding, starting, stepping, flow,
            sleeping, executor, hosts,
        ):  # fmt: skip
            if names and benchmark.__name__.rpartition(".")[2] not in names:
                continue
            sections.append(pool.submit(benchmark.run).result())
            print(sections[-1][0], flush=True)
    if names:
        return
    write_results(Path("docs/results"), "cpu", sections)
    print("written to docs/results/cpu.md and cpu.json")


if __name__ == "__main__":
    main(sys.argv[1:])
