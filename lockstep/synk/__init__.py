"""Functions over data on all cores, with the programming interface of Synkhronos.

(Stooke and Abbeel 2017, arXiv 1710.04162.) The program stays serial. It builds functions as with PyTensor.
Each call runs on all ranks at once, each rank computes its share of the rows, and the results are reduced to
one:

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
from lockstep.synk.functions import Function
from lockstep.synk.interrupts import RankLost
from lockstep.synk.session import close, current_team, distribute, fork, function

__all__ = [
    "Data",
    "Function",
    "RankLost",
    "all_gather",
    "all_reduce",
    "broadcast",
    "buffers",
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
    """Return an array in shared memory, for inputs of functions and values of collectives.

    Args:
        value: Initial value.
        var: Symbolic variable that supplies dtype, ndim and name.
        dtype, ndim: Override what `value` and `var` supply.
        shape: Shape without a value. A value has its own shape, in memory of this size or larger.
        minibatch: The array holds only the rows of a batch, not of the whole data set.
        force_cast: Cast even if the cast loses information.
        oversize: Allocate this multiple of the size, from 1 to 2.
        name: Name in error messages.

    Raises:
        RuntimeError: fork() was not called.
        TypeError: dtype or ndim is unknown, or a cast would lose information.
        ValueError: The shape has another number of dimensions.
        MemoryError: The host has too little memory.
    """
    team = current_team("data()")
    return _data.make_data(
        team,
        value,
        var=var,
        dtype=dtype,
        ndim=ndim,
        shape=shape,
        minibatch=minibatch,
        force_cast=force_cast,
        oversize=oversize,
        name=name,
    )


def share(module_or_tensor: Any) -> Any:
    """Move a torch module's parameters and buffers, or a tensor, to shared memory, and return it.

    After distribute() every rank has its own copy, which starts with this process's values.

    Raises:
        TypeError: The parameters have several dtypes, NumPy lacks the dtype, or a tensor is not on the CPU.
    """
    from lockstep.synk import sharing

    return sharing.share(current_team("share()"), module_or_tensor)


def weights(module: Any) -> Any:
    """Return all parameters of a shared module as one vector, for collectives and `updates`."""
    from lockstep.synk import sharing

    return sharing.vectors(current_team("weights()"), module, "weights()")[0]


def grads(module: Any) -> Any:
    """Return all gradients of a shared module as one vector, for collectives and `updates`."""
    from lockstep.synk import sharing

    return sharing.vectors(current_team("grads()"), module, "grads()")[1]


def buffers(module: Any) -> list[Any]:
    """Return all buffers of a shared module as vectors, one for each dtype, for collectives."""
    from lockstep.synk import sharing

    return sharing.buffers(current_team("buffers()"), module)
