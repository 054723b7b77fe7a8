"""Trainers of several hosts as processes of one test, connected by pipes within a host and by sockets."""

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conftest import make_config
from safetensors.numpy import load_file
from training_runs import Tensors, newest

from lockstep.comm.group import Group, World
from lockstep.comm.messages import Stop
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.hosts.store import Store
from lockstep.launch.ranks import DEADLINE, run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.network import gradients
from lockstep.runs.plan import RunPlan
from train_funcs import Trainer

LOCAL = "127.0.0.1"
_BUCKET = 1 << 22  # elements; the default


@dataclass(frozen=True)
class Here:
    """The address of the store, and the address that trainers listen on."""

    store: tuple[str, int]
    prefix: str = "test"
    address: str = LOCAL


def serve() -> tuple[Store, Here]:
    """Return a store on a free port, which lives as long as it is referenced, and its address."""
    import socket

    listener = socket.socket()
    listener.bind((LOCAL, 0))
    listener.listen()
    here = Here(listener.getsockname())
    return Store.serve(listener), here


def make_group(rank: int, pipes: dict[int, Pipe], n_hosts: int) -> Group:
    """Return the group of the trainers of this rank's host; `rank` counts the trainers of all hosts."""
    n_local = (len(pipes) + 1) // n_hosts
    world = World.of_host(rank // n_local, n_hosts, n_local)[rank % n_local]
    own = {other % n_local: pipe for other, pipe in pipes.items() if other // n_local == world.host}
    return Group(world, own)


def train_rank(
    rank: int,
    pipes: dict[int, Pipe],
    config: Config,
    place: Path,
    here: Here,
    double: bool,
    start: Path | None,
    stopped: bool,
    bucket: int,
) -> tuple[Tensors, list[str]]:
    """Train to the end; return the arena's tensors and the messages that this trainer sent to its launcher.

    Args:
        bucket: Elements of a bucket.
    """
    gradients._BUCKET = bucket
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    group = make_group(rank, pipes, config.n_hosts)
    ours, theirs = multiprocessing.Pipe()
    launcher = Pipe(theirs, "the trainer", DEADLINE)
    folder = place / f"host{group.everywhere.host}"
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    if start:
        start = folder / "checkpoints" / start.name
    plan = RunPlan(config, folder, start, here if config.n_hosts > 1 else None)
    trainer = Trainer(plan, group, Pipe(ours, "the launcher", DEADLINE), StatusBoard.create())
    if stopped and rank == len(pipes):
        launcher.send(Stop())
    overlapped = trainer.coordinator.network.overlapped if trainer.coordinator.network else None
    assert overlapped is None or (overlapped.n_overlapped > 0) == (bucket < _BUCKET)
    assert trainer.run() == stopped
    trainer.close()
    messages = []
    while launcher.poll():
        messages.append(launcher.receive(object, "a message"))
    arena = trainer.program.arena.tensors
    return {name: tensor.numpy().copy() for name, tensor in arena.items()}, messages


def train(
    n_hosts: int,
    n_local: int,
    data: Path,
    place: Path,
    double: bool = True,
    start: Path | None = None,
    stopped: bool = False,
    received: list[Any] | None = None,
    bucket: int = _BUCKET,
    **values: Any,
) -> Tensors:
    """Train with 8 images per step and return the last checkpoint, which is the same file on all hosts.

    Args:
        received: A list to which the messages of host 0's trainer 0 are added.
    """
    fixed = {"data_folder": str(data), "para_load": False, "global_batch_size": 8, "shuffle_block": 3}
    of_hosts = (
        {"n_hosts": n_hosts, "host_rank": 0, "rendezvous": "here:1", "run_name": "test"}
        if n_hosts > 1
        else {}
    )
    config, _ = settle(make_config(devices=["cpu"] * n_local, **{**fixed, **of_hosts, **values}))
    _store, here = serve()
    arguments = config, place, here, double, start, stopped, bucket
    first, *others = run_ranks(train_rank, n_hosts * n_local, *arguments)
    for other, _ in others:
        assert all(first[0][name].tobytes() == other[name].tobytes() for name in other)
    files = [newest(place / f"host{host}") for host in range(n_hosts)]
    assert len({path.read_bytes() for path in files}) == 1
    if received is not None:
        received += first[1]
    return load_file(files[0])
