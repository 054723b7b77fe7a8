"""The rule `weights`: each trainer takes its own step, then weights, momenta and buffers are averaged.

For SGD with momentum, averaging weights and momenta after every step is averaging gradients before it, since
the update is linear in both (docs/how-it-works.md has the two lines of algebra). Theano_alexnet's rule: Ding,
Wang, Mao, Taylor 2014, arXiv 1412.2302, section 2.2.
"""

import torch
from torch import nn

from lockstep.config import Config
from lockstep.exchange.transport import Transport
from lockstep.network.optimizer import inexact_parts
from lockstep.sync import Meeting, Optimizer, Rule


class Weights(Rule):
    """transport: over the arenas of all trainers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def update(self, optimizer: Optimizer, meeting: Meeting) -> None:
        optimizer.step()
        self._transport.all_reduce((0, self._transport.n_elements), "mean", meeting.barrier)

    def state(self) -> dict[str, torch.Tensor]:
        return {}  # the arena is all that it has

    def inexact_parts(self, config: Config, model: nn.Module) -> list[str]:
        return inexact_parts(config, model)
