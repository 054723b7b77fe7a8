"""Print the tables of functions.py and paper.py; with --write, also write them to docs/results/synk.md."""

import argparse
from pathlib import Path

from benchmarks.measure import write_results
from benchmarks.synk import functions, paper

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synk", description=functions.__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/results/synk.md")
    arguments = parser.parse_args()
    sections = []
    for benchmark in (functions, paper):
        sections.append(benchmark.run())
        print(sections[-1][0], flush=True)
    if arguments.write:
        write_results(Path("docs/results"), "synk", sections, "python -m benchmarks.synk")
