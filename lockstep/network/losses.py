"""The training loss: (binary) cross-entropy or a user's function, with weights of classes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.config import Config
from lockstep.config.tasks import is_multilabel
from lockstep.errors import UserError
from lockstep.objects import import_function


class TrainingLoss:
    """The loss of each image, and its sum over a batch.

    Args:
        config: Has `loss`, `label_smoothing` and `class_weights`.
        weights: The weight of each class, float64 (n_classes,), or None for equal ones. With `task:
            multilabel` the weight of the images that have a class, beside those that lack it.
        like: A tensor of the dtype and on the device of the logits.
    """

    def __init__(self, config: Config, weights: torch.Tensor | None, like: torch.Tensor) -> None:
        self._smoothing, self._name = config.label_smoothing, config.loss
        self._own = import_function("loss", config.loss) if config.loss else None
        self._weights = None if weights is None else weights.to(like.device, like.dtype)
        self._is_binary = is_multilabel(config)

    def sum(self, logits: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Return the summed loss of a batch, a scalar. The arguments are those of `of_each`."""
        if self._own is None and self._weights is None and not self._is_binary:
            return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._smoothing)
        return self.of_each(logits, labels, samples).sum()

    def of_each(self, logits: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Return the loss of each image, (n,), times the weight of its class.

        With `task: multilabel` it is the mean over the classes, and the weight of a class multiplies the part
        of the loss of the images that have it.

        Args:
            logits: (n, class).
            labels: int64 (n,), or with `task: multilabel` 0 and 1, (n, class).
            samples: Sample numbers, int64 (n,), for errors.

        Raises:
            UserError: The user's function returns something else than n finite numbers.
        """
        if self._is_binary:
            targets = labels.to(logits.dtype)
            if self._own is not None:
                return self._call(self._own, logits, targets, samples)
            targets = targets * (1 - self._smoothing) + self._smoothing / 2
            return binary_losses(logits, targets, self._weights)
        if self._own is None:
            losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self._smoothing)
        else:
            losses = self._call(self._own, logits, labels, samples)
        return losses if self._weights is None else losses * self._weights[labels]

    def _call(
        self, own: Callable[..., Any], logits: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor
    ) -> torch.Tensor:
        where = f"loss: {self._name}, called for {len(labels)} images,"
        try:
            losses = own(logits, labels)
        except Exception as error:  # the user's code
            raise UserError(f"{where} fails: {type(error).__name__}: {error}") from error
        needed = f"It must return one float per image, shape ({len(labels)},), that depends on the logits."
        if not isinstance(losses, torch.Tensor):
            raise UserError(f"{where} returns {type(losses).__name__}. {needed}")
        if losses.shape != labels.shape[:1] or not losses.is_floating_point() or not losses.requires_grad:
            raise UserError(f"{where} returns {losses.dtype} of shape {tuple(losses.shape)}. {needed}")
        if not losses.is_cuda:  # on a GPU this would wait for the device; there the lines of progress check
            self._check_finite(losses.detach(), logits.detach(), labels, samples)
        return losses

    def _check_finite(
        self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor
    ) -> None:
        """Raise UserError for the first image whose logits are finite and whose loss is not."""
        wrong = (~losses.isfinite() & logits.isfinite().all(1)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            classes = labels[place].nonzero().flatten().tolist() if self._is_binary else int(labels[place])
            raise UserError(
                f"loss: {self._name} returns {losses[place].item()} for training sample "
                f"{int(samples[place])} of class {classes}, whose logits are finite. "
                "Keep logarithms and divisions away from 0."
            )


def binary_losses(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the binary cross-entropy of each image, the mean over its classes: (n,).

    Args:
        logits: (n, class).
        targets: From 0 to 1, like the logits.
        weights: The weight of the part of images that have a class, (class,), or None.
    """
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none", pos_weight=weights)
    return losses.mean(1)
