"""Sums between hosts: the trainers of one local rank, one of each host, form a process group of torch's.

A trainer sums its own shard with those of its likes on the other hosts. So all of a host's trainers use its
link at once, and what is summed inside a host crosses it once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from lockstep.backends.devices import on_gpus
from lockstep.comm.group import World
from lockstep.comm.pipes import START_SECONDS
from lockstep.config import Config
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import DeadlinePassed, PeerLost, UserError
from lockstep.hosts.early import EarlySums
from lockstep.hosts.riders import Row
from lockstep.hosts.sums import AllReduce, Connected, Rounded, Tree, Way
from lockstep.hosts.wire import BFloat16, Int8, Wire
from lockstep.runs.plan import Joint

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_WHAT = "a sum over the network"
WIRES: dict[str, type[Wire]] = {"bfloat16": BFloat16, "int8": Int8}


class Network:
    """A trainer's way to its likes. world: its place among all trainers. device: of what it sums.

    name: for people. rider: numbers that go with the next `sum`. rows: all hosts', of the last one that had a
    rider. early: sums in another thread, while there is a backward pass. n_bytes: that this trainer has sent
    in sums and rows of factors, by way of calculation.
    """

    def __init__(
        self, world: World, group: Connected, config: Config, device: torch.device, name: str
    ) -> None:
        self.world, self.name, self._seed = world, name, config.seed
        self._deadline, self._device = config.wait_deadline, device
        self._stages = on_gpus([device]) and name == "gloo"
        others = [str(host) for host in range(world.n_hosts) if host != world.host]
        self.peer = f"trainer {world.local_rank} of host {' or '.join(others)}"
        place = group, self.begin, self.wait, world.host, world.n_hosts
        self._exact: Way = Tree(*place) if config.parts is not None else AllReduce(*place)
        here = torch.device("cpu") if self._stages else device
        self._rounded = Rounded(*place, WIRES[config.wire](), here) if config.wire in WIRES else None
        self.early: EarlySums | None = None
        self.rider: Row | None = None
        self.rows: list[Row] = []
        self.n_bytes = 0

    @classmethod
    def join(cls, world: World, joint: Joint, config: Config, device: torch.device) -> "Network":
        """All trainers of all hosts call it. Raises PeerProblem naming the host whose trainer has not come.

        Raises UserError where `network` can't be had.
        """
        likes = _come_together(world, joint, max(START_SECONDS, config.wait_deadline))
        with _problems(f"trainer {world.local_rank} of another host", "to connect", config.wait_deadline):
            if _takes_nccl(config, device):
                return cls(world, _nccl(likes, world, config.wait_deadline), config, device, "nccl")
            group = _gloo(likes, world, joint.address, config.wait_deadline)
        return cls(world, group, config, device, "gloo")

    def begin_step(self, epoch: int, position: int) -> None:
        """What is rounded at random in this step is a function of its place."""
        if self._rounded:
            seed = seed_of(Purpose.WIRE, self._seed, epoch, position, self.world.rank)
            self._rounded.generator.manual_seed(seed)

    def sum(self, tensors: Sequence[torch.Tensor], rounded: bool = False) -> None:
        """Every tensor, (n,), becomes the sum of all hosts', with equal bits on all of them.

        The rider, where there is one, goes with the last. rounded: as `wire` says. All hosts call it with as
        many tensors of the same sizes. Raises PeerProblem where a host has gone, or does not come in time.
        """
        way = self._rounded if rounded and self._rounded else self._exact
        for tensor in tensors[:-1]:
            with self._staged(tensor) as here:
                self.n_bytes += way.sum(here)
        with self._staged(tensors[-1]) as here:
            if self.rider is None:
                self.n_bytes += way.sum(here)
                return
            self.rows, n_bytes = way.sum_with(here, self.rider)
            self.n_bytes += n_bytes
            self.rider = None

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All hosts', in order; they have one size and dtype. Raises as `sum` does."""
        with self._staged(tensor if self._stages else tensor.to(self._device)) as here:
            found = self._exact.gather(here)
        self.n_bytes += (self.world.n_hosts - 1) * tensor.nbytes
        return found

    def gather_row(self, row: Row) -> list[Row]:
        """All hosts' rows, in order, each as long as this one. Raises as `sum` does."""
        return [each.tolist() for each in self.gather(torch.tensor(row, dtype=torch.float64))]

    def begin(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """A work of the group's. Raises PeerProblem where it is known by now that a host has gone."""
        with _problems(self.peer, _WHAT, self._deadline):
            return method(*arguments)

    def wait(self, *works: Any) -> None:
        """Until what was begun is done. Raises PeerProblem."""
        with _problems(self.peer, _WHAT, self._deadline):
            for work in works:
                work.wait(timedelta(seconds=self._deadline))

    @contextmanager
    def _staged(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The tensor, or a page-locked copy of it, whose content then comes back."""
        if not (self._stages and tensor.is_cuda):
            yield tensor
            return
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor)
        yield copy
        tensor.copy_(copy)


@contextmanager
def _problems(peer: str, what: str, seconds: float) -> Iterator[None]:
    """Makes errors of torch.distributed's into ours: they don't say whom it waited for."""
    try:
        yield
    except RuntimeError as error:  # of which torch's errors of stores and of connections are kinds
        first = (str(error).splitlines() or [""])[0]
        if "timed out" in first.lower() or "timeout" in first.lower():
            raise DeadlinePassed(peer, f"waited {seconds:g} s for {peer} ({what})") from error
        raise PeerLost(peer, f"{peer} has left ({what}: {first[:200]})") from error


def _come_together(world: World, joint: Joint, seconds: float) -> "Store":
    """A store for the trainers of this local rank, when all of them are there."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    patience, name = timedelta(seconds=seconds), f"trainer {world.local_rank}"
    with _problems("host 0", "which has the hosts' store", seconds):
        store = TCPStore(*joint.store, is_master=False, timeout=patience, wait_for_workers=False)
    likes = PrefixStore(f"{joint.prefix}/{name}", store)
    likes.set(f"host {world.host}", "is here")
    for host in range(world.n_hosts):
        with _problems(f"{name} of host {host}", "to begin", seconds):
            likes.wait([f"host {host}"], patience)
    return likes


def _gloo(store: "Store", world: World, address: str, deadline: float) -> Connected:
    """It listens at that address alone."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=deadline)
    return ProcessGroupGloo(store, world.host, world.n_hosts, options)


def _nccl(store: "Store", world: World, deadline: float) -> Connected:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline)
    return ProcessGroupNCCL(store, world.host, world.n_hosts, options)


def _takes_nccl(config: Config, device: torch.device) -> bool:
    """Raises UserError where NCCL is asked for and can't be had."""
    from torch.distributed import is_nccl_available

    if config.network == "nccl" and not (on_gpus([device]) and is_nccl_available()):
        raise UserError("network: nccl is for GPUs, and in torch for these: set gloo or auto")
    if config.network == "nccl" and config.parts is not None:
        raise UserError("network: parts are added along a tree, which is done by gloo: set gloo or auto")
    wanted = config.network == "nccl" or (on_gpus([device]) and is_nccl_available())
    return wanted and config.network != "gloo" and config.parts is None
