"""Which cores a trainer's threads run on with `pin_cores`: apart from those of the others of its host."""

import os
from pathlib import Path

from lockstep.errors import UserError

_CPUS = Path("/sys/devices/system/cpu")


def pin(number: int, n_trainers: int, n_threads: int) -> None:
    """Keeps this process's threads, those that it has yet to start, on the share of trainer `number`.

    Raises UserError where the trainers have more threads than there are cores.
    """
    cores = sorted(os.sched_getaffinity(0), key=_place)
    share = len(cores) // n_trainers  # what doesn't divide stays free
    if n_threads > share:
        raise UserError(
            f"pin_cores: {n_trainers} trainers with {n_threads} threads each need "
            f"{n_trainers * n_threads} cores, and {len(cores)} can be used: "
            "lower cpu_threads, or set pin_cores: false"
        )
    os.sched_setaffinity(0, cores[number * share : (number + 1) * share])


def _place(cpu: int) -> tuple[int, int, int]:
    """Logical processors of a core, and cores of a socket, lie side by side in this order."""
    package, core = (_read(cpu, name) for name in ("physical_package_id", "core_id"))
    return package, core, cpu


def _read(cpu: int, name: str) -> int:
    """0 where the system does not tell."""
    path = _CPUS / f"cpu{cpu}" / "topology" / name
    return int(path.read_text()) if path.exists() else 0
