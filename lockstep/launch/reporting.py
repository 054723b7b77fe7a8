"""Writing the report of a run, in a separate process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config import Config
from lockstep.files import program_folder
from lockstep.launch.console import show
from lockstep.signals import Interrupts, die_with_parent

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
    process = _start(interrupts, folder, "--live")
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
    again = f"to try again: {' '.join(_command(folder))}"
    interrupts.leave(f"stopped as asked: the run is complete, its report was not written; {again}")
    process = _start(interrupts, folder)
    try:
        code = process.wait(REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        show(f"note: the report was not written (exit code {code}); {again}", "stderr")


def _command(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep.report", str(folder), *words]


def _start(interrupts: Interrupts, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start the program, which works from any current folder and ends with this process."""
    path = os.pathsep.join([str(program_folder()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with interrupts.ignored_by_children():  # it ends with this process, not at the signal
        return subprocess.Popen(_command(folder, *words), env=environment, preexec_fn=die_with_parent)  # noqa: PLW1509
