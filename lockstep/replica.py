"""One trainer's replica of the network: its tensors in the arena, and what it does with a batch."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from lockstep import checkpoint, dropout, precision
from lockstep.arena import Arena
from lockstep.config import Config
from lockstep.dataset import Dataset
from lockstep.errors import UserError
from lockstep.loading import Batch
from lockstep.memory import Memory
from lockstep.network import build_model, crop_size
from lockstep.optimizer import make_optimizer, momentum_of, set_learning_rate
from lockstep.randomness import Purpose, seed_of
from lockstep.recorder import Recorder

_WARM_UP = 3  # steps before one is captured: libraries choose algorithms and allocate in the first ones


class Replica:
    """The network, its arena and its optimizer, on the device of `memory`.

    crop_size: rows and columns that the network takes.
    """

    def __init__(self, config: Config, dataset: Dataset, memory: Memory) -> None:
        precision.configure(config)
        self._config = config
        self.model = build_model(config, dataset.n_classes)
        self.crop_size = crop_size(self.model, config, dataset.image_shape)
        self._dropouts = dropout.install(self.model)
        self.arena = Arena(self.model, memory, with_momenta=momentum_of(config) > 0)
        self.device = self.arena.flat.device
        self._optimizer = make_optimizer(self.model, self.arena, config)
        self._batch_keys = torch.zeros(config.batch_size, dtype=torch.int32, device=self.device)
        self._graph = StepGraph() if config.cuda_graph else None
        self.learning_rate = config.learning_rate

    def load(self, tensors: Path) -> None:
        """Raises UserError where the checkpoint is broken or of another network."""
        self.arena.load(checkpoint.load(tensors), str(tensors))

    def begin_epoch(self, epoch: int, n_samples: int, learning_rate: float) -> None:
        """Sets what is the epoch's: the samples' dropout keys, the learning rate."""
        keys = dropout.sample_keys(self._config.seed, epoch, n_samples)
        self._keys = torch.from_numpy(keys).to(self.device)
        if learning_rate != self.learning_rate and self._graph:
            self._graph.forget()  # a captured step has the rate in it
        self.learning_rate = learning_rate
        set_learning_rate(self._optimizer, learning_rate)
        self.model.train()

    def update(self, batch: Batch, mean_share: float, rank: int, recorder: Recorder) -> None:
        """Forward, backward and the optimizer's step on a trainer's share of a minibatch.

        The loss is summed and divided by the mean share, not by this one: when the last minibatch of an epoch
        can't be divided evenly, the average over the trainers is still that of the whole minibatch.
        """
        n_images = len(batch.labels)
        if not n_images:
            self._update_without_images()
            return
        self._seed(batch, rank)

        def learn() -> None:
            self._learn(batch, mean_share, recorder)

        if self._graph and n_images == mean_share == self._config.batch_size:
            self._graph.run(learn)
        else:
            learn()

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> torch.Tensor:
        """(n, class): logarithms of what the network takes for each class's probability, float64."""
        return self._forward(batch.images).double().log_softmax(1)

    @torch.no_grad()
    def count_errors(self, batch: Batch) -> torch.Tensor:
        """[summed cross-entropy, wrong top-1 answers, wrong top-5 answers] of a batch, float64 (3,)."""
        if not len(batch.labels):
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        logits = self._forward(batch.images)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        best = logits.topk(min(5, logits.shape[1])).indices == batch.labels[:, None]
        top1, top5 = (~best[:, 0]).sum(), (~best.any(1)).sum()
        return torch.stack([loss.double(), top1.double(), top5.double()])

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        dtype = self.arena.flat.dtype
        if self._config.precision != "bf16":
            images = images.to(dtype)
        with precision.autocast(self._config, self.device):
            logits: torch.Tensor = self.model(images)
        return logits.to(dtype)

    def _learn(self, batch: Batch, mean_share: float, recorder: Recorder) -> None:
        self._optimizer.zero_grad()
        dropout.set_keys(self._dropouts, self._batch_keys[: len(batch.labels)])
        logits = self._forward(batch.images)
        loss_sum = F.cross_entropy(logits, batch.labels, reduction="sum")
        (loss_sum / mean_share).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        recorder.add(loss_sum, logits, batch.labels)

    def _update_without_images(self) -> None:
        """Weights still decay and momenta still carry, as in the other trainers."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._optimizer.step()

    def _seed(self, batch: Batch, rank: int) -> None:
        """Dropout masks by sample; torch's generator, for what else a network draws, by place and rank."""
        self._batch_keys[: len(batch.samples)] = self._keys[batch.samples]
        order = batch.order
        torch.manual_seed(seed_of(Purpose.STEP, self._config.seed, order.epoch, order.first, rank))


class StepGraph:
    """Captures a step as a CUDA graph and replays it: one launch instead of hundreds.

    Whatever the step reads must lie in the same place each time. Not yet run on a GPU.
    """

    def __init__(self) -> None:
        self._n_runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def forget(self) -> None:
        """The next run captures anew."""
        torch.cuda.synchronize()
        self._graph = None

    def run(self, step: Callable[[], None]) -> None:
        """Does what `step` does. Raises UserError where it can't be captured."""
        self._n_runs += 1
        if self._n_runs <= _WARM_UP:
            step()
            return
        if self._graph is None:
            self._graph = self._capture(step)
        self._graph.replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            raise UserError(
                f"cuda_graph: this network can't be captured: {error}; set cuda_graph: false"
            ) from error
        return graph
