"""Write a run's trace for https://ui.perfetto.dev or chrome://tracing.

    python train.py trace=true run_name=try1
    python -m lockstep.trace runs/try1                writes runs/try1/trace.json, also during the run

Each process has a row with its phases as spans. Click a span to see its step. A mark `last` on the row of a
trainer marks the step's last one: click it to see how long the others waited. On GPUs a span is the time of
the process, which runs ahead of its device; log.jsonl and the report have the devices' own times.

Exit code: 0: the trace is written. 2: the run has no trace, or it can't be read.
"""

import sys
from pathlib import Path

from lockstep.files import write_text
from lockstep.programs import make_parser, reports_errors
from lockstep.text import handle_closed_pipe
from lockstep.trace.spans import trace_of


@reports_errors("lockstep.trace")
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status. `arguments` replaces those of the command line."""
    parser = make_parser(__doc__, globals().get("COMMAND", "python -m lockstep.trace"))
    parser.add_argument("run", type=Path, help="the run's folder")
    options = parser.parse_args(arguments)
    trace = trace_of(options.run)
    path = options.run / "trace.json"
    write_text(path, trace.to_json())
    print(f"trace: {path}: open it at https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    handle_closed_pipe()
    sys.exit(main())
