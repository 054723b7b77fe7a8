"""Write the report of a run, or of several runs in the same charts.

    python -m lockstep.report runs/try1               also during the run
    python -m lockstep.report runs/try1 runs/try2     one set of charts, in runs/comparison
    python -m lockstep.report runs/* --out rates      the same in the folder rates
    python -m lockstep.report runs/try1 --no-examples
    python -m lockstep.report runs/try1 --live        every few seconds until the run has ended

It writes report.html, one page that loads nothing and whose only script sorts tables, and its charts as PNG
files in the folder `report` beside it. They are in the run's folder. For several runs they are in
`comparison` beside the first run's folder, where the next comparison replaces them. The page names files that
can't be read.

Exit code: 0: the report is written. 2: nothing can be shown of the given runs.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from lockstep.backends.devices import count_cores
from lockstep.errors import UserError
from lockstep.extras import require
from lockstep.programs import make_parser, reports_errors
from lockstep.report.runlog import RunLog, read_run
from lockstep.runs.folder import log_of
from lockstep.text import handle_closed_pipe

_LIVE_SECONDS = 5.0
_START_SECONDS = 30.0  # for which a run that is resumed may still have its former end in its log


@reports_errors("lockstep.report", interrupted="stopped as asked")
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    options = _read_command_line(arguments)
    require("the report", "report", "matplotlib")
    # Only now: both import matplotlib.
    from lockstep.report.theme import MOST_RUNS
    from lockstep.report.writing import place_of, write_report

    named = list(dict.fromkeys(options.runs))
    left_out = [folder for folder in named if _is_comparison(folder)] if len(named) > 1 else []
    for folder in left_out:
        print(f"note: {folder}: left out: it holds an earlier comparison, and no run", file=sys.stderr)
    folders = [folder for folder in named if folder not in left_out]
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs: one chart can show at most {MOST_RUNS}. Name fewer.")
    if options.live:
        if not _is_run(folders[0]):  # a live report would wait for its log for ever
            raise UserError(f"{folders[0]}: is not a run's folder: it has no log.jsonl")
        write_until_end(folders[0], options.out or folders[0])
    runs = [read_run(folder) for folder in folders]
    _tell_apart(runs)
    path = write_report(runs, options.out or place_of(runs), 0 if options.no_examples else options.images)
    for run in runs:
        for note in run.notes:
            print(f"note: {note}", file=sys.stderr)
    print(f"report: {path}")
    return 0


def write_until_end(folder: Path, out: Path) -> None:
    """Write the report of a run again and again until the run has ended. The page reloads itself.

    The examples are omitted. A run without a line of its log yet, or with a file that is being replaced, is
    tried again. So is a folder that can't be written, which is said once.

    Args:
        folder: The run's folder.
        out: Where to write.
    """
    from lockstep.report.writing import write_report

    start, said = time.monotonic(), ""
    while True:
        begin = time.monotonic()
        run = None
        with suppress(UserError):
            run = read_run(folder)
        if run and run.exit_status is not None and begin - start > _START_SECONDS:
            return
        try:
            if run:
                write_report([run], out, 0, _LIVE_SECONDS)
        except UserError as error:
            if str(error) != said:
                print(f"note: {error}; trying again", file=sys.stderr)
            said = str(error)
        # At most a tenth of a core's time: the run needs it more.
        time.sleep(max(_LIVE_SECONDS, 9 * (time.monotonic() - begin)))


def _tell_apart(runs: list[RunLog]) -> None:
    """Name runs whose folders have one name by the ends of their paths, as far as these differ."""
    paths = [run.folder.resolve().parts for run in runs]
    for n_parts in range(2, max(map(len, paths)) + 1):
        if len({run.name for run in runs}) == len(set(paths)):
            return
        for run, parts in zip(runs, paths, strict=True):
            run.name = "/".join(parts[-n_parts:])


def _is_run(folder: Path) -> bool:
    if not os.path.isdir(folder):  # False for a name that is too long, too
        return False
    return log_of(folder).exists() or (folder / "checkpoints").exists()


def _is_comparison(folder: Path) -> bool:
    """Return whether a folder is that of an earlier comparison, which the pattern runs/* matches, too."""
    return os.path.exists(folder / "report.html") and not _is_run(folder)


def _read_command_line(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, globals().get("COMMAND", "python -m lockstep.report"))
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, runs/<name>")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write: see above")
    live = "write the page every few seconds until the run has ended; it reloads itself (one run)"
    parser.add_argument("--live", action="store_true", help=live)
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
    handle_closed_pipe()
    # A run in progress needs the cores more, and threads on busy cores wait for each other.
    os.nice(10)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // 2)))
    sys.exit(main())
