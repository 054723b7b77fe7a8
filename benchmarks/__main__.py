"""Runs all benchmarks, prints their tables, and keeps them in docs/results/."""

from pathlib import Path

from benchmarks import (
    augmenting,
    decoding,
    exchange,
    executor,
    factors,
    flow,
    reading,
    rule_steps,
    sleeping,
    starting,
    stepping,
    updating,
)
from benchmarks.measure import write_results


def main() -> None:
    sections = []
    for benchmark in (
        exchange, updating, factors, rule_steps, reading, augmenting, decoding, starting, stepping, flow,
        sleeping, executor,
    ):  # fmt: skip
        sections.append(benchmark.run())
        print(sections[-1][0], flush=True)
    write_results(Path("docs/results"), "cpu", sections)
    print("written to docs/results/cpu.md and cpu.json")


if __name__ == "__main__":
    main()
