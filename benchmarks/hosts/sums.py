"""Two hosts of two trainers: summing 61 M gradients on loopback and over a link of 1 Gbit/s, and overlap.

The link connects two network namespaces of this machine, which only root can create; both are removed again.
"""

import ctypes
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from benchmarks.hosts.packing import packing, products
from benchmarks.hosts.scaling import ALEXNETS_FULL, BFLOAT16, FLOAT32, Link, factors_of_hosts, sum_of_hosts
from benchmarks.measure import medians, table, verdict
from lockstep.comm.group import Group, World
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, Layer, resolve
from lockstep.exchange.host import HostTransport
from lockstep.hosts.addresses import listen
from lockstep.hosts.hierarchical import HierarchicalTransport
from lockstep.hosts.network import HostNetwork
from lockstep.hosts.store import Store
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory
from lockstep.memory.malloc import keep_freed_memory
from lockstep.runs.plan import HostConnection

N_HOSTS, N_LOCAL = 2, 2
N_ELEMENTS = 60_965_224  # of AlexNet
N_CONVOLVED = 2_469_696  # of these, what has no factors
ROWS = 128  # a host, of each fully connected layer
ROW = sum(layer.m + layer.n for layer in ALEXNETS_FULL)
N_BUCKETS, N_OVERLAPPED = 8, 25_600_000
PARTS = "inside", "packing", "products"  # what predictions are made from
AIMS = {"flat": 1.8, "float32": 2.3, "bfloat16": 1.35, "factors": 0.3, "hidden": 0.7}
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


@dataclass(frozen=True)
class Place:
    """The hosts' network namespaces ('' for this process's) and their addresses there."""

    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]
    port: int


class Trainer:
    """One of four trainers, with its connections and a block of `n_elements` to sum."""

    def __init__(
        self, rank: int, pipes: dict[int, Pipe], place: Place, n_local: int, n_elements: int
    ) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()  # as trainers do
        self.host, self.rank = rank // n_local, rank
        _enter(place.namespaces[self.host])
        own = {other % n_local: pipe for other, pipe in pipes.items() if other // n_local == self.host}
        world = World.of_host(self.host, N_HOSTS, n_local)[rank % n_local]
        self.group, self.n_elements = Group(world, own), n_elements
        self._store = Store.serve(listen((place.addresses[0], place.port))) if rank == 0 else None
        self._place = place
        self.block = HostMemory().allocate(4 * n_elements, "gradients")
        self.flat = self.block.tensor(torch.float32, (n_elements,))
        self.inside = HostTransport.open(self.block, "f4", n_elements, self.group)

    def hierarchical(self, wire: str) -> HierarchicalTransport:
        point = self._place.addresses[0], self._place.port
        connection = HostConnection(point, wire, self._place.addresses[self.host])
        network = HostNetwork.join(self.group.everywhere, connection, config_of(wire), self.flat.device)
        return HierarchicalTransport(self.inside, self.flat, network, rounds=True)

    def flat_gloo(self) -> ProcessGroupGloo:
        """Sum with one gloo group of all trainers, as other programs do."""
        store = TCPStore(self._place.addresses[0], self._place.port, is_master=False, wait_for_workers=False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._place.addresses[self.host])]
        options._timeout = timedelta(seconds=60)
        size = self.group.everywhere.size
        return ProcessGroupGloo(PrefixStore("flat", store), self.rank, size, options)


