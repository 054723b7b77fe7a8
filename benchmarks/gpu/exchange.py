"""Averaging AlexNet's 61 M weights and 61 M momenta between two GPU processes: ours three ways, and NCCL.

NCCL refuses two ranks on one GPU, so it is measured only where there are two GPUs.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed

from benchmarks.gpu import rehearsal
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import device_turns
from lockstep.backends.cuda import CudaBackend
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.exchange import shard
from lockstep.exchange.p2p import PeerTransport, SwapTransport
from lockstep.exchange.proof import prove
from lockstep.exchange.staged import StagedTransport
from lockstep.exchange.transport import Collective, Transport
from lockstep.launch.ranks import try_ranks

_PEER = (PeerTransport,)
_ALL = (PeerTransport, SwapTransport, StagedTransport)
_FLOAT = 4  # bytes


def run(setting: Setting, work: Path, record: Record) -> None:
    """The peer-to-peer kernel alone first: what goes wrong with the others must not cost its figures."""
    for place, devices in places().items():
        store = str(work / f"store{len(set(devices))}")
        for what, function in (("the kernel", measure_kernel), ("exchanges", measure_exchanges)):
            name = f"{what} on {place}"
            with record.attempt(name):
                figures = _measure(function, devices, setting, store, record.seconds_left())
                record.keep(name, figures)
                for exchange, equal in figures["equals the mean"].items():
                    if not equal:
                        record.fail(f"{name}: {exchange}", "what it has made is not the mean, to the bit")
    if len(places()) == 1:
        record.keep("NCCL", "not measured: it refuses two ranks on one GPU, and here is one")


def _measure(
    function: Any, devices: list[str], setting: Setting, store: str, seconds: float
) -> dict[str, Any]:
    """Return rank 0's result. Raise RuntimeError with the error of either rank."""
    outcomes = try_ranks(function, 2, devices, setting, store, seconds=min(seconds, setting.exchange_seconds))
    problems = [
        f"rank {rank}: {outcome.problem}\n{outcome.traceback}"
        for rank, outcome in enumerate(outcomes)
        if outcome.problem
    ]
    if problems:
        raise RuntimeError("\n".join(problems))
    figures: dict[str, Any] = outcomes[0].value
    return figures


def places() -> dict[str, list[str]]:
    """Devices of rank 0 and 1. Counting GPUs makes no context on them."""
    import pycuda.driver

    pycuda.driver.init()
    places = {"one GPU": ["cuda:0", "cuda:0"]}
    if pycuda.driver.Device.count() > 1:
        places["two GPUs"] = ["cuda:0", "cuda:1"]
    return places


def measure_kernel(
    rank: int, pipes: dict[int, Pipe], devices: list[str], setting: Setting, _: str
) -> dict[str, Any]:
    """The proof of peer access, the peer-to-peer exchange's bits, and the time of its kernel."""
    part = _Rank(_PEER, Group.on_one_host(rank, pipes), devices, setting)
    figures = {"proof": part.prove(), "equals the mean": part.check_bits(), **part.time_kernel()}
    part.close()
    return figures


def measure_exchanges(
    rank: int, pipes: dict[int, Pipe], devices: list[str], setting: Setting, store: str
) -> dict[str, Any]:
    """All exchanges in turns, their bits first. store: a new file, by which NCCL's ranks find each other."""
    part = _Rank(_ALL, Group.on_one_host(rank, pipes), devices, setting)
    equal = part.check_bits()
    functions = {transport.name: partial(part.average, transport) for transport in part.transports}
    if len(set(devices)) > 1:
        functions[part.library] = part.start_library(store)
    figures = {"equals the mean": equal, "ms": part.take_turns(functions)}
    part.close()
    return figures


