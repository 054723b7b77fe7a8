"""Writes the report of a run, or of several runs over each other.

    python -m lockstep.report runs/try1               also while the run goes on
    python -m lockstep.report runs/try1 runs/try2     curves over each other; goes into the first run's folder
    python -m lockstep.report runs/try1 --no-examples

Makes RUN/report.html, one page that needs nothing else (no network, no script), and its charts as PNG files
in RUN/report. What can't be read is left out and named.

Exit code: 0 the report is written; 2 nothing can be shown of what was given.
"""

import argparse
import os
import sys
from pathlib import Path

from lockstep.backends.devices import count_cores
from lockstep.errors import UserError
from lockstep.report.runlog import read_run
from lockstep.report.theme import RUNS
from lockstep.report.writing import write_report


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `arguments`: those of the command line, for the tests."""
    words = _read_command_line(arguments)
    try:
        if len(words.runs) > len(RUNS):
            raise UserError(f"at most {len(RUNS)} runs can be told apart in one chart")
        runs = [read_run(folder) for folder in dict.fromkeys(words.runs)]
        path = write_report(runs, 0 if words.no_examples else words.images)
    except UserError as error:
        print(f"lockstep.report: {error}", file=sys.stderr)
        return 2
    for run in runs:
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
    print(f"report: {path}")
    return 0


def _read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, runs/<name>")
    parser.add_argument("--no-examples", action="store_true", help="do not try the network on any images")
    parser.add_argument(
        "--images", type=_count, default=2000, help="at most so many validation images are tried (2000)"
    )
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    # A run that goes on needs the processors more, and threads that share busy cores wait for each other.
    os.nice(10)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // 2)))
    sys.exit(main())
