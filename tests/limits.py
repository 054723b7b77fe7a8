"""How long a test waits: seconds on an idle machine with two cores, times how slow this one is just now.

A limit is there to find what hangs, so it may be generous; it only must not be lost by a machine that has
other work. How slow it is, is measured once, when the session begins, and shared by all of its workers.
"""

import os
import time

_MEASURED = "LOCKSTEP_TESTS_SLOWNESS"  # in the environment, which pytest-xdist's workers inherit
_SPINS = 20_000_000
_IDLE_SECONDS = 0.2  # for so many on a core of docs/results/cpu.md with nothing else to do


def measure(n_workers: int) -> None:
    """Takes the time of a fixed piece of work, in a fraction of a second; to be called before all limits.

    n_workers: of this session; each keeps two cores busy.
    """
    if _MEASURED not in os.environ:
        begin = time.monotonic()
        for _ in range(_SPINS):
            pass
        slowness = (time.monotonic() - begin) / _IDLE_SECONDS
        os.environ[_MEASURED] = str(max(1.0, slowness) * max(1.0, 2 * n_workers / _count_cores()))


def limit(seconds: float) -> float:
    """Seconds to wait for what takes less than `seconds` on the idle machine.

    Work that has come since the session began counts too, by the kernel's average of the last minute.
    """
    return seconds * max(float(os.environ[_MEASURED]), os.getloadavg()[0] / _count_cores())


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))
