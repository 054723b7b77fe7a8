"""One step of a network's optimizer, with the gradients that backward has added up."""

import torch
from torch import nn

from lockstep.config import Config
from lockstep.config.rules import rule_of
from lockstep.network.arena import Arena
from lockstep.network.optimizer import make_optimizer, set_learning_rate
from lockstep.network.working import WorkingWeights
from lockstep.optim.fused import FusedSGD


class Updater:
    """The optimizer that the configuration names, with its state in the arena, and the moving averages.

    working: the weights' bfloat16 copies, if there are any. SGD writes them as it steps, unless weights are
    then averaged with those of other trainers; after that, and after any other step, they are stale.
    """

    def __init__(
        self, model: nn.Module, arena: Arena, config: Config, working: WorkingWeights | None = None
    ) -> None:
        self._model, self._arena, self._config, self.working = model, arena, config, working
        self.inner = make_optimizer(model, arena, config)
        if working:
            working.keeps_gradients = type(self.inner) is FusedSGD and config.clip_norm is None
            working.averaged = config.n_trainers > 1 or rule_of(config) != "weights"
        self.learning_rate = config.learning_rate

    def set_learning_rate(self, rate: float) -> None:
        self.learning_rate = rate
        set_learning_rate(self.inner, rate)

    def step(self) -> None:
        """Takes the step, moves the averages, and lets go of the gradients.

        A parameter without a gradient counts as one with a zero, as it does in a trainer that had no images:
        weights still decay and momenta still carry, alike in all trainers.
        """
        kept = self.working.gradients if self.working else {}
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None and parameter not in kept:
                parameter.grad = torch.zeros_like(parameter)
        if self._config.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, self._config.clip_norm)
        self.inner.step()
        if self.working:
            self._step_working(self.working)
        self.inner.zero_grad()
        if self._config.ema_decay is not None:
            self._arena.move_averages(self._config.ema_decay)

    def _step_working(self, working: WorkingWeights) -> None:
        """The rest of the step: of weights whose gradients were kept in bfloat16."""
        working.stale = True
        if working.gradients:
            assert type(self.inner) is FusedSGD
            working.step(self.inner)
