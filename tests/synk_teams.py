"""What the tests of lockstep.synk share: teams of every size, and graphs without a compiler."""

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
    """A team whose graphs are computed by Python and NumPy: nothing is compiled, which takes long."""
    synk.close()
    with without_compiler():
        n_ranks = synk.fork(size, **options)
        try:
            yield n_ranks
        finally:
            synk.close()


def without_compiler() -> AbstractContextManager[Any]:
    """Nothing where ranks are on GPUs: PyTensor is not for them, and takes time to be imported."""
    if DEVICES:
        return nullcontext()
    import pytensor

    flags: AbstractContextManager[Any] = pytensor.config.change_flags(mode=MODE)
    return flags


def largest_error(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest element expected."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.size:
        return 0.0
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-300))
