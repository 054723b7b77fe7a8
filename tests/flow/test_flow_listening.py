"""Waits of the main thread notice signals; mistakes of users raise UserError."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from limits import limit

from lockstep import flow
from lockstep.errors import UserError

# The signal goes to a worker's thread: the main thread is not woken by it, as it would not be by one that
# comes just before it waits. Python's handler runs in the main thread only.
SCRIPT = """
import os, signal, threading
from lockstep import flow

device, release = flow.cpus(1)[0], threading.Event()
engine = flow.Engine([device])
variable = engine.variable("slow")

def slow():
    os.kill(os.getpid(), signal.SIGINT)
    release.wait()

ready = engine.push(lambda: None)
ready.wait()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
operation = engine.push(slow, writes=[variable])
try:
    {wait}
    print("not heard")
except KeyboardInterrupt:
    print("heard")
release.set()
engine.close()
"""


@pytest.mark.parametrize("wait", ["operation.wait()", "engine.wait(variable)", "engine.wait_all()"])
@pytest.mark.slow
def test_a_wait_hears_a_signal_that_does_not_interrupt_it(wait: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(wait=wait)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(40), cwd=ROOT)
    assert done.stdout == "heard\n" and done.returncode in (0, -signal.SIGINT), done.stderr


def test_a_trace_is_not_saved_into_a_missing_folder(tmp_path: Path) -> None:
    with flow.Engine(flow.cpus(1)), flow.recording() as trace:
        (flow.array(torch.ones(2)) + 1).wait()
    path = tmp_path / "missing" / "x.json"
    with pytest.raises(
        UserError, match=f"^{path}: the trace can't be saved here: No such file or dir[^\n]*$"
    ):
        trace.save(path)


def test_a_name_is_no_device() -> None:
    with flow.Engine(flow.cpus(1)) as engine:
        message = r"^push: 'cpu:0' is not a device: flow.cpus\(n\) and flow.cuda\(i\) make them$"
        with pytest.raises(UserError, match=message):
            engine.push(lambda: None, device="cpu:0")  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^push: there is no lane 'nope'; there are compute, comm"):
            engine.push(lambda: None, lane="nope")
