"""Functions over data on all cores: the programming interface of Synkhronos (Stooke and Abbeel 2017, arXiv
1710.04162).

A program stays serial. It builds functions as with PyTensor; each call runs on all ranks at once, every one
on its share of the rows, and what they give is folded into one result:

    import numpy as np
    import pytensor.tensor as pt
    import lockstep.synk as synk

    synk.fork()                                      # this process is one rank, the others are started
    x = pt.matrix("x")
    f = synk.function([x], (pt.tanh(x).sum(axis=0), "sum"))
    synk.distribute()                                # functions and shared variables go to the ranks
    print(f(np.ones((1000, 3))))

docs/synk.md is the guide. Nothing here imports PyTensor or torch before a function needs it.
"""

from typing import Any

from lockstep.synk import data as _data
from lockstep.synk.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    scatter,
    set_value,
)
from lockstep.synk.data import Data
from lockstep.synk.distributing import distribute, function
from lockstep.synk.functions import Function
from lockstep.synk.interrupts import RankLost
from lockstep.synk.session import close, current_team, fork

__all__ = [
    "Data",
    "Function",
    "RankLost",
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "data",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "grads",
    "reduce",
    "scatter",
    "set_value",
    "share",
    "weights",
]


def data(
    value: Any = None,
    var: Any = None,
    dtype: Any = None,
    ndim: int | None = None,
    shape: Any = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """An array that all ranks can read, for inputs of functions and values of collectives.

    value: an array. var: a variable that gives dtype, ndim and name. dtype, ndim, shape: what is given here
    is obeyed. minibatch: its rows are those of a batch, not of the whole. force_cast: cast even where
    something may be lost. oversize: from 1 to 2, room for growing. name: for errors.

    Raises RuntimeError before fork(), TypeError without dtype or ndim and for unsafe casts, ValueError for
    shapes that don't fit, MemoryError.
    """
    team = current_team("data()")
    return _data.make_data(team, value, var, dtype, ndim, shape, minibatch, force_cast, oversize, name)


def share(module_or_tensor: Any) -> Any:
    """Puts a torch module's parameters and buffers, or a tensor, where all ranks reach them. Returns it.

    After distribute() every rank has its own, with this process's values at first. Raises TypeError for
    parameters of several dtypes, for dtypes that NumPy has not, and for what is not on the CPU.
    """
    from lockstep.synk.programs import sharing

    return sharing.share(module_or_tensor)


def weights(module: Any) -> Any:
    """All parameters of a shared module as one vector, for collectives and `updates`."""
    from lockstep.synk.programs import sharing

    return sharing.vectors(module, "weights()")[0]


def grads(module: Any) -> Any:
    """All gradients of a shared module's parameters as one vector, for collectives and `updates`."""
    from lockstep.synk.programs import sharing

    return sharing.vectors(module, "grads()")[1]
