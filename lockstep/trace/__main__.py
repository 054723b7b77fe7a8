"""Writes a run's trace for https://ui.perfetto.dev or chrome://tracing.

    python train.py trace=true run_name=try1
    python -m lockstep.trace runs/try1                makes runs/try1/trace.json; also while the run goes on

A row for each process: what it was doing, from when to when. Click a span to see at which step it was. On
GPUs a span is the time of the process, which runs ahead of its device.

Exit code: 0 the trace is written; 2 there is none to be read.
"""

import argparse
import json
import sys
from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_text
from lockstep.trace.spans import events_of


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code. `arguments`: those of the command line, for the tests."""
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    words = parser.parse_args(arguments)
    try:
        events = events_of(words.run)
        path = words.run / "trace.json"
        write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    except UserError as error:
        print(f"lockstep.trace: {error}", file=sys.stderr)
        return 2
    print(f"trace: {path}: open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
