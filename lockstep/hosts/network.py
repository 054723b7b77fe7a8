"""Sums between hosts: the trainers of equal local rank, one of each host, form a process group of torch's.

A trainer sums its own shard with the trainers of its local rank on the other hosts. So all trainers of a host
share its link, and what is summed inside a host crosses the link once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lockstep.backends.devices import on_gpus
from lockstep.comm.group import World
from lockstep.comm.pipes import START_SECONDS
from lockstep.config import Config
from lockstep.errors import DeadlinePassed, PeerLost, UserError
from lockstep.hosts.all_reduce import (
    AllReduceAlgorithm,
    BFloat16AllReduce,
    LibraryAllReduce,
    ProcessGroup,
    Row,
    TreeAllReduce,
)
from lockstep.runs.plan import HostConnection

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WHAT = "a sum over the network"


class HostNetwork:
    """Collectives among the trainers of equal local rank on all hosts.

    Args:
        world: This trainer's place among all trainers.
        group: The process group, with the host's rank as rank.
        config: The run's, for network_dtype, logical_ranks and timeout.
        device: Of the tensors that are summed.
        name: The library's, for people: gloo or nccl.

    Attributes:
        overlapped: Sums that run in a thread during backward; no other collective may run meanwhile.
        n_bytes: Bytes sent so far, computed from tensor sizes.
    """

    def __init__(
        self, world: World, group: ProcessGroup, config: Config, device: torch.device, name: str
    ) -> None:
        self.world, self.name = world, name
        self._timeout, self._device = config.timeout, device
        self._stages = on_gpus([device]) and name == "gloo"
        others = [str(host) for host in range(world.n_hosts) if host != world.host]
        self.peer = f"trainer {world.local_rank} of host {' or '.join(others)}"
        arguments = group, self.begin, self.wait, world.host, world.n_hosts
        exact = TreeAllReduce if config.logical_ranks is not None else LibraryAllReduce
        self._exact: AllReduceAlgorithm = exact(*arguments)
        self._rounded: AllReduceAlgorithm = (
            BFloat16AllReduce(*arguments) if config.network_dtype == "bfloat16" else self._exact
        )
        self.overlapped: OverlappedReduction | None = None
        self.n_bytes = 0

    @classmethod
    def join(
        cls, world: World, host_connection: HostConnection, config: Config, device: torch.device
    ) -> "HostNetwork":
        """Connect this trainer to its peers. All trainers of all hosts call it.

        Args:
            world: This trainer's place among all trainers.
            host_connection: The store of all hosts, and this host's address.
            config: Names the backend and the dtype of the numbers between hosts.
            device: The device of what is exchanged.

        Raises:
            PeerProblem: A trainer has not joined; the message names its host.
            UserError: The library that `network` names is not available.
        """
        store = _join_store(world, host_connection, max(START_SECONDS, config.timeout))
        with _problems(f"trainer {world.local_rank} of another host", "to connect", config.timeout):
            if _takes_nccl(config, device):
                return cls(world, _nccl(store, world, config.timeout), config, device, "nccl")
            group = _gloo(store, world, host_connection.address, config.timeout)
        return cls(world, group, config, device, "gloo")

    def sum(self, tensors: Sequence[torch.Tensor], rounded: bool = False) -> None:
        """Replace every tensor, (n,), by the sum over all hosts, with equal bits on all of them.

        Args:
            tensors: As many, and of the same sizes, on all hosts.
            rounded: Whether numbers may be rounded on the way, as `network_dtype` says.

        Raises:
            PeerProblem: A host has failed, or does not call it in time.
        """
        algorithm = self._rounded if rounded else self._exact
        for tensor in tensors:
            with self._staged(tensor) as staged:
                self.n_bytes += algorithm.sum(staged)

    def sum_with_row(self, tensors: Sequence[torch.Tensor], row: Row, rounded: bool = False) -> list[Row]:
        """Do as `sum`, and send a row of N_NUMBERS along with the last tensor.

        Returns:
            The rows of all hosts, by host, bit for bit.
        """
        self.sum(tensors[:-1], rounded)
        algorithm = self._rounded if rounded else self._exact
        with self._staged(tensors[-1]) as staged:
            rows, n_bytes = algorithm.sum_with_row(staged, row)
        self.n_bytes += n_bytes
        return rows

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all hosts, by host; they have one size and dtype. Raises as `sum`."""
        with self._staged(tensor if self._stages else tensor.to(self._device)) as staged:
            gathered = self._exact.gather(staged)
        self.n_bytes += (self.world.n_hosts - 1) * tensor.nbytes
        return gathered

    def gather_row(self, row: Row) -> list[Row]:
        """Return the rows of all hosts, by host, each as long as this one. Raises as `sum`."""
        return [each.tolist() for each in self.gather(torch.tensor(row, dtype=torch.float64))]

    def begin(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Start an operation of the group and return its work. Raises PeerProblem if a host has failed."""
        with _problems(self.peer, _WHAT, self._timeout):
            return method(*arguments)

    def wait(self, *works: Any) -> None:
        """Wait until the operations are done. Raises PeerProblem."""
        with _problems(self.peer, _WHAT, self._timeout):
            for work in works:
                work.wait(timedelta(seconds=self._timeout))

    @contextmanager
    def _staged(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the tensor, or for gloo on GPUs a page-locked copy, which is copied back."""
        if not (self._stages and tensor.is_cuda):
            yield tensor
            return
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor)
        yield copy
        tensor.copy_(copy)


