"""Several hosts on GPUs: sums by NCCL in our own memory, and launchers of two hosts on this one machine.

Two hosts share one GPU by gloo, through page-locked memory; with two GPUs each has one, by NCCL, which
refuses two ranks on one. They have to learn what one host with two trainers learns, up to rounding.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.gpu.exchange import places
from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.hosts.sums import config_of, free_port
from lockstep.backends.cuda import CudaBackend
from lockstep.comm.group import World
from lockstep.comm.pipes import Pipe
from lockstep.hosts.addresses import listen
from lockstep.hosts.all_reduce import N_NUMBERS
from lockstep.hosts.network import HostNetwork
from lockstep.hosts.store import Store
from lockstep.launch.ranks import try_ranks
from lockstep.runs.plan import HostConnection

_ROOT = Path(__file__).resolve().parents[2]
_HERE = "127.0.0.1"
_N_FILES = 4  # a step each: few enough for rounding not to grow
# Of the momenta, the largest relative difference: hosts that learn separately differ by about 1.
_ROUNDING = 0.01
_ALONE, _SHARED, _APART = "one host, two trainers", "two hosts, one GPU, gloo", "two hosts, a GPU each, NCCL"
_SUMS = "sums of a group of one"


def run(setting: Setting, work: Path, record: Record) -> None:
    with record.attempt(_SUMS):
        seconds = min(record.seconds_left(), setting.exchange_seconds)
        (found,) = try_ranks(measure_sums, 1, setting, seconds=seconds)
        if found.problem:
            raise RuntimeError(found.problem)
        record.keep(_SUMS, found.value)
    launchers = _Launchers(setting, work / "hosts")
    with record.attempt(_SHARED):
        both = {_ALONE: [["cuda:0", "cuda:0"]], _SHARED: [["cuda:0"], ["cuda:0"]]}
        launchers.train(both, "gloo", record.seconds_left())
        record.keep(_SHARED, launchers.compare(_SHARED))
    if setting.rehearsal or len(places()) == 1:
        why = "rehearsed: there is no NCCL for CPUs" if setting.rehearsal else "measured: here is one GPU"
        record.keep(_APART, f"not {why}")
        return
    with record.attempt(_APART):
        launchers.train({_APART: [["cuda:0"], ["cuda:1"]]}, "nccl", record.seconds_left())
        record.keep(_APART, launchers.compare(_APART))


def measure_sums(rank: int, pipes: dict[int, Pipe], setting: Setting) -> dict[str, Any]:
    """Milliseconds of a host's own part of a sum; right, in our memory and in turn in our stream.

    In a rehearsal gloo stands for NCCL.
    """
    backend = CudaBackend("cuda:0")
    backend.start_computing(config_of("float32"))
    listener = listen((_HERE, 0))
    point = _HERE, int(listener.getsockname()[1])
    store = Store.serve(listener)
    n_elements = setting.exchange_elements // 2
    block = backend.memory.allocate(4 * n_elements, "gradients")
    tensor, found = block.tensor(torch.float32, (n_elements,)), np.empty(n_elements, np.float32)
    world = World.of_host(0, 1, 1)[0]
    networks = {
        wire: HostNetwork.join(world, HostConnection(point, wire, _HERE), config_of(wire), tensor.device)
        for wire in ("float32", "bfloat16")
    }
    implementations: dict[str, Callable[[], object]] = {
        f"sum, {wire}": partial(_sum, network, tensor) for wire, network in networks.items()
    }
    implementations["all-gather"] = partial(_gather, networks["float32"], tensor)
    figures: dict[str, Any] = {"library": networks["float32"].name, "floats": n_elements}
    figures["ms"] = {
        name: _time(name, way, tensor, found, block, backend) for name, way in implementations.items()
    }
    del store
    return figures


def _sum(network: HostNetwork, tensor: torch.Tensor) -> None:
    """Sum with a row of numbers, so that the tensor goes through a copy."""
    row = [float(number) for number in range(N_NUMBERS)]
    rows = network.sum_with_row([tensor], row, rounded=True)
    if rows != [row]:
        raise ArithmeticError(f"{row} came back as {rows}")


def _gather(network: HostNetwork, tensor: torch.Tensor) -> None:
    """Into another memory and back: a sum of one host's alone leaves everything in its place."""
    found = torch.empty_like(tensor)
    network.wait(network._exact.group.allgather([[found]], [tensor]))
    tensor.copy_(found)


