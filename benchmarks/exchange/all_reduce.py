"""Averaging AlexNet's 61 M weights and 61 M momenta between 2, 3 and 4 processes, beside gloo and memcpy."""

import os
import tempfile
from typing import Any

import torch
import torch.distributed

from benchmarks.measure import medians, table, verdict
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.exchange.host import HostTransport
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory

N_ELEMENTS = 2 * 60_965_224
RANKS = (2, 3, 4)
OF_GLOO, OF_MEMCPY = 10, 0.8  # targets: speed relative to gloo, and to memcpy of all arenas


def measure(rank: int, pipes: dict[int, Pipe], store: str) -> dict[str, float]:
    """Return the seconds of one average of all elements, with one thread per rank."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    block = HostMemory().allocate(4 * N_ELEMENTS, "the arena")
    ours = block.tensor(torch.float32, (N_ELEMENTS,))
    ours.fill_(rank + 1.0)
    transport = HostTransport.open(block, "f4", N_ELEMENTS, group)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(pipes) + 1
    )
    copy = torch.empty_like(ours)

    def lockstep_exchange() -> None:
        transport.all_reduce((0, N_ELEMENTS), "mean")

    def gloo_all_reduce() -> None:
        torch.distributed.all_reduce(ours)
        ours.div_(len(pipes) + 1)

    def memcpy() -> None:  # all ranks at once, with the same bytes as the exchange
        group.barrier("copy")
        copy.copy_(ours)
        group.barrier("copied")

    functions = {"lockstep": lockstep_exchange, "gloo": gloo_all_reduce, "memcpy": memcpy}
    seconds = medians(functions, rounds=15)
    torch.distributed.destroy_process_group()
    return seconds


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    rows: list[tuple[str, ...]] = [
        ("processes", "Lockstep, ms", "gloo, ms", "memcpy, ms", "of gloo", "of memcpy")
    ]
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks in RANKS:
            seconds = run_ranks(measure, n_ranks, os.path.join(folder, f"store{n_ranks}"))[0]
            numbers[f"exchange_seconds_{n_ranks}"] = seconds
            gloo, memcpy = (seconds[peer] / seconds["lockstep"] for peer in ("gloo", "memcpy"))
            milliseconds = [f"{seconds[name] * 1e3:.1f}" for name in ("lockstep", "gloo", "memcpy")]
            words = f"{gloo:.1f} x, {verdict(gloo, OF_GLOO)}", f"{memcpy:.2f} x, {verdict(memcpy, OF_MEMCPY)}"
            rows.append((str(n_ranks), *milliseconds, *words))
    title = "Exchange: average 61 M weights and 61 M momenta (488 MB) in shards, one thread a process"
    return table(title, rows), numbers
