"""Has a run's report written when it is complete."""

import os
import subprocess
import sys
from pathlib import Path

from lockstep.interrupts import Interrupts, die_with_parent
from lockstep.launch.console import show

REPORT_SECONDS = 600.0  # it limits itself to much less


def write_report(folder: Path, home: Path, interrupts: Interrupts) -> None:
    """Has the report written by a process of its own. The run is good whatever becomes of its report.

    home: the folder that lockstep lies in.
    """
    command = [sys.executable, "-m", "lockstep.report", str(folder)]
    again = f"to try again: {' '.join(command)}"
    interrupts.leave(f"stopped as asked: the run is complete, its report was not written; {again}")
    path = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])  # from any folder
    environment = {**os.environ, "PYTHONPATH": path}
    with interrupts.ignored_by_children():  # it ends with this process, not before
        process = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent)  # noqa: PLW1509
    try:
        code = process.wait(REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        show(f"note: the report was not written (exit code {code}); {again}", "stderr")
