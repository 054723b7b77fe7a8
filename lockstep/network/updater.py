"""One step of a network's optimizer, with the gradients that backward has added up."""

import torch
from torch import nn

from lockstep.config import Config
from lockstep.network.arena import Arena
from lockstep.network.optimizer import make_optimizer, set_learning_rate


class Updater:
    """The optimizer that the configuration names, with its state in the arena, and the moving averages."""

    def __init__(self, model: nn.Module, arena: Arena, config: Config) -> None:
        self._model, self._arena, self._config = model, arena, config
        self.inner = make_optimizer(model, arena, config)
        self.learning_rate = config.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate
        set_learning_rate(self.inner, rate)

    def step(self) -> None:
        """Takes the step, moves the averages, and lets go of the gradients.

        A parameter without a gradient counts as one with a zero, as it does in a trainer that had no images:
        weights still decay and momenta still carry, alike in all trainers.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self._config.clip_norm)
        self.inner.step()
        self.inner.zero_grad()
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)