class _Rank:
    """One of two: an arena for each kind of exchange, so that none has opened what another has."""

    def __init__(self, kinds: Any, group: Group, devices: list[str], setting: Setting) -> None:
        if setting.rehearsal:
            rehearsal.join()
        self._group, self._setting = group, setting
        self._n_elements = setting.exchange_elements
        self._backend = CudaBackend(devices[group.world.rank])
        self._backend.start_computing(Config())
        self._memory, self._stream = self._backend.memory, self._backend.stream
        self._driver = self._memory.driver
        self.library = "gloo" if setting.rehearsal else "nccl"
        self._blocks = [self._memory.allocate(_FLOAT * self._n_elements, "an arena") for _ in kinds]
        self.transports = [
            kind(self._memory, self._stream, block, self._n_elements, group)
            for kind, block in zip(kinds, self._blocks, strict=True)
        ]

    def prove(self) -> list[str]:
        pairs = prove(self._memory, self._stream, self._group)
        return [pair.problem or f"{pair.gb_per_second:.0f} GB/s" for pair in pairs]

    def check_bits(self) -> dict[str, bool]:
        """Each exchange once, from random values, against the mean that NumPy makes of them."""
        mine, theirs = (self._values(rank) for rank in (self._group.world.rank, 1 - self._group.world.rank))
        mean = (mine + theirs) / np.float32(2)
        found = np.empty_like(mean)
        equal = {}
        for transport, block in zip(self.transports, self._blocks, strict=True):
            self._memory.upload(block, mine)
            self.average(transport)
            self._stream.synchronize()
            self._driver.memcpy_dtoh(found, block.pointer)
            alike = np.array_equal(found.view(np.uint32), mean.view(np.uint32))
            equal[transport.name] = all(self._group.all_gather("compared", alike))
        return equal

    def _values(self, rank: int) -> np.ndarray:
        random = np.random.default_rng(rank)
        values: np.ndarray = random.random(self._n_elements, np.float32)
        return values

    def time_kernel(self) -> dict[str, Any]:
        """The averaging kernel of rank 0 alone, beside a copy of one arena on its device, in turns.

        GB/s counts what is read and what is written, on whichever device.
        """
        first, last = shard((0, self._n_elements), self._group.world.rank, 2)
        transport, block = self.transports[0], self._blocks[0]
        figures = {}
        self._group.all_gather("rank 0 alone from now on")
        if self._group.world.rank == 0:
            copy = self._memory.allocate(block.n_bytes, "a copy's target")
            arguments = (copy.pointer, block.pointer, block.n_bytes, self._stream)
            functions: dict[str, Callable[[], object]] = {
                "kernel": partial(transport.work, Collective("all_reduce", (0, self._n_elements), "mean")),
                "copy": partial(self._driver.memcpy_dtod_async, *arguments),
            }
            calls, rounds = self._setting.exchange_calls, self._setting.n_rounds
            seconds = device_turns(functions, self._driver, self._stream, calls, rounds)
            kernel_bytes = 2 * 2 * _FLOAT * (last - first)  # two arenas read, two written
            copy.close()
            figures = {
                "kernel_ms": seconds["kernel"] * 1e3,
                "kernel_gb_per_second": kernel_bytes / seconds["kernel"] / 1e9,
                "copy_gb_per_second": 2 * block.n_bytes / seconds["copy"] / 1e9,
            }
            figures["kernel_share_of_copy"] = figures["kernel_gb_per_second"] / figures["copy_gb_per_second"]
        self._group.all_gather("rank 0 alone until now")
        return figures

    def average(self, transport: Transport) -> None:
        """Average as a trainer does after its update."""
        transport.all_reduce((0, self._n_elements), "mean")

    def start_library(self, store: str) -> Callable[[], object]:
        """The function by which NCCL (in a rehearsal gloo, which has no mean) averages the first arena."""
        arena = self._blocks[0].tensor(torch.float32, (self._n_elements,))
        torch.distributed.init_process_group(
            self.library, init_method=f"file://{store}", rank=self._group.world.rank, world_size=2
        )
        kind = torch.distributed.ReduceOp
        return partial(torch.distributed.all_reduce, arena, kind.AVG if self.library == "nccl" else kind.SUM)

    def take_turns(self, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds a call, of several one after the other, from both devices idle to this one idle."""
        calls = self._setting.exchange_calls
        taken: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(self._setting.n_rounds + 1):
            for name, function in functions.items():
                self._driver.Context.synchronize()
                self._group.all_gather(f"{name} comes next")
                begin = time.perf_counter()
                for _ in range(calls):
                    function()
                self._stream.synchronize()
                if number:
                    taken[name].append((time.perf_counter() - begin) * 1e3 / calls)
        return {name: median(values) for name, values in taken.items()}

    def close(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for transport in self.transports:
            transport.close()
        for block in self._blocks:
            block.close()
