"""Print the table of sums.py and write it to docs/results/hosts.md."""

from pathlib import Path

from benchmarks.hosts import sums
from benchmarks.measure import write_results

if __name__ == "__main__":
    section = sums.run()
    print(section[0])
    write_results(Path("docs/results"), "hosts", [section], "python -m benchmarks.hosts")
