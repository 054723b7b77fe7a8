"""Writing the report of a run, in a separate process."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config import Config
from lockstep.launch.console import show
from lockstep.launch.programs import command_of, start_program
from lockstep.signals import Interrupts

_PROGRAM = "lockstep.report"
REPORT_SECONDS = 600.0  # the report limits itself to much less


@contextmanager
def live_report(config: Config, folder: Path, interrupts: Interrupts) -> Iterator[None]:
    """Keep the run's report current during the block, with `report: live`, in a separate process.

    Args:
        config: The run's configuration.
        folder: The run's folder.
        interrupts: The launcher's.
    """
    if config.report != "live" or config.host_rank:
        yield
        return
    process = start_program(interrupts, _PROGRAM, str(folder), "--live")
    show(f"report: {folder / 'report.html'} reloads itself during the run", "stdout")
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_report(folder: Path, interrupts: Interrupts) -> None:
    """Run `python -m lockstep.report`. A failure is noted and leaves the run's exit code as it is.

    Args:
        folder: The run's folder.
        interrupts: The launcher's.
    """
    again = f"to try again: {' '.join(command_of(_PROGRAM, str(folder)))}"
    interrupts.leave(f"stopped as asked: the run is complete, its report was not written; {again}")
    process = start_program(interrupts, _PROGRAM, str(folder))
    try:
        code = process.wait(REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        show(f"note: the report was not written (exit code {code}); {again}", "stderr")
