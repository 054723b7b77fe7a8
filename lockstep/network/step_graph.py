"""A training step as one program: captured as a CUDA graph (`cuda_graph`), or compiled (`compile`).

A graph replays forward and backward in one launch instead of hundreds.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError, first_line
from lockstep.network.gradients import Gradients
from lockstep.network.low_precision import LowPrecisionWeights

_KNOWN = ("", "torchvision", "timm")  # sources of networks that run the same code in every step
_WARM_UP = 3  # runs before the capture; libraries choose algorithms and allocate memory in the first ones


def why_not_captured(config: Config, on_gpu: bool) -> str:
    """Return the reason why steps are not captured, or '' if they are.

    With `auto`, steps are captured on GPUs if the network and the loss run the same code in every step. That
    is unknown for networks and losses from elsewhere.
    """
    if config.cuda_graph != "auto" and (on_gpu or not config.cuda_graph):
        return "" if config.cuda_graph else "as asked"
    reasons = {
        "on CPUs": not on_gpu,
        f"{config.model} may do something else in each step": config.model.rpartition(":")[0] not in _KNOWN,
        f"loss: {config.loss} may do something else in each step": config.loss is not None,
        "augment_on: loader puts minibatches in several places": config.augment_on == "loader",
        f"accumulate: {config.accumulate}": config.accumulate > 1,
        f"logical_ranks: {config.logical_ranks}": config.logical_ranks is not None,
        "factors: true": config.factors,
        "recompute: true": config.recompute,
        "sync_batch_norm: true": config.sync_batch_norm and config.n_trainers > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class StepGraph:
    """A function that is captured as a CUDA graph after a few runs, and replayed from then on.

    Everything that the function reads must lie at the same address each time. The gradients of the capture
    lie in the graph's memory, and each replay writes them again; so they are assigned to the parameters again
    after each replay.

    Args:
        must: Whether `run` raises a UserError if capturing fails. Otherwise it reports one line by `tell` and
            runs the function from then on.
        shared: Receives gradients instead of autograd; those of a captured step replace the earlier ones.
        low_precision: Retains some gradients in bfloat16.
    """

    def __init__(
        self,
        model: nn.Module,
        must: bool,
        shared: Gradients | None = None,
        low_precision: LowPrecisionWeights | None = None,
    ) -> None:
        self._model, self._must, self._shared, self._low_precision = model, must, shared, low_precision
        self._retained: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: set[nn.Parameter] = set()
        self._n_runs = 0
        self._has_failed = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._gradients: dict[nn.Parameter, torch.Tensor | None] = {}

    def run(self, function: Callable[[], None], tell: Callable[[str], object]) -> None:
        """Run `function`, or its graph. Before the call no gradient exists."""
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
        if self._low_precision:
            self._low_precision.gradients.update(self._retained)

    def _try(self, function: Callable[[], None], tell: Callable[[str], object]) -> None:
        """Try to capture. That runs nothing on the device, so no bucket may be reported as full."""
        when_full = self._shared.when_full if self._shared else None
        if self._shared:
            self._shared.when_full = None
        try:
            self._graph = _capture(function)
        except Exception as error:  # PyCUDA's errors, from launches of our kernels, are no RuntimeErrors
            text = f"cuda_graph: this network can't be captured: {' '.join(str(error).split())}"
            if self._must:
                raise UserError(f"{text}; set cuda_graph: false") from error
            self._has_failed = True
            self._model.zero_grad(set_to_none=True)  # gradients of the failed capture have no memory
            if self._shared:
                self._shared.filled.clear()
            if self._low_precision:
                self._low_precision.gradients.clear()
            tell(f"{text}; its kernels are launched one by one")
            return
        finally:
            if self._shared:
                self._shared.when_full = when_full
        self._gradients = {parameter: parameter.grad for parameter in self._model.parameters()}
        self._filled = set(self._shared.filled) if self._shared else set()
        self._retained = dict(self._low_precision.gradients) if self._low_precision else {}
        tell("cuda_graph: forward and backward are captured, and replayed in each whole step")


def _capture(function: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        function()
    return graph


class Compiled:
    """A network that is compiled for whole minibatches, which all have one size.

    It is called uncompiled for other batches, and for all if compiling fails, for example for lack of a C++
    compiler; `tell` then gets a line.
    """

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        # Compile in this process: torch's compile workers would outlive a trainer that is killed.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._model, self._batch_size = model, batch_size
        self._compiled: Any = torch.compile(model, dynamic=False)
        self._is_proven = False

    def __call__(self, images: torch.Tensor, tell: Callable[[str], object]) -> Any:
        """Return the network's outputs for images (batch, 3, row, column)."""
        if self._compiled is None or len(images) != self._batch_size:
            return self._model(images)
        if self._is_proven:
            return self._compiled(images)
        try:
            outputs = self._compiled(images)
        except Exception as error:  # any compiler error; an error of the network itself is raised again below
            self._compiled = None
            tell(
                "compile: this network can't be compiled here, so torch computes it uncompiled: "
                f"{first_line(error)}"
            )
            return self._model(images)
        self._is_proven = True
        tell("compile: the network is compiled, and used so for whole minibatches in training")
        return outputs
