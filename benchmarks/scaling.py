"""What a step of n devices takes, from the times of its parts: no device is asked here.

A step is forward and backward of every stage of a network, the optimizer's update, and what devices send each
other. In a reduce-scatter and an all-gather each device sends and receives 2 (n - 1) / n of the bytes, over a
link that does one thing at a time. What is left out: devices that are slower than others in one step or
another, several hosts' switches, loading.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Part of a network, in the order of the forward pass. Seconds for one device's minibatch."""

    name: str
    forward: float
    backward: float
    n_parameters: int


@dataclass(frozen=True)
class Link:
    """How a device reaches the others: bytes a second in each direction, and seconds a hop."""

    name: str
    bytes_per_second: float
    seconds_per_hop: float
    source: str

    def seconds(self, n_bytes: float, n: int) -> float:
        """Of an all-reduce over n devices, by recursive halving and doubling (Thakur et al. 2005)."""
        hops = 2 * math.ceil(math.log2(n))
        return 2 * (n - 1) / n * n_bytes / self.bytes_per_second + hops * self.seconds_per_hop


def lone_step(stages: list[Stage], update: float) -> float:
    """Seconds of one device by itself."""
    return sum(stage.forward + stage.backward for stage in stages) + update


def step_after(stages: list[Stage], update: float, link: Link, n: int, parameter_bytes: int) -> float:
    """Seconds where all is exchanged when all is computed, as by `rule: weights`.

    parameter_bytes: of each parameter that are exchanged, 8 for weight and momentum in float32.
    """
    n_bytes = parameter_bytes * sum(stage.n_parameters for stage in stages)
    return lone_step(stages, update) + link.seconds(n_bytes, n)


def step_beneath(stages: list[Stage], update: float, link: Link, n: int, parameter_bytes: int) -> float:
    """Seconds where a stage's gradients travel while those of earlier stages are computed (Li et al. 2020,
    "PyTorch Distributed", section 3.2), one stage after the other, and the update waits for all."""
    now = sum(stage.forward for stage in stages)
    free = now  # when the link is
    for stage in reversed(stages):
        now += stage.backward
        free = max(free, now) + link.seconds(parameter_bytes * stage.n_parameters, n)
    return max(now, free) + update


def speed_up(step: float, lone: float, n: int) -> float:
    """How many times as many pictures a second n devices take, each with the minibatch of one."""
    return n * lone / step
