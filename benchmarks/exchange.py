"""Averaging AlexNet's 61 M weights and 61 M momenta between 2 processes: ours, gloo, and memcpy."""

import os
import tempfile
from typing import Any

import torch
import torch.distributed

from benchmarks.measure import medians, table
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.exchange.host import HostTransport
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory

N_ELEMENTS = 2 * 60_965_224


def measure(rank: int, pipes: dict[int, Pipe], store: str) -> dict[str, float]:
    """Seconds for one average of everything, each rank with one thread."""
    torch.set_num_threads(1)
    group = Group.on_one_host(rank, pipes)
    block = HostMemory().allocate(4 * N_ELEMENTS, "the arena")
    ours = block.tensor(torch.float32, (N_ELEMENTS,))
    ours.fill_(rank + 1.0)
    transport = HostTransport.open(block, "f4", N_ELEMENTS, group)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    copy = torch.empty_like(ours)

    def lockstep_exchange() -> None:
        transport.all_reduce((0, N_ELEMENTS), "mean")

    def gloo_all_reduce() -> None:
        torch.distributed.all_reduce(ours)
        ours.div_(2)

    def memcpy() -> None:  # both ranks at once, as in the exchange
        group.barrier("copy")
        copy.copy_(ours)
        group.barrier("copied")

    functions = {"lockstep": lockstep_exchange, "gloo": gloo_all_reduce, "memcpy": memcpy}
    seconds = medians(functions, rounds=15)
    torch.distributed.destroy_process_group()
    return seconds


def run() -> tuple[str, dict[str, Any]]:
    """The table and the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_ranks(measure, 2, os.path.join(folder, "store"))[0]
    rows: list[tuple[str, ...]] = [("what", "ms", "against gloo")]
    names = {
        "lockstep": "Lockstep: average in shards, both barriers",
        "gloo": "gloo: all-reduce, then divide",
        "memcpy": "memcpy of one arena in each process",
    }
    for key, name in names.items():
        rows.append((name, f"{seconds[key] * 1e3:.1f}", f"{seconds['gloo'] / seconds[key]:.1f} x"))
    title = "Exchange: 61 M weights and 61 M momenta (488 MB) between 2 processes, one thread each"
    return table(title, rows), {"exchange_seconds": seconds}


if __name__ == "__main__":
    print(run()[0])
