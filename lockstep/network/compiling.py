"""A network's training pass by torch.compile (`compile: true`)."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.errors import first_line


class Compiled:
    """Calls a network: compiled for whole minibatches, which all have one size, else as it is.

    What can't be compiled, for want of a C++ compiler, say, is computed by torch as ever, and `tell` is told.
    """

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        # Compiling in this process: workers of torch's would outlive a trainer that is killed.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._model, self._batch_size = model, batch_size
        self._compiled: Any = torch.compile(model, dynamic=False)
        self._is_proven = False

    def __call__(self, images: torch.Tensor, tell: Callable[[str], object]) -> Any:
        """The network's outputs. images: (batch, 3, row, column)."""
        if self._compiled is None or len(images) != self._batch_size:
            return self._model(images)
        if self._is_proven:
            return self._compiled(images)
        try:
            outputs = self._compiled(images)
        except (
            Exception
        ) as error:  # whatever a compiler meets; an error of the network's own comes again below
            self._compiled = None
            words = first_line(error)
            tell(f"compile: this network can't be compiled here, so torch computes it as ever: {words}")
            return self._model(images)
        self._is_proven = True
        tell("compile: the network is compiled, and used so for whole minibatches in training")
        return outputs