class OverlappedReduction:
    """Sums of buckets in a thread, one after the other, while backward computes other gradients.

    Buckets are summed in the order of their numbers, not in the order in which they become full: that order
    may differ among trainers, and all have to join the same sum.

    Args:
        work: Sums the bucket of a number.
        n_overlapped: How many buckets, from 0 on, are summed in the thread; those after them are not.
    """

    def __init__(self, work: Callable[[int], None], n_overlapped: int) -> None:
        self._work, self.n_overlapped = work, n_overlapped
        self._thread = ThreadPoolExecutor(1, "sums over the network")
        self._full: set[int] = set()
        self._started: list[Future[None]] = []

    def mark(self, number: int) -> None:
        """Note that a bucket is complete. To be called once a step for each bucket."""
        self._full.add(number)
        while len(self._started) in self._full and len(self._started) < self.n_overlapped:
            self._started.append(self._thread.submit(self._work, len(self._started)))

    def finish(self) -> None:
        """Wait, after backward, until all overlapped sums of the step are done; a second call does nothing.

        Raises the first sum's error. Every wait of a sum has a deadline.
        """
        if not self._full:
            return
        assert len(self._started) == self.n_overlapped, "all buckets are full at the end of backward"
        for each in self._started:
            each.result()
        self._full.clear()
        self._started.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


@contextmanager
def _problems(peer: str, what: str, seconds: float) -> Iterator[None]:
    """Turn errors of torch.distributed, which do not say whom it waited for, into PeerProblem."""
    try:
        yield
    except RuntimeError as error:  # the base of torch's errors of stores and connections
        first = (str(error).splitlines() or [""])[0]
        if "timed out" in first.lower() or "timeout" in first.lower():
            raise DeadlinePassed(peer, f"waited {seconds:g} s for {peer} ({what})") from error
        raise PeerLost(peer, f"{peer} has left ({what}: {first[:200]})") from error


def _join_store(world: World, host_connection: HostConnection, seconds: float) -> "Store":
    """Return a store for the trainers of this local rank, when all of them have joined."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    patience, name = timedelta(seconds=seconds), f"trainer {world.local_rank}"
    with _problems("host 0", "which has the hosts' store", seconds):
        store = TCPStore(*host_connection.store, is_master=False, timeout=patience, wait_for_workers=False)
    own = PrefixStore(f"{host_connection.prefix}/{name}", store)
    own.set(f"host {world.host}", "is here")
    for host in range(world.n_hosts):
        with _problems(f"{name} of host {host}", "to begin", seconds):
            own.wait([f"host {host}"], patience)
    return own


def _gloo(store: "Store", world: World, address: str, timeout: float) -> ProcessGroup:
    """Return a group over gloo, which listens at that address only."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupGloo(store, world.host, world.n_hosts, options)


def _nccl(store: "Store", world: World, timeout: float) -> ProcessGroup:
    from torch.distributed import ProcessGroupNCCL

    # By default a thread of torch's ends the process with SIGABRT when a sum fails or takes too long. The
    # launcher would name this trainer instead of the lost host. `wait` raises the same error in our thread.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # Another one asks the store each second whether to write a dump, and prints stacks when host 0 has ended.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    return ProcessGroupNCCL(store, world.host, world.n_hosts, options)


def _takes_nccl(config: Config, device: torch.device) -> bool:
    """Return whether to use NCCL. Raises UserError if it is asked for and not available."""
    from torch.distributed import is_nccl_available

    available = on_gpus([device]) and is_nccl_available()
    if config.network == "nccl" and not available:
        raise UserError("network: nccl is for GPUs, with a torch that has it. Set gloo or auto")
    if config.network == "nccl" and config.logical_ranks is not None:
        raise UserError("network: logical_ranks sums along a tree, which needs gloo. Set gloo or auto")
    return available and config.network != "gloo" and config.logical_ranks is None