def time_sums(rank: int, pipes: dict[int, Pipe], place: Place, names: tuple[str, ...], rounds: int) -> Any:
    """Return the seconds of a sum of all gradients for each way of summing."""
    trainer = Trainer(rank, pipes, place, N_LOCAL, N_ELEMENTS)
    plain, whole = trainer.hierarchical("float32"), (0, N_ELEMENTS)
    rounded, flat = trainer.hierarchical("bfloat16"), trainer.flat_gloo()
    factors = torch.zeros(ROWS // N_LOCAL * ROW)
    functions: dict[str, Callable[[], object]] = {
        "float32": lambda: plain.all_reduce(whole),
        "bfloat16": lambda: rounded.all_reduce(whole),
        "factors": lambda: (plain._network.gather(factors), plain.all_reduce((0, N_CONVOLVED))),
        "factors, products": lambda: (functions["factors"](), functions["products"]()),
        "flat": lambda: flat.allreduce([trainer.flat]).wait(),
        "inside": lambda: trainer.inside.all_reduce(whole),
        "packing": packing("bfloat16", trainer.flat[slice(*trainer.inside.shard(whole))]),
        "products": products(ROWS, N_LOCAL),
    }
    seconds = medians({name: functions[name] for name in names}, rounds)
    trainer.group.barrier("the end")  # no rank exits while another one measures
    return seconds


def time_overlap(rank: int, pipes: dict[int, Pipe], place: Place) -> dict[str, float]:
    """Return the seconds of a backward pass of products, of the sums of its buckets, and of both together."""
    trainer = Trainer(rank, pipes, place, 1, N_OVERLAPPED)
    step = N_OVERLAPPED // N_BUCKETS
    buckets = [(first, first + step) for first in range(0, N_OVERLAPPED, step)]
    weights = torch.randn(1024, 1024)
    late, early = trainer.hierarchical("float32"), trainer.hierarchical("bfloat16")
    early._network = late._network
    mark = early.overlapped_reduction(buckets, "mean")
    assert mark

    def backward(full: Any = lambda number: None) -> None:
        for number in range(N_BUCKETS):
            for _ in range(3):
                weights @ weights
            full(number)

    def both() -> None:
        backward(mark)
        early.reduce(early, buckets, "mean")

    def network() -> None:
        late._network.overlapped = None
        late.reduce(late, buckets, "mean")
        late._network.overlapped = early._overlapped

    return medians({"backward": backward, "network": network, "both": both}, 3)


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    head = ("61 M gradients, 2 hosts x 2 trainers", "seconds", "aim", "predicted (measured / predicted)")
    here = Place(("", ""), ("127.0.0.1", "127.0.0.1"), free_port())
    seconds = run_ranks(time_sums, N_HOSTS * N_LOCAL, here, ("float32", "flat"), 5)[0]
    times = seconds["flat"] / seconds["float32"]
    rows = [
        head,
        ("loopback", f"{seconds['float32']:.3f}", f"{times:.2f} x, {verdict(times, AIMS['flat'])}", ""),
    ]
    rows.append(("loopback, flat gloo", f"{seconds['flat']:.3f}", "", ""))
    numbers: dict[str, Any] = {"hosts_loopback_seconds": seconds}
    try:
        with _link() as place:
            names = ("float32", "bfloat16", "factors", "factors, products", "flat", *PARTS)
            linked = run_ranks(time_sums, N_HOSTS * N_LOCAL, place, names, 3)[0]
            overlap = run_ranks(time_overlap, N_HOSTS, place)[0]
    except (OSError, subprocess.CalledProcessError) as error:
        rows.append(("1 Gbit/s", "not measured", f"no namespaces here: {error}", ""))
        return table("Several hosts", rows), numbers
    expected = predict(*(linked[name] for name in PARTS))
    for name in names:
        aim = verdict(linked[name], AIMS[name], at_most=True) if name in expected.keys() & AIMS.keys() else ""
        guess = f"{expected[name]:.3f} ({linked[name] / expected[name]:.2f})" if name in expected else ""
        rows.append((f"1 Gbit/s, {name}", f"{linked[name]:.3f}", aim, guess))
    shorter = min(overlap["backward"], overlap["network"])
    hidden = (overlap["backward"] + overlap["network"] - overlap["both"]) / shorter
    words = ", ".join(f"{name} {value:.3f}" for name, value in overlap.items())
    rows.append((f"overlap of {N_OVERLAPPED / 1e6:g} M, 2 x 1", words, verdict(hidden, AIMS["hidden"]), ""))
    numbers |= {"hosts_link_seconds": linked, "hosts_overlap_seconds": overlap, "hosts_hidden": hidden}
    return table("Several hosts", rows), numbers


def predict(inside: float, packing: float, products: float) -> dict[str, float]:
    """Return the seconds of sums over the link that the model in scaling.py predicts from measured parts.

    Args:
        inside: Seconds of a sum within a host.
        packing: Seconds of packing in bfloat16.
        products: Seconds of the products of another host's rows.
    """
    link = Link("1 Gbit/s", 0.119e9, 50e-6, "95 % of the line's bits")
    packed = replace(BFLOAT16, seconds_per_element=packing / N_ELEMENTS)
    factors = inside * N_CONVOLVED / N_ELEMENTS + factors_of_hosts(
        link, N_HOSTS, N_ELEMENTS, ALEXNETS_FULL, ROWS, FLOAT32
    )
    return {
        "float32": inside + sum_of_hosts(link, N_HOSTS, N_ELEMENTS, FLOAT32),
        "bfloat16": inside + sum_of_hosts(link, N_HOSTS, N_ELEMENTS, packed),
        "factors": factors,
        "factors, products": factors + products,
    }


def config_of(wire: str) -> Config:
    """Return the configuration of one of two hosts with this `network_dtype`."""
    keys = {"n_hosts": N_HOSTS, "host_rank": 0, "rendezvous": "10.0.0.1:1", "run_name": "benchmark"}
    return resolve([Layer("benchmark", {**keys, "network_dtype": wire})])[0]


def _enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts, into a network namespace."""
    if not namespace:
        return
    assert threading.active_count() == 1, "other threads would stay where they are"
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"{namespace} can't be entered")


def free_port() -> int:
    """Return a free port of this host's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _link() -> Iterator[Place]:
    """Create two namespaces with a link of 1 Gbit/s. Raises CalledProcessError or OSError."""
    tag = f"{os.getpid() % 10000}{secrets.token_hex(1)}"
    names = f"la{tag}", f"lb{tag}"
    addresses = "10.231.7.1", "10.231.7.2"
    try:
        for name in names:
            _ip(f"netns add {name}")
        _ip(f"link add v{names[0]} netns {names[0]} type veth peer name v{names[1]} netns {names[1]}")
        for name, address in zip(names, addresses, strict=True):
            _ip(f"-n {name} addr add {address}/24 dev v{name}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set v{name} up")
            limit = "root tbf rate 1gbit burst 256kb latency 50ms"
            subprocess.run(["tc", "-n", name, *f"qdisc add dev v{name} {limit}".split()], check=True)
        time.sleep(0.5)  # until the addresses are announced
        yield Place(names, addresses, 29500)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, stderr=subprocess.DEVNULL)
