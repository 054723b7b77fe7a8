"""Helpers of the tests of lockstep.synk: teams of every size, and graphs without a compiler."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

import lockstep.synk as synk

MODE = "FAST_COMPILE"
DEVICES = os.environ.get("LOCKSTEP_TEST_DEVICES", "").split()  # of the suite of callables


@contextmanager
def team(size: int = 2, **options: Any) -> Iterator[int]:
    """Run a team whose graphs Python and NumPy compute, because compiling takes long."""
    synk.close()
    with without_compiler():
        n_ranks = synk.fork(size, **options)
        try:
            yield n_ranks
        finally:
            synk.close()


def without_compiler() -> AbstractContextManager[Any]:
    """Switch PyTensor's compiler off; do nothing if ranks are on GPUs, where PyTensor is not used."""
    if DEVICES:
        return nullcontext()
    import pytensor

    flags: AbstractContextManager[Any] = pytensor.config.change_flags(mode=MODE)
    return flags


def largest_error(found: Any, expected: Any) -> float:
    """Return the largest difference, relative to the largest expected element."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.size:
        return 0.0
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-300))
