"""Forward and backward captured as a CUDA graph: one launch instead of hundreds. Not yet run on a GPU."""

from collections.abc import Callable

import torch
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.network.gradients import Gradients
from lockstep.network.working import WorkingWeights

_KNOWN = ("", "torchvision", "timm")  # where networks are from whose steps are all alike
_WARM_UP = 3  # runs before one is captured: libraries choose algorithms and allocate in the first ones


def why_not_captured(config: Config, on_gpu: bool) -> str:
    """Why steps are not to be captured, in words; '' where they are.

    With `auto` they are on GPUs, where the code is the same in every step. What the Python of a network from
    elsewhere does from one step to the next, nobody knows.
    """
    if config.cuda_graph != "auto":
        return "" if config.cuda_graph else "as asked"
    reasons = {
        "on CPUs": not on_gpu,
        f"{config.model} may do something else in each step": config.model.rpartition(":")[0] not in _KNOWN,
        "augment_on: loader puts minibatches in several places": config.augment_on == "loader",
        f"accumulate: {config.accumulate}": config.accumulate > 1,
        f"parts: {config.parts}": config.parts is not None,
        "factors: true": config.factors,
        "sync_batch_norm: true": config.sync_batch_norm and config.n_trainers > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class StepGraph:
    """Whatever the captured function reads must lie in the same place each time.

    The gradients that it leaves lie in memory of the graph, and each replay writes them anew: so they are the
    parameters' again after every replay, whoever has let go of them meanwhile. shared: where gradients are
    left, if not with autograd; those of a captured step replace what was there. working: where some are kept.

    must: raise UserError where capturing fails; else `tell` a line, and run the function from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        must: bool,
        shared: Gradients | None = None,
        working: WorkingWeights | None = None,
    ) -> None:
        self._model, self._must, self._shared, self._working = model, must, shared, working
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: set[nn.Parameter] = set()
        self._n_runs = 0
        self._has_failed = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}

    def run(self, function: Callable[[], None], tell: Callable[[str], object]) -> None:
        """Does what `function` does, which leaves gradients where there were none."""
        self._n_runs += 1
        if self._n_runs > _WARM_UP and self._graph is None and not self._has_failed:
            self._try(function, tell)
        if self._graph is None:
            function()
            return
        self._graph.replay()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        if self._shared:
            self._shared.filled.update(self._filled)
        if self._working:
            self._working.gradients.update(self._kept)

    def _try(self, function: Callable[[], None], tell: Callable[[str], object]) -> None:
        """Captures, which runs nothing on the device; nor can others be told of what it comes to."""
        when_full = self._shared.when_full if self._shared else None
        if self._shared:
            self._shared.when_full = None
        try:
            self._graph = _capture(function)
        except RuntimeError as error:
            text = f"cuda_graph: this network can't be captured: {' '.join(str(error).split())}"
            if self._must:
                raise UserError(f"{text}; set cuda_graph: false") from error
            self._has_failed = True
            self._model.zero_grad(set_to_none=True)  # what the attempt has left lies nowhere
            if self._shared:
                self._shared.filled.clear()
            if self._working:
                self._working.gradients.clear()
            tell(f"{text}; its kernels are launched one by one")
            return
        finally:
            if self._shared:
                self._shared.when_full = when_full
        self._gradients = {parameter: parameter.grad for parameter in self._model.parameters()}
        self._filled = set(self._shared.filled) if self._shared else set()
        self._kept = dict(self._working.gradients) if self._working else {}
        tell("cuda_graph: forward and backward are captured, and replayed in each whole step")


def _capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph
