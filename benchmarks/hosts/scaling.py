"""A model of the step time of n devices, computed from the times of the step's parts.

A step consists of the forward and backward pass of every stage of a network, the optimizer's update, and the
exchange. In a reduce-scatter and an all-gather each device sends and receives 2 (n - 1) / n of the bytes,
over a link that carries one transfer at a time. Hosts exchange the sums of their own devices in the same way.
The model leaves out variation between devices, switches between hosts, and loading.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A part of a network, in the order of the forward pass, with seconds for one device's minibatch."""

    name: str
    forward: float
    backward: float
    n_parameters: int


@dataclass(frozen=True)
class Link:
    """The connection of a device: bytes per second in each direction, and seconds per hop."""

    name: str
    bytes_per_second: float
    seconds_per_hop: float
    source: str

    def seconds(self, n_bytes: float, n: int) -> float:
        """Return the seconds of an all-reduce by recursive halving and doubling (Thakur et al. 2005)."""
        hops = 2 * math.ceil(math.log2(n))
        return 2 * (n - 1) / n * n_bytes / self.bytes_per_second + hops * self.seconds_per_hop


def lone_step(stages: list[Stage], update: float) -> float:
    """Return the seconds of a step on one device."""
    return sum(stage.forward + stage.backward for stage in stages) + update


def step_after(stages: list[Stage], update: float, link: Link, n: int, parameter_bytes: int) -> float:
    """Return the seconds of a step that exchanges after all computation, as `rule: weights` does.

    Args:
        parameter_bytes: Bytes exchanged per parameter: 8 for weight and momentum in float32.
    """
    n_bytes = parameter_bytes * sum(stage.n_parameters for stage in stages)
    return lone_step(stages, update) + link.seconds(n_bytes, n)


def step_beneath(stages: list[Stage], update: float, link: Link, n: int, parameter_bytes: int) -> float:
    """Return the seconds of a step that exchanges gradients beside the backward pass.

    A stage's gradients travel while those of earlier stages are computed, one stage after the other, and the
    update waits for all (Li et al. 2020, "PyTorch Distributed", section 3.2).
    """
    now = sum(stage.forward for stage in stages)
    free = now  # when the link is
    for stage in reversed(stages):
        now += stage.backward
        free = max(free, now) + link.seconds(parameter_bytes * stage.n_parameters, n)
    return max(now, free) + update


@dataclass(frozen=True)
class Wire:
    """A format of numbers between hosts. seconds_per_element: to pack, add up and unpack one."""

    name: str
    bytes_per_element: float
    seconds_per_element: float = 0.0


@dataclass(frozen=True)
class FullLayer:
    """A fully connected layer, whose gradient is the product of an (m, rows) and a (rows, n) matrix."""

    m: int
    n: int

    def has_short_factors(self, rows: int, n_hosts: int) -> bool:
        """Return whether its rows are fewer numbers than its gradient; `rows` counts a host's minibatch."""
        return rows * (self.m + self.n) < 2 * self.m * self.n / n_hosts


FLOAT32, BFLOAT16 = Wire("float32", 4), Wire("bfloat16", 2)
ALEXNETS_FULL = [FullLayer(9216, 4096), FullLayer(4096, 4096), FullLayer(4096, 1000)]


def sum_of_hosts(link: Link, n_hosts: int, n_parameters: int, wire: Wire) -> float:
    """Return the seconds in which hosts sum a gradient. link: a host's, which its devices share.

    Some numbers are on their way while others are packed, so what takes longer counts.
    """
    sending = link.seconds(wire.bytes_per_element * n_parameters, n_hosts)
    return max(sending, wire.seconds_per_element * n_parameters)


def factors_of_hosts(
    link: Link,
    n_hosts: int,
    n_parameters: int,
    layers: list[FullLayer],
    rows: int,
    wire: Wire,
    seconds_per_product: float = 0.0,
) -> float:
    """Return the seconds in which hosts gather rows of `layers` where those are shorter, and sum the rest.

    seconds_per_product: of a number of a row with one of another, on a host, which makes products of the
    other hosts' rows beside those that backward would have made.
    """
    short = [layer for layer in layers if layer.has_short_factors(rows, n_hosts)]
    if not short:
        return sum_of_hosts(link, n_hosts, n_parameters, wire)
    n_products = sum(layer.m * layer.n for layer in short)
    n_bytes = 4 * rows * sum(layer.m + layer.n for layer in short)
    of_host = n_bytes / link.bytes_per_second + link.seconds_per_hop + rows * n_products * seconds_per_product
    return sum_of_hosts(link, n_hosts, n_parameters - n_products, wire) + (n_hosts - 1) * of_host


def speed_up(step: float, lone: float, n: int) -> float:
    """Return the throughput of n devices relative to one, each with the same minibatch."""
    return n * lone / step
