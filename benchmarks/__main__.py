"""Run all benchmarks, print their tables and write them to docs/results/.

    python -m benchmarks saving flow     run only these, and only print their tables
    python -m benchmarks safeguards resizing --page safeguards    and write them to docs/results/safeguards.md

Each benchmark runs in its own process, because the number of torch's threads is a setting of the process.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.exchange import all_reduce
from benchmarks.flow import executor, sleeping
from benchmarks.flow import steps as flow
from benchmarks.hosts import sums
from benchmarks.loading import augmenting, changing, decoding, reading
from benchmarks.measure import write_results
from benchmarks.step import factors, recomputing, rule_steps, safeguards, saving, starting, stepping, updating

BENCHMARKS = {
    "exchange": all_reduce.run,
    "updating": updating.run,
    "factors": factors.run,
    "rule_steps": rule_steps.run,
    "reading": reading.run,
    "augmenting": augmenting.run,
    "changing": changing.run,
    "decoding": decoding.run,
    "starting": starting.run,
    "stepping": stepping.run,
    "recomputing": recomputing.run,
    "safeguards": safeguards.costs,
    "safeguards_alexnet": safeguards.costs_alexnet,
    "resizing": safeguards.pauses,
    "saving": saving.run,
    "flow": flow.run,
    "sleeping": sleeping.run,
    "executor": executor.run,
    "hosts": sums.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Run benchmarks; see CONTRIBUTING.md."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--page", help="of docs/results, to write the tables of some benchmarks to")
    arguments = parser.parse_args()
    names = arguments.names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark: {unknown[0]}. Choose from {', '.join(BENCHMARKS)}.")
    sections = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        for name in names or BENCHMARKS:
            sections.append(pool.submit(BENCHMARKS[name]).result())
            print(sections[-1][0], flush=True)
    if page := arguments.page or ("" if names else "cpu"):
        command = f"python -m benchmarks {' '.join(names)} --page {page}" if arguments.page else "make bench"
        write_results(Path("docs/results"), page, sections, command)
        print(f"written to docs/results/{page}.md and {page}.json")


if __name__ == "__main__":
    main()
