"""Setting up a process that computes with a network: its cores, its memory errors, and its exchange."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.backends import Backend
from lockstep.backends.devices import are_mixed, count_cores
from lockstep.comm.group import Group, World
from lockstep.comm.messages import Order
from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.errors import BATCH_KEYS, UserError
from lockstep.exchange.transport import Transport
from lockstep.launch.status import StatusBoard
from lockstep.network.program import CheckedGradients, Program
from lockstep.network.recorder import Recorder
from lockstep.sync import Rule
from lockstep.sync.factory import make_rule
from lockstep.sync.replica_check import ReplicaCheck, check_replicas
from lockstep.threads import prepare_square_roots
from lockstep.trainer.coordinator import Coordinator
from lockstep.trainer.counts import Counts
from lockstep.trainer.recheck import Recheck

_CPUS = Path("/sys/devices/system/cpu")
_NO_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # in a plain RuntimeError of torch


@contextmanager
def computing(config: Config, world: World, board: StatusBoard) -> Iterator[None]:
    """Set torch's threads and cores for the block, and turn torch's errors into messages for the user.

    Raises:
        UserError: Memory is exhausted, or the network has an operation that `deterministic` forbids.
    """
    n_threads = config.cpu_threads or max(1, count_cores() // world.local_size)
    prepare_square_roots()
    torch.set_num_threads(n_threads)
    if config.pin_cores:
        pin_cores(world.local_rank, world.local_size, n_threads)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _NO_HOST_MEMORY in str(error):
            text = f"{config.devices[world.local_rank]} is out of memory ({board.read()}): {error}"
            raise UserError(f"{text}; lower {BATCH_KEYS}, or use a smaller model") from error
        if "use_deterministic_algorithms" in str(error):
            raise UserError(f"deterministic: the network has an operation that is not: {error}") from error
        raise


def pin_cores(local_rank: int, n_trainers: int, n_threads: int) -> None:
    """Restrict this process's present and future threads to the cores of one trainer.

    Args:
        local_rank: The trainer's rank on this host.
        n_trainers: The number of trainers on this host.
        n_threads: The number of threads of each trainer.

    Raises:
        UserError: The trainers have more threads than there are cores.
    """
    cores = sorted(os.sched_getaffinity(0), key=_topology)
    share = len(cores) // n_trainers  # a remainder stays free
    if n_threads > share:
        raise UserError(
            f"pin_cores: {n_trainers} trainers with {n_threads} threads each need "
            f"{n_trainers * n_threads} cores, and {len(cores)} can be used: "
            "lower cpu_threads, or set pin_cores: false"
        )
    os.sched_setaffinity(0, cores[local_rank * share : (local_rank + 1) * share])


def _topology(cpu: int) -> tuple[int, int, int]:
    """Return a sort key that puts a core's logical processors, and a socket's cores, side by side."""
    package, core = (_read_topology(cpu, name) for name in ("physical_package_id", "core_id"))
    return package, core, cpu


def _read_topology(cpu: int, name: str) -> int:
    """Return a number from sysfs, 0 if the system does not have it."""
    path = _CPUS / f"cpu{cpu}" / "topology" / name
    return int(path.read_text()) if path.exists() else 0


@dataclass(frozen=True)
class OpenExchange:
    """A trainer's part in the exchange.

    Attributes:
        transport: Over the arenas of all trainers.
        rule: What the trainers exchange after a step.
        replicas: The comparison of their replicas during training.
        counts: The integer buffers of this trainer.
    """

    transport: Transport
    rule: Rule
    replicas: ReplicaCheck
    counts: Counts

    def after_step(self, order: Order, synchronized: bool) -> None:
        """Make counts equal, and compare the replicas if that is due. order: The step's last minibatch."""
        self.counts.after_step(order)
        self.replicas.after_step(order, synchronized and self.rule.equal)

    def close(self) -> None:
        """Close the other trainers' memory."""
        self.rule.close()
        self.transport.close()


def open_exchange(
    config: Config,
    backend: Backend,
    program: Program,
    group: Group,
    coordinator: Coordinator,
    recorder: Recorder,
    rule_state: dict[str, torch.Tensor],
) -> OpenExchange:
    """Open the transport over all trainers' arenas and the rule, and have the device's kernels used.

    All trainers call it at the same time. Their replicas are compared at once.

    Args:
        group: The trainers of this host.
        coordinator: The trainers of all hosts.
        recorder: Its stopwatch measures the phases of an exchange.
        rule_state: The rule's tensors in the checkpoint to resume from.

    Raises:
        UserError: The configured exchange is not possible.
    """
    arena = program.arena
    mixed = are_mixed(config.devices)
    kind = "staged" if mixed else config.exchange
    transport, reason = backend.open_transport(kind, arena.block, arena.flat, group)
    reason = "between CPUs and GPUs" if mixed else reason
    transport = coordinator.hierarchical(transport, arena.flat)
    is_single = coordinator.world.size == 1
    average = "none: a single trainer" if is_single else f"{transport.name}, rule: {rule_of(config)}"
    program.implementations = {**program.implementations, "average": average}
    if not is_single:  # a single trainer has no exchange, and events for its phases would only cost time
        transport.clock = recorder.stopwatch.enter
    check_replicas(group, arena, "the start", coordinator.alike)
    rule = make_rule(config, program, transport, rule_state)
    if config.sync_batch_norm and group.pipes:  # a single trainer has all images
        program.share_statistics(transport)
    if config.recheck_every and group.pipes:
        assert isinstance(program, CheckedGradients)
        program.recheck = Recheck(config, group, backend, program, program.digest_of)
    exchange = f"exchange: {transport.name}: {reason}" if reason else ""
    for note in filter(None, (backend.speed_up(program, config), exchange)):
        program.warn(note)
    replicas = ReplicaCheck(group, arena, config.check_every, coordinator.alike)
    return OpenExchange(transport, rule, replicas, Counts(config, arena, coordinator))
