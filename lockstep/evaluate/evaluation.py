"""Validation on its own: what one trainer does of it, and what the launcher makes of the answers."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.backends import backend_of
from lockstep.comm.group import World
from lockstep.comm.messages import Notice, Order, Predictions
from lockstep.comm.pipes import Pipe
from lockstep.data.dataset import open_dataset
from lockstep.data.sampling import minibatches, share
from lockstep.errors import UserError
from lockstep.launch.computing import computing
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import Feed, open_feed
from lockstep.network.replica import Replica, open_trained
from lockstep.runs.plan import Plan


def run_validator(control: Pipe, board: StatusBoard, plan: Plan, world: World, n_views: int) -> bool:
    """The process of trainer `world.rank`: predicts its share of every minibatch, and tells the launcher.

    Returns whether it stopped early because the launcher asked.
    """
    with computing(plan.config, world, board):
        return _predict_share(control, board, plan, world, n_views)


def _predict_share(control: Pipe, board: StatusBoard, plan: Plan, world: World, n_views: int) -> bool:
    config = dataclasses.replace(plan.config, para_load=False)  # there are no loaders here
    board.say("opening the dataset and the checkpoint")
    dataset = open_dataset(config)
    backend = backend_of(config.devices[world.local_rank])
    backend.start_computing(config)
    assert plan.start
    replica, dataset = open_trained(config, dataset, backend.memory, plan.start)
    notice = backend.speed_up(replica, config)
    if notice and world.rank == 0:
        control.send(Notice(notice))
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
    """A rank's orders: every view of a minibatch, then the next minibatch. Empty shares are left out."""
    size = batch_size * world.size
    for start, stop in minibatches(n_images, size):
        first, last = share(start, stop, world.rank, world.size)
        if first < last:
            for view in range(n_views):
                yield Order("val", 1, start // size + 1, start, stop, first, last, view)


def predict(feed: Feed, replica: Replica, n_views: int, board: StatusBoard) -> Predictions:
    """One batch. Of several views the probabilities are averaged."""
    seen = []
    for _ in range(n_views):
        order = feed.next()
        board.say(f"{order}: validating")
        batch = feed.batch()
        labels = batch.labels.cpu()
        seen.append(replica.log_probabilities(batch).cpu())
        feed.release()
    mean = torch.stack(seen).logsumexp(0) - math.log(n_views)
    best = mean.topk(min(5, mean.shape[1])).indices
    losses = -mean.gather(1, labels[:, None])[:, 0]
    hits = (best == labels[:, None]).any(1)
    return Predictions(order.first, labels.tolist(), best[:, 0].tolist(), hits.tolist(), losses.tolist())


@dataclass(frozen=True)
class Confusion:
    """A class, and what it was most often taken for. error: a share of its images."""

    label: int
    n_images: int
    error: float
    mistaken_for: int
    n_mistaken: int


class Evaluation:
    """All predictions, in the order of the images, whoever made them."""

    def __init__(self, n_images: int) -> None:
        self.labels = np.full(n_images, -1)
        self.answers = np.full(n_images, -1)
        self._in_top5 = np.zeros(n_images, bool)
        self._losses = np.zeros(n_images)

    def take(self, predictions: Predictions) -> None:
        place = slice(predictions.first, predictions.first + len(predictions.labels))
        assert (self.answers[place] == -1).all(), "an image was predicted twice"
        self.labels[place], self.answers[place] = predictions.labels, predictions.answers
        self._in_top5[place], self._losses[place] = predictions.in_top5, predictions.losses

    def summary(self) -> dict[str, float]:
        """Mean cross-entropy and the shares of wrong top-1 and top-5 answers, every image counted once.

        Raises UserError where the network gives no numbers.
        """
        assert (self.answers >= 0).all(), "an image was not predicted"
        loss = float(self._losses.mean())
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss}: this network's weights are broken, or the wrong ones")
        top1, top5 = (self.answers != self.labels).mean(), 1 - self._in_top5.mean()
        return {"loss": loss, "error_top1": float(top1), "error_top5": float(top5)}

    def worst(self, n_classes: int) -> list[Confusion]:
        """The classes with the largest error, worst first; those without an error are left out."""
        found = []
        for label in np.unique(self.labels[self.answers != self.labels]):
            answers = self.answers[self.labels == label]
            wrong = np.bincount(answers[answers != label])
            found.append(
                Confusion(
                    int(label),
                    len(answers),
                    wrong.sum() / len(answers),
                    int(wrong.argmax()),
                    int(wrong.max()),
                )
            )
        return sorted(found, key=lambda each: (-each.error, each.label))[:n_classes]
