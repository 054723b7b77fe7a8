"""Probes of the features that everything else needs, in about a minute, each in its own processes.

A probe that fails says which of the ways below will not work on this machine, before minutes go into them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from lockstep.backends.cuda import CudaBackend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.doctor import uploads
from lockstep.errors import UserError
from lockstep.kernels.dropout import DropoutKernel
from lockstep.launch.ranks import try_ranks
from lockstep.network.dropout import install as install_dropout
from lockstep.network.step_graph import StepGraph

_SECONDS = 45.0  # for one probe; torch comes from a cold disk, perhaps
_RECORDS = 1000
_FLOATS = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]
Probe = Callable[..., Any]


def run(setting: Setting, work: Path, record: Record) -> None:
    for name, (function, n_ranks) in _PROBES.items():
        with record.attempt(name):
            seconds = min(record.seconds_left(), _SECONDS * (4 if setting.rehearsal else 1))
            outcomes = try_ranks(function, n_ranks, setting, seconds=seconds)
            problems = [
                f"rank {rank}: {found.problem}" for rank, found in enumerate(outcomes) if found.problem
            ]
            if problems:
                raise RuntimeError("; ".join(problems))
            record.keep(name, outcomes[0].value)
    with record.attempt("/dev/shm after a kill"):
        record.keep("/dev/shm after a kill", _kill_a_holder())


def torch_computes_in_our_memory(rank: int, pipes: dict[int, Pipe], setting: Setting) -> str:
    """torch fills memory of PyCUDA in PyCUDA's stream, and PyCUDA copies it, without a wait in between."""
    backend = _backend()
    block = backend.memory.allocate(4 * _FLOATS, "a probe")
    tensor, found = block.tensor(torch.float32, (_FLOATS,)), np.empty(_FLOATS, np.float32)
    for value in range(1, 20):
        _in_turn(backend, setting)
        tensor.fill_(value).mul_(2)
        backend.memory.driver.memcpy_dtoh_async(found, block.pointer, backend.stream)
        backend.stream.synchronize()
        if (found != 2 * value).any():
            raise ArithmeticError(f"{int((found != 2 * value).sum())} of {_FLOATS} numbers are wrong")
    return f"torch {torch.__version__}"


