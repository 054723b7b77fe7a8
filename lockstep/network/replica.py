"""One trainer's replica of the network: its tensors in the arena, and what it does with a batch."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from lockstep.config import Config
from lockstep.config.rules import KINDS_OF_RULES, rule_of
from lockstep.data.dataset import Dataset, subtracting
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.loading import Batch
from lockstep.memory import Memory
from lockstep.network import batch_norm, convolution, dropout, linear, precision
from lockstep.network.arena import Arena
from lockstep.network.build import build_model, crop_size, input_spec_of
from lockstep.network.compiling import Compiled
from lockstep.network.factors import Factors, factored_layers
from lockstep.network.gradients import Gradients
from lockstep.network.parts import PartSums, parts_of, parts_within
from lockstep.network.program import Program
from lockstep.network.recorder import Recorder, rounded
from lockstep.network.sharded import ShardedUpdater, needs_norms
from lockstep.network.step_graph import StepGraph, why_not_captured
from lockstep.network.updater import Updater
from lockstep.network.ways import ways_of
from lockstep.network.working import WorkingWeights
from lockstep.optim import states_of
from lockstep.runs import checkpoint


class Replica(Program):
    """The network, its arena and its optimizer, on the device of `memory`.

    crop_size: rows and columns that the network takes. mean: what it wants subtracted from R, G and B, or
    None: the dataset's mean.
    """

    def __init__(self, config: Config, dataset: Dataset, memory: Memory) -> None:
        precision.configure(config)
        self._config = config
        self.model = build_model(config, dataset.n_classes)
        self.crop_size = crop_size(self.model, config, dataset.image_shape)
        input_spec = input_spec_of(self.model, config)
        self.mean = input_spec.mean
        apart = rule_of(config) == "gradients"
        self._factored = factored_layers(self.model, config, self.crop_size) if apart else []
        self._dropouts = dropout.install(self.model)
        averaged = config.ema_decay is not None
        leading = [layer.name for layer in self._factored]
        low = precision.keeps_copies(config, self.model)
        self.arena = Arena(self.model, memory, states_of(config), averaged, apart, leading, low)
        self._working = WorkingWeights(self.model, self.arena) if low else None
        linear.use_operands(self.model)
        convolution.install(self.model, config)
        self.device = self.arena.flat.device
        scale = torch.tensor(input_spec.scale, dtype=self.arena.flat.dtype).view(3, 1, 1)
        self._scale = None if scale.eq(1).all() else scale.to(self.device)
        self.optimizer: Updater | ShardedUpdater = Updater(self.model, self.arena, config, self._working)
        self._batch_keys = torch.zeros(config.batch_size, dtype=torch.int32, device=self.device)
        self._generators = _generators(self.arena.flat)
        self._gradients: Gradients | None = None
        self._graph = None if why_not_captured(config, self.arena.flat.is_cuda) else self._step_graph()
        self._parts: PartSums | None = None
        self._statistics: batch_norm.Statistics | None = None
        self._compiled = Compiled(self.model, config.batch_size) if config.compile else None
        self.ways = ways_of(self.model, config, self.arena.flat.is_cuda)

    def load(self, tensors: Path) -> dict[str, torch.Tensor]:
        """Raises UserError where the checkpoint is broken or of another network."""
        state = checkpoint.load(tensors)
        of_rule = {name: state.pop(name) for name in list(state) if name.startswith(KINDS_OF_RULES)}
        self.arena.load(state, str(tensors))
        return of_rule

    def shard_updates(
        self, memory: Memory, transport: Transport
    ) -> tuple[Gradients, ShardedUpdater, list[Span]]:
        factors, pieces = None, []
        if self._factored:
            factors = Factors(self._factored, self.arena, memory, transport.group.everywhere)
            pieces = factors.plan(transport, needs_norms(self._config))
        gradients = self._gradients = Gradients(self.model, self.arena, memory, factors)
        pieces += [piece for bucket in gradients.buckets for piece in transport.pieces(bucket)]
        updater = self.optimizer = ShardedUpdater(self.arena, gradients, self._config, pieces, self._working)
        if self._working:
            self._working.keeps_gradients = False
        if self._graph:
            self._graph = self._step_graph()
        if self._config.parts:
            self._parts = PartSums(self.arena, gradients)
        return gradients, updater, pieces

    def share_statistics(self, transport: Transport, memory: Memory, clock: Callable[[str], None]) -> None:
        n_channels, dtype = batch_norm.widest(self.model), self.arena.flat.dtype
        self._statistics = batch_norm.Statistics(transport, memory, n_channels, dtype, clock)
        batch_norm.install(self.model, self._statistics)

    def close(self) -> None:
        if self._statistics:
            self._statistics.close()
        super().close()

    def begin_epoch(self, epoch: int, n_samples: int, learning_rate: float) -> None:
        """Sets what is the epoch's: the samples' dropout keys, the learning rate."""
        keys = dropout.sample_keys(self._config.seed, epoch, n_samples)
        self._keys = torch.from_numpy(keys).to(self.device)
        self._weights_changed()
        self.optimizer.set_learning_rate(learning_rate)
        self.arena.bind(self.model)
        self.model.train()

    def begin_validation(self) -> None:
        """Until the next epoch: the network as it answers, with its averaged weights where it has any."""
        self.arena.check_bound(self.model)
        self._weights_changed()
        if self._config.ema_decay is not None:
            self.arena.bind(self.model, "ema", "ema")
        self.model.eval()

    def forward_backward(self, batch: Batch, mean_share: float, rank: int, recorder: Recorder) -> None:
        if self._parts:
            self._learn_parts(batch, mean_share, rank, recorder)
        else:
            self._learn_batch(batch, mean_share, rank, recorder)

    def _learn_batch(self, batch: Batch, mean_share: float, rank: int, recorder: Recorder) -> None:
        """rank: for what a network draws from torch's generator."""
        if not len(batch.labels):
            self._take_part(batch)
            return
        self._seed(batch, rank)
        if self._working:
            self._working.refresh()
        if self._graph and len(batch.labels) == mean_share == self._config.batch_size:
            self._graph.run(lambda: self._learn(batch, mean_share, recorder), self.tell)
        else:
            self._learn(batch, mean_share, recorder)

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> torch.Tensor:
        """(n, class): logarithms of what the network takes for each class's probability, float64."""
        return self._forward(batch.images)[0].double().log_softmax(1)

    def count_errors(self, batch: Batch) -> torch.Tensor:
        """[summed cross-entropy, wrong top-1 answers, wrong top-5 answers] of a batch, float64 (3,)."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        batches = parts_within(batch, self._config.parts) if self._config.parts else [batch]
        for each in batches:
            sums += self._count_errors(each)
        return sums

    @torch.no_grad()
    def _count_errors(self, batch: Batch) -> torch.Tensor:
        if not len(batch.labels):
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        logits = self._forward(batch.images)[0]
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        best = logits.topk(min(5, logits.shape[1])).indices == batch.labels[:, None]
        top1, top5 = (~best[:, 0]).sum(), (~best.any(1)).sum()
        return torch.stack([rounded(loss), top1.double(), top5.double()])

    def _forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """The network's logits, then those of its auxiliary heads where it gives any."""
        dtype = self.arena.flat.dtype
        if self._working:
            self._working.refresh()
        if self._config.precision != "bf16":
            images = images.to(dtype)
        if self._scale is not None:  # of colours, which in blocks come again and again
            scaled = torch.unflatten(images, 1, (-1, 3)) * self._scale.to(images.dtype)
            images = scaled.flatten(1, 2)
        with precision.autocast(self._config, self.device):
            if self._compiled and self.model.training:
                outputs = self._compiled(images, self.tell)
            else:
                outputs = self.model(images)
        return [logits.to(dtype) for logits in (outputs if isinstance(outputs, tuple | list) else [outputs])]

    def _learn(self, batch: Batch, mean_share: float, recorder: Recorder) -> None:
        dropout.set_keys(self._dropouts, self._batch_keys[: len(batch.labels)])
        logits, *auxiliary = self._forward(batch.images)
        loss_sum = total = self._loss_sum(logits, batch.labels)
        for weight, others in zip(self._aux_weights(len(auxiliary)), auxiliary, strict=True):
            total = total + weight * self._loss_sum(others, batch.labels)
        if self._gradients:
            self._gradients.begin_backward()
        self._backward(total / mean_share)
        if self._statistics:
            recorder.n_bytes, self._statistics.n_bytes = recorder.n_bytes + self._statistics.n_bytes, 0
        recorder.add(loss_sum, logits, batch.labels)

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        smoothing = self._config.label_smoothing
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)

    def _aux_weights(self, n_auxiliary: int) -> tuple[float, ...]:
        weights = tuple(getattr(self.model, "aux_weights", ())) if n_auxiliary else ()
        if len(weights) != n_auxiliary:
            raise UserError(
                f"model {self._config.model}: gives {n_auxiliary} auxiliary outputs in training and has "
                f"{len(weights)} aux_weights for them (torchvision's: model_args: {{aux_logits: false}})"
            )
        return weights

    def _backward(self, loss: torch.Tensor) -> None:
        """In this thread, where trainers meet in it."""
        with torch.autograd.set_multithreading_enabled(self._statistics is None):
            loss.backward()  # type: ignore[no-untyped-call]

    def _take_part(self, batch: Batch) -> None:
        """Of a trainer without pictures: batch normalisation's counts, as in the trainers that have some.

        With `sync_batch_norm` it meets them in every layer too, with a picture that counts for nothing.
        """
        if self._statistics:
            self._statistics.counted = False
            dropout.set_keys(self._dropouts, self._batch_keys[:1])
            outputs = self._forward(batch.images.new_zeros((1, *batch.images.shape[1:])))
            self._backward(torch.stack([logits.sum() for logits in outputs]).sum() * 0.0)
            self._statistics.counted = True
            return
        for name, buffer in self.arena.local.items():
            if name.endswith("num_batches_tracked"):
                buffer.add_(1)

    def _learn_parts(self, batch: Batch, mean_share: float, rank: int, recorder: Recorder) -> None:
        n_parts, size = self._config.parts or 1, self._config.n_trainers
        assert self._parts
        self._parts.begin()
        for number, part in parts_of(batch, rank, size, n_parts):
            self._parts.begin_part()
            self._learn_batch(part, mean_share * size / n_parts, number, recorder)
            self._parts.end_part()

    def _step_graph(self) -> StepGraph:
        must = self._config.cuda_graph is True
        return StepGraph(self.model, must, self._gradients, self._working)

    def _weights_changed(self) -> None:
        """Since the last step, by who knows whom."""
        if self._working:
            self._working.stale = True

    def _seed(self, batch: Batch, rank: int) -> None:
        """Dropout masks by sample; torch's generator, for what else a network draws, by place and rank."""
        self._batch_keys[: len(batch.samples)] = self._keys[batch.samples]
        order = batch.order
        seed = seed_of(Purpose.STEP, self._config.seed, order.epoch, order.first, rank)
        for generator in self._generators:
            generator.manual_seed(seed)


def _generators(arena: torch.Tensor) -> list[torch.Generator]:
    """torch's own for the host and for the device of the arena.

    torch.manual_seed does the same, and asks every back end that torch might have whether it is there: 160 us
    a call, against 1.
    """
    generators = [torch.default_generator]
    if arena.is_cuda:
        generators.append(torch.cuda.default_generators[arena.get_device()])
    return generators


def open_trained(config: Config, dataset: Dataset, memory: Memory, tensors: Path) -> tuple[Replica, Dataset]:
    """A checkpoint's network as it answers, and the dataset with the mean that it wants subtracted.

    Raises UserError where the checkpoint is broken or of another network.
    """
    replica = Replica(config, dataset, memory)
    replica.load(tensors)
    replica.begin_validation()
    return replica, subtracting(dataset, replica.mean)
