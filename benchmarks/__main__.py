"""Runs all benchmarks, prints their tables, and keeps them in docs/results/.

    python -m benchmarks saving flow     only these, printed and not kept

Each runs in a process of its own: how many threads one asks of torch is not to count for the next.
"""

import argparse
import multiprocessing
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
    saving,
    sleeping,
    starting,
    stepping,
    updating,
)
from benchmarks.measure import write_results

BENCHMARKS = {
    benchmark.__name__.removeprefix("benchmarks."): benchmark.run
    for benchmark in (
        exchange, updating, factors, rule_steps, reading, augmenting, decoding, starting, stepping, saving,
        flow, sleeping, executor, hosts,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measures; see CONTRIBUTING.md."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]} (there are: {', '.join(BENCHMARKS)})")
    sections = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for name in names or BENCHMARKS:
            sections.append(pool.submit(BENCHMARKS[name]).result())
            print(sections[-1][0], flush=True)
    if not names:
        write_results(Path("docs/results"), "cpu", sections)
        print("written to docs/results/cpu.md and cpu.json")


if __name__ == "__main__":
    main()
