"""Programs of the project, each run in a fork of this process, which has already imported them.

The process starts with the file layer of faults.c (LD_PRELOAD), so that every fork has it. A request is a
line of JSON on standard input: `program`, its `words`, `output` (a file) and `environment`, which selects the
fault. The answer is a line, too: the exit status, or minus the number of a signal.
"""

import ctypes
import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker

import torch

import proc_load
import train
import train_funcs
from lockstep.launch.processes import Processes
from lockstep.signals import Interrupts
from preprocessing import make_hkl

_PR_SET_CHILD_SUBREAPER = 36
IMPORTED_FOR_CHILDREN = (proc_load, train_funcs)


def run_training() -> int:
    """Run train.py with forked instead of spawned processes, which takes 0.1 s instead of 2 s."""
    train.Processes = functools.partial(Processes, method="fork")  # type: ignore[misc, assignment]
    interrupts = Interrupts()
    interrupts.install("stopped as asked, before training began")
    return train.main(interrupts)


PROGRAMS: dict[str, Callable[[], int]] = {"train.py": run_training, "make_hkl.py": make_hkl.main}


def become(order: dict[str, object]) -> None:
    """Run the program in the fork; never returns."""
    os.setsid()
    os.environ.update(order["environment"])  # type: ignore[call-overload]
    output = os.open(str(order["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((nothing, output, output)):
        os.dup2(file, number)
    sys.argv = [str(order["program"]), *order["words"]]  # type: ignore[misc]
    code = PROGRAMS[sys.argv[0]]()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own exit takes 0.7 s after importing torch


def run(order: dict[str, object]) -> int:
    """Return the program's exit status; kill its other processes, because forks hold each other's pipes."""
    child = os.fork()
    if child == 0:
        become(order)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError, ChildProcessError):
        os.killpg(child, signal.SIGKILL)
        while True:  # until all have exited, and released the run's folder
            os.waitpid(-child, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    ctypes.CDLL(None).prctl(
        _PR_SET_CHILD_SUBREAPER, 1
    )  # orphans of a killed launcher become its own children
    torch.set_num_threads(1)  # a pool of threads does not outlive a fork
    multiprocessing.set_start_method("spawn")
    resource_tracker.ensure_running()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
