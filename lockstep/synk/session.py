"""The one team of this process, from fork() to close()."""

import atexit
import operator
import os
from collections.abc import Sequence

from lockstep.errors import UserError
from lockstep.synk.team import Team


class _Session:
    """What there is one of in a process."""

    team: Team | None = None


def fork(
    n_parallel: int | None = None,
    use_gpu: bool | None = None,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int | None = None,
    max_dim: int | None = None,
    devices: Sequence[str] | None = None,
    threads: int | None = None,
    wait_deadline: float = 300,
) -> int:
    """Starts the other ranks; returns the number of ranks.

    n_parallel: how many, this process among them; else $LOCKSTEP_SYNK_PARALLEL, else one for each device,
    else one for each core. use_gpu: ranks are on GPUs, for torch callables: all that are visible. devices:
    one for each rank, 'cpu' or 'cuda:<n>'. master_rank: this process's rank. profile_workers: workers leave
    synk_worker_<rank>.prof. max_n_var, max_dim: limits of Synkhronos, accepted and unused. threads: of BLAS
    and OpenMP in every rank; else cores divided by ranks. wait_deadline: seconds that this process waits for
    a rank, from when it has done its own part.

    Raises RuntimeError where there are ranks already, ValueError for numbers that make no sense.
    """
    if _Session.team is not None and not _Session.team.closed:
        raise RuntimeError("fork(): there is a team already; close() ends it")
    gpus = _choose_devices(use_gpu, devices)
    size = _choose_size(n_parallel, devices or gpus)
    if not 0 <= operator.index(master_rank) < size:
        raise ValueError(f"fork(): master_rank={master_rank} is none of the {size} ranks")
    if wait_deadline <= 0:
        raise ValueError(f"fork(): wait_deadline={wait_deadline} is no time")
    n_threads = max(1, _count_cores() // size) if threads is None else operator.index(threads)
    if n_threads < 1:
        raise ValueError(f"fork(): threads={threads}: a rank has one or more")
    _Session.team = Team(size, master_rank, n_threads, profile_workers, wait_deadline, gpus)
    return size


def close() -> None:
    """Ends the other ranks, and gives this process its threads back. Harmless without a team."""
    if _Session.team is not None:
        _Session.team.close()


def current_team(what: str) -> Team:
    """The team. Raises RuntimeError where there is none, RankLost where one is lost."""
    team = _Session.team
    if team is None or team.closed:
        raise RuntimeError(f"{what}: call fork() first")
    team.check()
    return team


def distributed_team(what: str) -> Team:
    """The same after distribute()."""
    team = current_team(what)
    if not team.distributed:
        raise RuntimeError(f"{what}: call distribute() first")
    return team


def _choose_size(n_parallel: int | None, devices: Sequence[str] | None) -> int:
    given = os.environ.get("LOCKSTEP_SYNK_PARALLEL")
    if n_parallel is None and given:
        if not given.isdigit():
            raise ValueError(f"LOCKSTEP_SYNK_PARALLEL={given!r}: it is the number of ranks")
        n_parallel = int(given)
    if n_parallel is None:
        n_parallel = len(devices) if devices else _count_cores()
    size = operator.index(n_parallel)
    if size < 1:
        raise ValueError(f"fork(): {size} ranks: there is one or more")
    if devices and len(devices) != size:
        raise ValueError(f"fork(): {len(devices)} devices for {size} ranks")
    return size


def _count_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _choose_devices(use_gpu: bool | None, devices: Sequence[str] | None) -> tuple[str, ...]:
    """The GPUs that ranks are to be on; none for CPUs."""
    if devices is None and not use_gpu:
        return ()
    from lockstep.backends import devices as known  # now: it brings much that workers need not

    if devices is None:
        names, reason = known.choose()
        if not known.on_gpus(names):
            raise UserError(f"fork(): use_gpu, but {reason}")
    else:
        names = known.normalise(tuple(devices))
    known.check(names)
    return names if known.on_gpus(names) else ()


atexit.register(close)
