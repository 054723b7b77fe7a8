"""Programs that the launcher starts beside a run: the conversion of images, and the report."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.files import program_folder
from lockstep.launch.console import show
from lockstep.signals import Interrupts, die_with_parent, leave_signals_to_launcher, signals_blocked

_PROGRAM = "lockstep.report"
REPORT_SECONDS = 600.0  # the report limits itself to much less


def start_program(module: str, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a module of the program folder as a process that ends with this one, not at a signal.

    Packages in the working directory, which may have one's name, come last (-P).

    Args:
        module: The module to run, from any working directory.
        arguments: Its command line.
        options: Further options of subprocess.Popen.

    Raises:
        OSError: The operating system refuses another process.
    """
    path = [str(program_folder()), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-P", "-m", module, *arguments]
    with signals_blocked():
        return subprocess.Popen(command, env=environment, preexec_fn=_begin, **options)  # noqa: PLW1509


def _begin() -> None:
    die_with_parent()
    leave_signals_to_launcher(signal.SIG_IGN)


@contextmanager
def live_report(config: Config, folder: Path) -> Iterator[None]:
    """Keep the run's report current during the block, with `report: live`, in a separate process.

    Args:
        config: The run's configuration.
        folder: The run's folder.
    """
    if config.report != "live" or config.host_rank:
        yield
        return
    process = start_program(_PROGRAM, str(folder), "--live")
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
    again = f"to try again: {sys.executable} -m {_PROGRAM} {folder}"
    interrupts.leave(f"stopped as asked: the run is complete, its report was not written; {again}")
    process = start_program(_PROGRAM, str(folder))
    try:
        code = process.wait(REPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code:
        show(f"note: the report was not written (exit code {code}); {again}", "stderr")
