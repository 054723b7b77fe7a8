"""One trainer's replica of the network: its tensors in the arena, and what it does with a batch."""

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lockstep.config import Config
from lockstep.config.augmentation import mixes
from lockstep.config.rules import KINDS_OF_RULES, rule_of
from lockstep.config.shares import bounds_of
from lockstep.config.tasks import is_multilabel
from lockstep.data.classes import class_weights
from lockstep.data.dataset import Dataset, Described, with_mean
from lockstep.data.description import Description
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import UserError
from lockstep.exchange import Span
from lockstep.exchange.transport import Transport
from lockstep.loading import Batch
from lockstep.memory import Memory
from lockstep.network import batch_norm, convolution, dropout, low_precision
from lockstep.network.arena import Arena
from lockstep.network.build import build_model, crop_size, input_spec_of
from lockstep.network.factors import Factors, factored_layers
from lockstep.network.gradients import Gradients
from lockstep.network.logical_ranks import (
    LogicalRankSums,
    n_partial_sums,
    shares_to_train,
    shares_within,
)
from lockstep.network.losses import TrainingLoss, binary_losses
from lockstep.network.low_precision import LowPrecisionWeights
from lockstep.network.norms import protect_group_norms, protect_instance_norms
from lockstep.network.optimizer import ShardedUpdater, Updater, needs_norms
from lockstep.network.program import CheckedGradients, Program
from lockstep.network.recorder import HostStopwatch, Recorder, rounded
from lockstep.network.stages import Frozen, rate_scales, recompute
from lockstep.network.step_graph import Compiled, StepGraph, why_not_captured
from lockstep.optim import states_of
from lockstep.runs import checkpoint


