"""A graph that fails on a rank in a chosen way, for the tests of lockstep.synk."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op

import lockstep.synk as synk
from lockstep.errors import PeerLost

HOOKS: dict[str, Callable[[], Any]] = {}  # per process: it is empty in workers


def hook(name: str) -> None:
    """Call the test's hook of this name, in the caller only."""
    if name in HOOKS:
        HOOKS[name]()


class Act(Op):
    """The identity function, which first acts on one rank, or on all (-1)."""

    __props__ = ("rank", "what", "place")

    def __init__(self, rank: int, what: str, place: str = "") -> None:
        self.rank, self.what, self.place = rank, what, place

    def make_node(self, x: Any) -> Apply:
        return Apply(self, [pt.as_tensor(x)], [pt.as_tensor(x).type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = inputs[0].copy()
        if self.rank in (-1, rank_here()):
            act(self.what, self.place)


def rank_here() -> int:
    """Return 1 in a worker and 0 in this process."""
    command = Path("/proc/self/cmdline").read_bytes()
    return 1 if b"lockstep.synk.rank" in command else 0


def act(what: str, place: str) -> None:
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        os._exit(3)
    if what == "raise":
        raise ArithmeticError(f"no good in process {rank_here()}")
    if what == "lose":
        raise PeerLost("another program", "another program has left its pipe")
    if what == "exit":
        sys.exit("a user's function leaves")
    if what == "sleep":
        Path(place, f"asleep{os.getpid()}").touch()
        time.sleep(60)
    if what == "answer late":
        time.sleep(float(place))


def act_function(rank: int, what: str, place: str = "") -> synk.Function:
    x = pt.vector("x")
    return synk.function([x], (Act(rank, what, place)(x).sum(), "sum"), name=f"{what} on {rank}")
