"""Forward and backward captured as a CUDA graph: one launch instead of hundreds. Not yet run on a GPU."""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.errors import UserError

_WARM_UP = 3  # runs before one is captured: libraries choose algorithms and allocate in the first ones


class StepGraph:
    """Whatever the captured function reads must lie in the same place each time.

    The gradients that it leaves lie in memory of the graph, and each replay writes them anew: so they are the
    parameters' again after every replay, whoever has let go of them meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._n_runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}

    def run(self, function: Callable[[], None]) -> None:
        """Does what `function` does. Raises UserError where it can't be captured."""
        self._n_runs += 1
        if self._n_runs <= _WARM_UP:
            function()
            return
        if self._graph is None:
            self._graph = self._capture(function)
            self._gradients = {parameter: parameter.grad for parameter in self._model.parameters()}
        self._graph.replay()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:
            raise UserError(
                f"cuda_graph: this network can't be captured: {error}; set cuda_graph: false"
            ) from error
        return graph