class Replica(Program, CheckedGradients):
    """The network, its arena and its optimizer, on the device of `memory`.

    The caller sets torch's global switches first (`low_precision.configure`).

    Args:
        config: The run's configuration.
        dataset: Gives the number of classes and the size of images.
        memory: Allocates the arena.
        loaded: Names of all tensors that the caller loads next, if a run with this network has had them.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | Description,
        memory: Memory,
        loaded: Collection[str] = (),
    ) -> None:
        self._config = config
        names = [name for name in loaded if name.startswith(("weights/", "buffers/"))]
        self.model = build_model(config, dataset.n_classes, names)
        self.crop_size = crop_size(self.model, config, dataset.image_shape)
        input_spec = input_spec_of(self.model, config)
        self.mean, self._n_channels = input_spec.mean, len(input_spec.scale)
        self._frozen = Frozen(self.model, config.freeze, config.unfreeze_epoch)
        self._rate_scales = rate_scales(self.model, config)
        shards_state = rule_of(config) == "gradients"
        self._factored = factored_layers(self.model, config, self.crop_size) if shards_state else []
        self._dropouts = dropout.install(self.model)
        protect_instance_norms(self.model)
        n_recomputed = recompute(self.model, config.model) if config.recompute else 0
        low = low_precision.keeps_copies(config, self.model)
        self.arena = Arena(
            self.model,
            memory,
            states_of(config),
            with_ema=config.ema_decay is not None,
            states_on_host=shards_state,
            leading=[layer.name for layer in self._factored],
            with_low_precision=low,
            frozen={*self._frozen.parameters, *self._frozen.buffers},
            unfreezes=config.unfreeze_epoch is not None,
        )
        low_precision.use_operands(self.model)
        convolution.install(self.model, config)
        self._low_precision = LowPrecisionWeights(self.model, self.arena) if low else None
        self.device = self.arena.flat.device
        scale = torch.tensor(input_spec.scale, dtype=self.arena.flat.dtype).view(-1, 1, 1)
        self._scale = None if scale.eq(1).all() else scale.to(self.device)
        self.optimizer: Updater | ShardedUpdater = Updater(
            self.model, self.arena, config, self._low_precision, self._rate_scales
        )
        self._loss = TrainingLoss(config, _weights_of(config, dataset), self.arena.flat)
        self._batch_keys = torch.zeros(config.batch_size, dtype=torch.int32, device=self.device)
        self._generators = _generators(self.arena.flat)
        self._gradients: Gradients | None = None
        self._graph = None if why_not_captured(config, self.arena.flat.is_cuda) else self._step_graph()
        self._rank_sums: LogicalRankSums | None = None
        self._statistics: batch_norm.Statistics | None = None
        self._checked_shares = self._warned_of_untrained = False
        self._mixes = mixes(config)
        self._compiled = Compiled(self.model, config.batch_size) if config.compile else None
        self.implementations = _implementations_of(self.model, config, self.arena.flat.is_cuda)
        if n_recomputed:
            self.implementations["recompute"] = f"{n_recomputed} blocks keep their inputs only"

    def load(self, tensors: dict[str, torch.Tensor], source: str) -> dict[str, torch.Tensor]:
        rule_state = {name: value for name, value in tensors.items() if name.startswith(KINDS_OF_RULES)}
        self.arena.load({name: value for name, value in tensors.items() if name not in rule_state}, source)
        return rule_state

    def shard_updates(self, transport: Transport) -> tuple[Gradients, ShardedUpdater, list[Span]]:
        factors, pieces = None, []
        if self._factored:
            factors = Factors(self._factored, self.arena, transport.group.everywhere)
            pieces = factors.plan(transport, needs_norms(self._config))
        n_sums = n_partial_sums(self._config)
        gradients = self._gradients = Gradients(self.model, self.arena, factors, n_sums)
        pieces += [piece for bucket in gradients.all_buckets for piece in transport.pieces(bucket)]
        updater = self.optimizer = ShardedUpdater(
            self.arena, gradients, self._config, pieces, self._low_precision, self._rate_scales
        )
        if self._low_precision:
            self._low_precision.keeps_gradients = False
        if self._graph:
            self._graph = self._step_graph()
        if self._config.logical_ranks:
            self._rank_sums = LogicalRankSums(self.model, self.arena, gradients, self._config.logical_ranks)
        return gradients, updater, pieces

    def share_statistics(self, transport: Transport) -> None:
        self._statistics = batch_norm.Statistics(transport, self.arena, batch_norm.widest(self.model))
        batch_norm.install(self.model, self._statistics)

    def close(self) -> None:
        for each in (self._statistics, self.recheck):
            if each:
                each.close()
        super().close()

    def begin_epoch(self, epoch: int, n_samples: int, learning_rate: float, position: int = 0) -> None:
        """Draw the epoch's dropout keys, set the learning rate and switch to training."""
        keys = dropout.sample_keys(self._config.seed, epoch, n_samples)
        self._keys = torch.from_numpy(keys).to(self.device)
        self._weights_changed()
        self.optimizer.set_learning_rate(learning_rate)
        self.arena.bind(self.model)
        protect_group_norms()
        if not self._checked_shares:
            self._frozen.begin_epoch(self._config.n_epochs)  # whatever trains at last is checked at first
            self._frozen.begin_training(self.model)
            images = self.arena.flat.new_zeros((1, self._n_channels, *self.crop_size))
            lengths = [n_samples - position] + [n_samples] * (epoch < self._config.n_epochs)
            batch_norm.check_shares(self.model, self._config, images, lengths)
            self._checked_shares = True
        if self._frozen.begin_epoch(epoch) and self.arena.n_frozen:
            self._unfreeze()
        self._frozen.begin_training(self.model)

    def _unfreeze(self) -> None:
        """Train everything from now on. A captured step lacks the gradients of what was frozen."""
        self.arena.unfreeze()
        if self._graph:
            self._graph = self._step_graph()
        self.warn(f"unfreeze_epoch: {len(self._frozen.parameters)} frozen parameters train from here on")

    def begin_validation(self) -> None:
        """Switch to evaluation, with the averaged weights if there are any."""
        self.arena.check_bound(self.model)
        self.optimizer.check_bound()
        self._warn_of_untrained()
        self._weights_changed()
        if self._config.ema_decay is not None:
            self.arena.bind(self.model, "ema", "ema")
        self.model.eval()

    def _warn_of_untrained(self) -> None:
        """Warn, once, of a parameter that has begun to have a gradient: no optimizer has it."""
        if not self._warned_of_untrained and (name := self.arena.untrained(self.model)):
            self._warned_of_untrained = True
            self.warn(
                f"the model's {name} has requires_grad now, and is not trained: it had not when training "
                "began. To train it later, set freeze and unfreeze_epoch"
            )

    def forward_backward(self, batch: Batch, mean_n_samples: float, rank: int, recorder: Recorder) -> None:
        if self._rank_sums:
            self._learn_logical_ranks(batch, rank, recorder)
        else:
            self._learn_batch(batch, mean_n_samples, rank, recorder)

    def _learn_batch(self, batch: Batch, mean_n_samples: float, rank: int, recorder: Recorder) -> None:
        """Train on a batch; `rank` seeds the numbers that a network draws from torch's generator."""
        if not len(batch.labels):
            self._learn_nothing(batch)
            return
        self._seed(batch, rank)
        if self._low_precision:
            self._low_precision.refresh()
        if self._graph and len(batch.labels) == mean_n_samples == self._config.batch_size:
            self._graph.run(lambda: self._learn(batch, mean_n_samples, recorder), self.warn)
        else:
            self._learn(batch, mean_n_samples, recorder)

    @torch.no_grad()
    def log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return the logarithms of the class probabilities: float64 (n, class).

        With `task: multilabel` each class has its own, and they do not add up to 1.
        """
        logits = self._forward(batch.images)[0].double()
        return F.logsigmoid(logits) if is_multilabel(self._config) else logits.log_softmax(1)

    def count_errors(self, batch: Batch, answers: list[torch.Tensor] | None = None) -> torch.Tensor:
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        batches = shares_within(batch, self._config.logical_ranks) if self._config.logical_ranks else [batch]
        for each in batches:
            sums += self._count_errors(each, answers)
        return sums

    @torch.no_grad()
    def _count_errors(self, batch: Batch, answers: list[torch.Tensor] | None) -> torch.Tensor:
        if not len(batch.labels):
            return torch.zeros(3, dtype=torch.float64, device=self.device)
        logits = self._forward(batch.images)[0]
        if is_multilabel(self._config):
            return self._count_label_errors(logits, batch.labels, answers)
        loss = F.cross_entropy(logits, batch.labels, reduction="sum")
        likeliest = logits.topk(min(5, logits.shape[1])).indices
        best = likeliest == batch.labels[:, None]
        if answers is not None:
            answers.append(torch.stack([batch.labels, likeliest[:, 0]]))
        top1, top5 = (~best[:, 0]).sum(), (~best.any(1)).sum()
        return torch.stack([rounded(loss), top1.double(), top5.double()])

    def _count_label_errors(
        self, logits: torch.Tensor, labels: torch.Tensor, answers: list[torch.Tensor] | None
    ) -> torch.Tensor:
        targets = labels.to(logits.dtype)
        if answers is not None:
            answers.append(torch.cat([logits, targets], 1))
        n_wrong = ((logits >= 0) != (targets > 0)).sum()
        loss = rounded(binary_losses(logits, targets).sum())
        return torch.stack([loss, n_wrong.double(), torch.zeros_like(loss)])

    def _forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the network's logits, then those of its auxiliary heads if it returns any."""
        dtype = self.arena.flat.dtype
        if self._low_precision:
            self._low_precision.refresh()
        if self._config.precision != "bf16":
            images = images.to(dtype)
        if self._scale is not None:  # one factor per colour; blocks repeat the colours along the channels
            scaled = torch.unflatten(images, 1, (-1, self._n_channels)) * self._scale.to(images.dtype)
            images = scaled.flatten(1, 2)
        with low_precision.autocast(self._config, self.device):
            if self._compiled and self.model.training:
                outputs = self._compiled(images, self.warn)
            else:
                outputs = self.model(images)
        return [logits.to(dtype) for logits in (outputs if isinstance(outputs, tuple | list) else [outputs])]

    def _learn(self, batch: Batch, mean_n_samples: float, recorder: Recorder) -> None:
        dropout.set_keys(self._dropouts, self._batch_keys[: len(batch.labels)])
        logits, *auxiliary = self._forward(batch.images)
        loss_sum = total = self._loss_sum(logits, batch)
        for weight, others in zip(self._aux_weights(len(auxiliary)), auxiliary, strict=True):
            total = total + weight * self._loss_sum(others, batch)
        if self._gradients:
            self._gradients.begin_backward()
        self._backward(total / mean_n_samples)
        if self._statistics:
            recorder.n_bytes, self._statistics.n_bytes = recorder.n_bytes + self._statistics.n_bytes, 0
        recorder.add(loss_sum, logits, _main_labels(batch) if self._mixes else batch.labels)

    def _loss_sum(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self._mixes:
            return self._loss.sum(logits, batch.labels, batch.samples)
        assert batch.other_labels is not None and batch.label_weights is not None
        own, others = (
            self._loss.of_each(logits, labels, batch.samples) for labels in (batch.labels, batch.other_labels)
        )
        return torch.lerp(others, own, batch.label_weights.to(logits.dtype)).sum()

    def _aux_weights(self, n_auxiliary: int) -> tuple[float, ...]:
        weights = tuple(getattr(self.model, "aux_weights", ())) if n_auxiliary else ()
        if len(weights) != n_auxiliary:
            raise UserError(
                f"model {self._config.model}: gives {n_auxiliary} auxiliary outputs in training and has "
                f"{len(weights)} aux_weights for them (torchvision's: model_args: {{aux_logits: false}})"
            )
        return weights

    def _backward(self, loss: torch.Tensor) -> None:
        """Run backward in this thread if trainers synchronize in it."""
        receivers = [each for each in (self._gradients, self._low_precision) if each]
        for each in receivers:
            each.is_open = True
        try:
            with torch.autograd.set_multithreading_enabled(self._statistics is None):
                loss.backward()  # type: ignore[no-untyped-call]
        finally:  # a step that can't be captured is taken again
            for each in receivers:
                each.is_open = False

    def _learn_nothing(self, batch: Batch) -> None:
        """Count a step of a trainer without images in batch normalisation, as in trainers that have some.

        With `sync_batch_norm` the trainer also takes part in every layer, with an image that counts for
        nothing.
        """
        if self._statistics:
            self._statistics.counted = False
            dropout.set_keys(self._dropouts, self._batch_keys[:1])
            shape = batch.images.shape[1:]  # not of one value: a network may divide by an image's deviation
            image = torch.linspace(-1, 1, shape.numel(), device=self.device).view(1, *shape)
            outputs = self._forward(image.to(batch.images.dtype))
            self._backward(torch.stack([logits.sum() for logits in outputs]).sum() * 0.0)
            self._statistics.counted = True
            return
        for name, buffer in self.arena.local.items():
            if name.endswith("num_batches_tracked") and not self._frozen.keeps(name.removeprefix("buffers/")):
                buffer.add_(1)

    def _learn_logical_ranks(self, batch: Batch, rank: int, recorder: Recorder) -> None:
        n_logical, order = self._config.logical_ranks, batch.order
        assert self._rank_sums and n_logical
        bounds = order.bounds or bounds_of(self._config)
        checked, digest = self.recheck.begin_step(order) if self.recheck else None, ""
        mean_n_samples = (order.stop - order.start) / n_logical  # the same for any number of trainers
        self._rank_sums.begin_step(bounds[rank])
        for number, share in shares_to_train(batch, (bounds[rank], bounds[rank + 1]), n_logical):
            self._rank_sums.begin_rank(has_images=len(share.labels) > 0)
            self._learn_batch(share, mean_n_samples, number, recorder)
            if number == checked:
                digest = self._rank_sums.digest()
            self._rank_sums.end_rank()
        self._rank_sums.check_unchanged()
        if self.recheck and checked is not None:
            self.recheck.compare(order, bounds, checked, digest)

    def digest_of(self, batch: Batch, number: int) -> str:
        assert self._rank_sums and self._config.logical_ranks
        mean_n_samples = (batch.order.stop - batch.order.start) / self._config.logical_ranks
        with self._rank_sums.set_aside():
            self._learn_batch(batch, mean_n_samples, number, Recorder(self.device, HostStopwatch()))
            return self._rank_sums.digest()

    def _step_graph(self) -> StepGraph:
        must = self._config.cuda_graph is True
        return StepGraph(self.model, must, self._gradients, self._low_precision)

    def _weights_changed(self) -> None:
        """Mark the bfloat16 copies as stale, because anyone may have changed weights since the last step."""
        if self._low_precision:
            self._low_precision.stale = True

    def _seed(self, batch: Batch, rank: int) -> None:
        """Seed dropout by sample, and torch's generator by the minibatch's place and the rank."""
        self._batch_keys[: len(batch.samples)] = self._keys[batch.samples]
        order = batch.order
        seed = seed_of(Purpose.STEP, self._config.seed, order.epoch, order.first, rank)
        for generator in self._generators:
            generator.manual_seed(seed)


def _weights_of(config: Config, dataset: Dataset | Description) -> torch.Tensor | None:
    """Return the weights of the classes, or None if they count alike or only a description is known."""
    if config.class_weights is None or isinstance(dataset, Description):
        return None
    weights = class_weights(config, dataset.train.labels, dataset.class_names)
    return None if weights is None else torch.from_numpy(weights)


def _main_labels(batch: Batch) -> torch.Tensor:
    """Return the label with the larger share of each mixed image, like `batch.labels`."""
    assert batch.other_labels is not None and batch.label_weights is not None
    is_main = batch.label_weights >= 0.5
    is_main = is_main if batch.labels.dim() == 1 else is_main[:, None]
    return torch.where(is_main, batch.labels, batch.other_labels)


def _generators(arena: torch.Tensor) -> list[torch.Generator]:
    """Return torch's generators of the host and of the arena's device.

    torch.manual_seed also asks every other back end, which takes 160 us a call instead of 1.
    """
    generators = [torch.default_generator]
    if arena.is_cuda:
        generators.append(torch.cuda.default_generators[arena.get_device()])
    return generators


def _implementations_of(model: nn.Module, config: Config, on_gpu: bool) -> dict[str, str]:
    """Return how each part of the network is computed, as far as it is known before the first step."""
    copies = ", with bfloat16 copies of the weights" if low_precision.keeps_copies(config, model) else ""
    why_not = why_not_captured(config, on_gpu)
    return {
        "precision": config.precision + copies,
        "conv_layout": _conv_forms(model, config),
        "cuda_graph": f"not captured: {why_not}" if why_not else "to be captured in the fourth whole step",
        "compile": "to be compiled in the first whole step" if config.compile else "not compiled: as asked",
    }


def _conv_forms(model: nn.Module, config: Config) -> str:
    """Return which convolutions have which form."""
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, convolution.Convolution)
    }
    chosen = {
        "space_to_depth": [name for name, layer in layers.items() if layer.takes_blocks()],
        "dense": [name for name, layer in layers.items() if layer.is_dense() and not layer.takes_blocks()],
    }
    parts = [f"{form}: {', '.join(names)}" for form, names in chosen.items() if names]
    return "; ".join(parts) or f"plain (conv_layout: {convolution.layout_of(config)})"


def open_trained(
    config: Config, dataset: Described, memory: Memory, tensors: Path
) -> tuple[Replica, Described]:
    """Return a checkpoint's network in evaluation mode, and the dataset with the mean that it subtracts.

    Raises:
        UserError: The checkpoint is damaged or of another network.
    """
    config = dataclasses.replace(config, class_weights=None, loss=None, recompute=False)  # of training only
    replica = Replica(config, dataset, memory)
    replica.load(checkpoint.load(tensors), str(tensors))
    replica.begin_validation()
    return replica, with_mean(dataset, replica.mean)
