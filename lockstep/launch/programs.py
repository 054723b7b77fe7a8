"""Starting programs of Lockstep beside a run: the conversion of images and the report."""

import os
import subprocess
import sys
from typing import Any

from lockstep.files import program_folder
from lockstep.signals import Interrupts, die_with_parent


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]


def start_program(
    interrupts: Interrupts, module: str, *arguments: str, **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a module of the program folder as a process that ends with this one, not at a signal.

    Args:
        interrupts: The launcher's signal handling.
        module: The module to run, from any working directory.
        arguments: Its command line.
        options: Further options of subprocess.Popen.

    Raises:
        OSError: The operating system refuses another process.
    """
    path = [str(program_folder()), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = command_of(module, *arguments)
    with interrupts.ignored_by_children():
        return subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, **options)  # noqa: PLW1509
