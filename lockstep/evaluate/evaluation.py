"""Validation without training: each trainer predicts a share, and the launcher collects the predictions."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.backends import backend_of
from lockstep.comm.group import World
from lockstep.comm.messages import Order, Predictions, WarningMessage
from lockstep.comm.pipes import Pipe
from lockstep.data.sampling import minibatches, share
from lockstep.errors import UserError
from lockstep.evaluate.data import open_data
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import Feed, open_feed
from lockstep.network.replica import Replica, open_trained
from lockstep.runs.metrics import AnswerCounts
from lockstep.runs.multilabel import LabelMetrics
from lockstep.runs.plan import RunPlan
from lockstep.trainer.setup import computing


def run_validator(
    control: Pipe, board: StatusBoard, plan: RunPlan, world: World, n_views: int, own_mean: bool
) -> bool:
    """Predict this rank's share of every batch and send the predictions to the launcher.

    Args:
        control: The pipe to the launcher.
        board: Gets the phase of this process.
        plan: The run's plan, whose `start` is the checkpoint to validate.
        world: This process's rank.
        n_views: Views (crops and mirrors) of each image whose probabilities are averaged.
        own_mean: As of `open_data`.

    Returns:
        Whether the launcher stopped the validation early.
    """
    with computing(plan.config, world, board):
        return _predict_share(control, board, plan, world, n_views, own_mean)


def _predict_share(
    control: Pipe, board: StatusBoard, plan: RunPlan, world: World, n_views: int, own_mean: bool
) -> bool:
    config = dataclasses.replace(plan.config, para_load=False)  # validation has no loader processes
    board.say("opening the dataset and the checkpoint")
    assert plan.start
    dataset, _ = open_data(config, plan.folder, plan.start.stem, own_mean)  # the launcher has shown the notes
    backend = backend_of(config.devices[world.local_rank])
    backend.start_computing(config)
    replica, dataset = open_trained(config, dataset, backend.memory, plan.start)
    warning = backend.speed_up(replica, config)
    if warning and world.rank == 0:
        control.send(WarningMessage(warning))
    orders = list(orders_of(len(dataset.val), config.batch_size, world, n_views))
    feed = open_feed(backend, config, dataset, replica, iter(orders), board.say)
    stopped = False
    for _ in range(0, len(orders), n_views):
        control.send(predict(feed, replica, n_views, board))
        stopped = control.poll()  # the launcher sends nothing but Stop
        if stopped:
            break
    feed.close()
    replica.arena.block.close()
    return stopped


def orders_of(n_images: int, batch_size: int, world: World, n_views: int) -> Iterator[Order]:
    """Yield a rank's orders: all views of its share of a batch, then the next batch, without empty shares."""
    size = batch_size * world.size
    for start, stop in minibatches(n_images, size):
        first, last = share(start, stop, world.rank, world.size)
        if first < last:
            for view in range(n_views):
                yield Order("val", 1, start // size + 1, start, stop, first, last, view)


def predict(feed: Feed, replica: Replica, n_views: int, board: StatusBoard) -> Predictions:
    """Predict one batch from the average of its views' probabilities.

    Args:
        feed: Its next n_views batches are views of the same images.
        replica: In evaluation mode.
        n_views: Views of each image.
        board: Shows which batch is being predicted.
    """
    views = []
    for _ in range(n_views):
        order = feed.next()
        board.say(f"{order}: validating")
        batch = feed.batch()
        labels = batch.labels.cpu()
        views.append(replica.log_probabilities(batch).cpu())
        feed.release()
    mean = torch.stack(views).logsumexp(0) - math.log(n_views)
    if labels.dim() == 2:
        losses = _binary_losses(mean, labels.double())
        return Predictions(order.first, labels.tolist(), mean.tolist(), [], losses.tolist())
    best = mean.topk(min(5, mean.shape[1])).indices
    losses = -mean.gather(1, labels[:, None])[:, 0]
    hits = (best == labels[:, None]).any(1)
    return Predictions(order.first, labels.tolist(), best[:, 0].tolist(), hits.tolist(), losses.tolist())


def _binary_losses(log_probabilities: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the binary cross-entropy of each image, the mean over its classes."""
    least = torch.finfo(log_probabilities.dtype).tiny  # a probability of 1 would have no other one
    others = (-log_probabilities.clamp(max=-least).expm1()).log()
    return -torch.where(labels > 0, log_probabilities, others).mean(1)


@dataclass(frozen=True)
class ClassMistakes:
    """A class and the class it is most often mistaken for. `error` is the share of its images."""

    label: int
    n_images: int
    error: float
    mistaken_for: int
    n_mistaken: int


class Evaluation:
    """The predictions of all trainers, in the order of the images."""

    def __init__(self, n_images: int) -> None:
        self.labels = np.full(n_images, -1)
        self.answers = np.full(n_images, -1)
        self._in_top5 = np.zeros(n_images, bool)
        self._losses = np.zeros(n_images)

    def take(self, predictions: Predictions) -> None:
        """Record the predictions of a range of images."""
        place = slice(predictions.first, predictions.first + len(predictions.labels))
        assert (self.answers[place] == -1).all(), "an image was predicted twice"
        self.labels[place], self.answers[place] = predictions.labels, predictions.answers
        self._in_top5[place], self._losses[place] = predictions.in_top5, predictions.losses

    def summary(self) -> dict[str, float]:
        """Return the mean cross-entropy and the top-1 and top-5 errors (shares).

        Raises:
            UserError: The loss is not finite.
        """
        assert (self.answers >= 0).all(), "an image was not predicted"
        loss = _finite(float(self._losses.mean()))
        top1, top5 = (self.answers != self.labels).mean(), 1 - self._in_top5.mean()
        return {"loss": loss, "error_top1": float(top1), "error_top5": float(top5)}

    def counts(self, n_classes: int) -> AnswerCounts:
        """Return the number of images by label and answer."""
        return AnswerCounts.of(n_classes, self.labels, self.answers)

    def worst(self, n_classes: int) -> list[ClassMistakes]:
        """Return up to `n_classes` classes with errors, worst first."""
        confusions = []
        for label in np.unique(self.labels[self.answers != self.labels]):
            answers = self.answers[self.labels == label]
            wrong = np.bincount(answers[answers != label])
            confusions.append(
                ClassMistakes(
                    int(label),
                    len(answers),
                    wrong.sum() / len(answers),
                    int(wrong.argmax()),
                    int(wrong.max()),
                )
            )
        return sorted(confusions, key=lambda each: (-each.error, each.label))[:n_classes]


class LabelEvaluation:
    """The predictions of all trainers with `task: multilabel`, in the order of the images."""

    def __init__(self, n_images: int, n_classes: int, threshold: float) -> None:
        self._scores = np.full((n_images, n_classes), np.nan)
        self._labels = np.zeros((n_images, n_classes), np.uint8)
        self._losses = np.zeros(n_images)
        self._threshold = threshold

    def take(self, predictions: Predictions) -> None:
        """Record the predictions of a range of images."""
        place = slice(predictions.first, predictions.first + len(predictions.labels))
        assert np.isnan(self._scores[place]).all(), "an image was predicted twice"
        self._scores[place], self._labels[place] = predictions.answers, predictions.labels
        self._losses[place] = predictions.losses

    def summary(self) -> dict[str, float]:
        """Return the mean binary cross-entropy.

        Raises:
            UserError: The loss is not finite.
        """
        return {"loss": _finite(float(self._losses.mean()))}

    def metrics(self) -> LabelMetrics:
        """Return the metrics of every class."""
        return LabelMetrics.of(self._scores, self._labels, self._threshold)


def _finite(loss: float) -> float:
    """Return the loss. Raise UserError if it is not finite."""
    if not math.isfinite(loss):
        raise UserError(
            f"the loss is {loss}: the weights of this network are damaged, or belong to another one"
        )
    return loss
