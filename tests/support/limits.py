"""Time limits of tests: seconds on an idle machine with two cores, scaled by the speed of this machine.

A limit detects a hang, so it can be generous; a busy machine must not exceed it. The speed is measured
once, at the start of the session, and shared by all of its workers.
"""

import os
import time

_MEASURED = "LOCKSTEP_TESTS_SLOWNESS"  # in the environment, which pytest-xdist's workers inherit
_SPINS = 20_000_000
_IDLE_SECONDS = 0.2  # for this many iterations on an idle core of docs/results/cpu.md


def measure(n_workers: int) -> None:
    """Measure the speed of this machine. Call this before `limit`.

    Args:
        n_workers: Number of this session's workers; each keeps two cores busy.
    """
    if _MEASURED not in os.environ:
        begin = time.monotonic()
        for _ in range(_SPINS):
            pass
        slowness = (time.monotonic() - begin) / _IDLE_SECONDS
        os.environ[_MEASURED] = str(max(1.0, slowness) * max(1.0, 2 * n_workers / _count_cores()))


def limit(seconds: float) -> float:
    """Return the seconds to wait for work that takes less than `seconds` on an idle machine.

    The kernel's load average accounts for other work since the start of the session.
    """
    return seconds * max(float(os.environ[_MEASURED]), os.getloadavg()[0] / _count_cores())


def _count_cores() -> int:
    return len(os.sched_getaffinity(0))