def _time(
    name: str, way: Callable[[], object], tensor: torch.Tensor, found: np.ndarray, block: Any, backend: Any
) -> float:
    """Milliseconds of it, a median; its numbers are made, sent and read in our stream without a wait.

    Raises ArithmeticError where they are wrong.
    """
    taken = []
    for value in range(1, 12):
        tensor.fill_(value)
        backend.stream.synchronize()
        begin = time.perf_counter()
        tensor.mul_(2)
        way()
        backend.memory.driver.memcpy_dtoh_async(found, block.pointer, backend.stream)
        backend.stream.synchronize()
        taken.append((time.perf_counter() - begin) * 1e3)
        n_wrong = int((np.abs(found - 2 * value) > value / 50).sum())  # bfloat16 has 8 bits
        if n_wrong:
            raise ArithmeticError(f"{name}: {n_wrong} of {len(found)} numbers are wrong")
    return median(taken[1:])


class _Launchers:
    """Runs of train.py on a few minibatches, each with a folder in `work`."""

    def __init__(self, setting: Setting, work: Path) -> None:
        self._work = work
        work.mkdir()
        few = replace(setting, n_files=_N_FILES, n_links=1)
        self._data = dataset_folder(few, work)
        self._keys = {
            "model": setting.model,
            "model_args": json.dumps(setting.model_args),
            "n_classes": setting.n_classes,
            "batch_size": setting.batch_size // 2,
            "data_folder": self._data,
            "rule": "gradients",
            "learning_rate": 0.001,
            "n_epochs": 1,
            "print_freq": _N_FILES,
            "para_load": "false",
            "run_name": "run",
            **({"exchange": "staged"} if setting.rehearsal else {}),
        }

    def train(self, cases: dict[str, list[list[str]]], network: str, seconds: float) -> None:
        """All cases at once. cases: devices of each host, by name. Raises RuntimeError where one fails."""
        until = time.monotonic() + seconds
        started: dict[str, subprocess.Popen[bytes]] = {}
        for case, hosts in cases.items():
            point = f"rendezvous={_HERE}:{free_port()}"
            for host, devices in enumerate(hosts):
                keys = {**self._keys, "weights_dir": self._folder(case, host).parent}
                words = [f"{key}={value}" for key, value in keys.items()]
                words.append(f"devices=[{', '.join(devices)}]")
                if len(hosts) > 1:
                    words += [f"n_hosts={len(hosts)}", f"host_rank={host}", point, f"network={network}"]
                print("--- train.py", *words, flush=True)
                command = [sys.executable, "train.py", *words]
                started[f"{case}, host {host}"] = subprocess.Popen(command, cwd=_ROOT)
        codes = {name: one.wait(max(1.0, until - time.monotonic())) for name, one in started.items()}
        failed = [f"{name} ended with exit code {code}" for name, code in codes.items() if code]
        if failed:
            raise RuntimeError(f"{'; '.join(failed)}: see the log")

    def compare(self, case: str) -> dict[str, Any]:
        """Compare two hosts, and one of two trainers. Raise ArithmeticError if they differ."""
        ours, theirs, single = (self._tensors(*place) for place in ((case, 0), (case, 1), (_ALONE, 0)))
        if not all(torch.equal(ours[name], theirs[name]) for name in ours):
            raise ArithmeticError("the two hosts have not the same weights, bit by bit")
        momenta = [name for name in ours if name.startswith("momenta/")]
        worst = max(float((ours[name] - single[name]).norm() / single[name].norm()) for name in momenta)
        if not worst <= _ROUNDING:
            raise ArithmeticError(f"a momentum differs by {worst:.2g} of itself from that of one host")
        lines = map(json.loads, (self._folder(case, 0) / "log.jsonl").read_text().splitlines())
        notices = [line["text"] for line in lines if line["event"] == "warning"]
        return {
            "hosts are equal": "to the bit",
            "from one host with two trainers, relative": worst,
            "steps": _N_FILES,
            "its first line": next(text for text in notices if text.startswith("network: ")),
        }

    def _folder(self, case: str, host: int) -> Path:
        return self._work / case.replace(" ", "-") / f"host{host}" / "run"

    def _tensors(self, case: str, host: int) -> dict[str, torch.Tensor]:
        (path,) = (self._folder(case, host) / "checkpoints").glob("*.safetensors")
        return load_file(path)
