"""Two trainers beside DistributedDataParallel on gloo with the same network and global batch."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed
import torch.nn.functional as F

from benchmarks.peers.contender import BATCH
from lockstep.comm.pipes import Pipe
from lockstep.launch.ranks import run_ranks

_STEPS = 40


def train(rank: int, pipes: dict[int, Pipe], store: str) -> float:
    """Return the images per second of both on a resident batch, without loading."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    network = torch.nn.parallel.DistributedDataParallel(importlib.import_module("models.smallnet").Model(10))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6, momentum=0.9, weight_decay=0.0005)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    for number in range(_STEPS + 5):
        if number == 5:
            begin = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    torch.distributed.destroy_process_group()
    return 2 * BATCH * _STEPS / seconds


def ddp(folder: Path, number: int) -> float:
    """Return the images per second of two ranks of DistributedDataParallel."""
    rates: list[float] = run_ranks(train, 2, str(folder / f"store{number}"))
    return median(rates)


def lockstep(folder: Path, number: int) -> float:
    """Return the speed of train.py with two trainers, two loaders and files: the median over its lines."""
    keys = {"weights_dir": folder, "run_name": f"run{number}", "devices": "[cpu,cpu]", "n_epochs": 2}
    keys |= {"batch_size": BATCH, "cpu_threads": 1, "print_freq": 10, "data_folder": "data/digits"}
    words = [f"{key}={value}" for key, value in keys.items()]
    subprocess.run([sys.executable, "train.py", *words], check=True, capture_output=True)
    lines = (folder / f"run{number}" / "log.jsonl").read_text().splitlines()
    rates = [e["images_per_second"] for e in map(json.loads, lines) if e["event"] == "progress"]
    return float(median(rates[1:]))