def capture(rank: int, pipes: dict[int, Pipe], setting: Setting) -> str:
    """Capture a pass of convolutions and of our own kernel, launched by PyCUDA, and fused SGD behind it."""
    if setting.rehearsal:
        return "not rehearsed: torch computes on the CPU"
    backend = _backend()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3))
    model.to(backend.memory.device)
    dropouts = install_dropout(model)
    for layer in dropouts:
        layer.kernel = DropoutKernel(backend.memory, backend.stream)
        layer.keys = torch.arange(16, dtype=torch.int32, device=backend.memory.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(16, 3, 32, 32, device=backend.memory.device)
    received: list[str] = []
    losses = torch.zeros(20, device=backend.memory.device)

    def learn() -> None:
        for layer in dropouts:
            layer.n_calls = 0
        loss = model(images).square().mean()
        loss.backward()
        losses[0].copy_(loss.detach())

    graph = StepGraph(model, must=True)
    history = []
    for _ in range(20):
        graph.run(learn, received.append)
        optimizer.step()
        optimizer.zero_grad()
        history.append(float(losses[0]))
    if not all(later < earlier for earlier, later in pairwise(history)):
        raise ArithmeticError(f"the loss does not fall when replayed: {history}")
    return received[0]


def share_memory(rank: int, pipes: dict[int, Pipe], setting: Setting) -> str:
    """Rank 1 writes into memory of rank 0 that CUDA IPC has opened."""
    backend = _backend()
    memory, values = backend.memory, np.arange(_FLOATS, dtype=np.float32)
    if rank == 1:
        opened = memory.receive(pipes[0], "the memory")
        memory.upload(opened, values)
        opened.close()
        pipes[0].send("written")
        return ""
    block = memory.allocate(4 * _FLOATS, "a probe")
    block.send(pipes[1])
    pipes[1].receive(str, "its word")
    found = np.empty(_FLOATS, np.float32)
    memory.driver.memcpy_dtoh(found, block.pointer)
    if (found != values).any():
        raise ArithmeticError(f"{int((found != values).sum())} of {_FLOATS} numbers are wrong")
    return "memory of another process is reached"


def share_events(rank: int, pipes: dict[int, Pipe], setting: Setting) -> dict[str, float]:
    """An event recorded again and again: what rank 1's stream reads after it was written before it."""
    backend, group = _backend(), Group.on_one_host(rank, pipes)
    memory, stream, driver = backend.memory, backend.stream, backend.memory.driver
    block = memory.allocate(4 * _FLOATS, "a probe") if rank == 0 else None
    if block is not None:
        (event,) = memory.shared_events(1)
        block.send(pipes[1])
        memory.send_events(pipes[1], [event])
    else:
        opened = memory.receive(pipes[0], "the memory")
        (event,) = memory.receive_events(pipes[0], "the event")
    found, n_wrong = np.empty(1, np.uint8), 0
    begin = time.perf_counter()
    for number in range(_RECORDS):
        if block is not None:
            driver.memset_d8_async(block.pointer, number % 256, 4 * _FLOATS, stream)
            event.record(stream)
        group.barrier("recorded")
        if block is None:
            stream.wait_for_event(event)
            driver.memcpy_dtoh_async(found, opened.pointer + 4 * (_FLOATS - 1), stream)
            stream.synchronize()
            n_wrong += int(found[0]) != number % 256
        group.barrier("read")
    seconds = time.perf_counter() - begin
    wrong = sum(group.all_gather("compared", n_wrong))
    if block is None:
        del event
        opened.close()
    group.barrier("closed")
    if wrong:
        raise ArithmeticError(f"{wrong} of {_RECORDS} values were read too early or too late")
    return {"records": _RECORDS, "microseconds_each": seconds / _RECORDS * 1e6}


def copy_beside_kernels(rank: int, pipes: dict[int, Pipe], setting: Setting) -> dict[str, float]:
    """Measure kernels alone, copies alone, and both at once, copied by the trainer or by a loader."""
    times = uploads.measure(rank, pipes, "cuda:0")
    if times is None:
        return {}
    if times.loader is None:
        raise UserError(f"the loader can't copy: {times.problem}")
    seconds = {"kernels": times.kernels, "copies": times.copies}
    seconds |= {"copies by the trainer": times.trainer, "copies by the loader": times.loader}
    return {f"{name}, ms": 1e3 * value for name, value in seconds.items()}


HOLD = """
import time
from lockstep.backends.cuda import CudaBackend
events = CudaBackend("cuda:0").memory.shared_events(3)
print("made", flush=True)
time.sleep(600)
"""


def _kill_a_holder() -> dict[str, Any]:
    """CUDA's files in /dev/shm before, while and after a process has shared events and is killed."""
    before = _shared_files()
    begin = "from benchmarks.gpu import rehearsal; rehearsal.join()" if "CUDA_SIM_PARTS" in os.environ else ""
    command = [sys.executable, "-c", f"{begin}\n{HOLD}"]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    during = _shared_files() - before
    process.send_signal(signal.SIGKILL)
    process.wait()
    after = _shared_files() - before
    for name in after:
        if name.split(".")[3:4] == [f"{process.pid:x}"]:  # as lockstep/memory/leftovers.py knows them
            Path("/dev/shm", name).unlink()
    if said != "made\n":
        raise RuntimeError("the process that was to share events made none")
    found = {"before": len(before), "while": sorted(during), "after": sorted(after)}
    return {**found, "removed": sorted(after - _shared_files())}


def _shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("cuda*")}


def _backend() -> CudaBackend:
    backend = CudaBackend("cuda:0")
    backend.start_computing(Config())
    return backend


def _in_turn(backend: CudaBackend, setting: Setting) -> None:
    if setting.rehearsal:  # torch is not in the stream there
        backend.stream.synchronize()


_PROBES: dict[str, tuple[Probe, int]] = {
    "torch on PyCUDA's memory and stream": (torch_computes_in_our_memory, 1),
    "capture of convolutions, with SGD behind": (capture, 1),
    "IPC memory": (share_memory, 2),
    "IPC events": (share_events, 2),
    "copies beside kernels": (copy_beside_kernels, 2),
}
