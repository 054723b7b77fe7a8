"""Imbalanced classes: weights of the loss (`class_weights`), and draws of an epoch's samples (`sampler`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError, nearest

if TYPE_CHECKING:
    from lockstep.config import Config
    from lockstep.data.split import Split


def class_weights(config: "Config", labels: np.ndarray, class_names: Sequence[str]) -> np.ndarray | None:
    """Return the weight of each class, whose mean over the training images is 1.

    With `task: multilabel` it is the weight of the images that have a class, beside those that lack it.

    Args:
        config: Has `class_weights`: 'balanced', one weight per class, or weights by class name, where classes
            that are not named have 1.
        labels: Of the training images, int64 (n,), or 0 and 1 of each class, (n, class).
        class_names: Of all classes.

    Returns:
        float64 (n_classes,), or None if all classes count alike.

    Raises:
        UserError: The weights do not fit the classes; the message names what does not.
    """
    given = config.class_weights
    if given is None:
        return None
    if labels.ndim == 2:
        return _positive_weights(given, labels, class_names)
    counts = np.bincount(labels, minlength=len(class_names))
    if given == "balanced":
        weights = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)
    else:
        weights = _given_weights(given, class_names)
    total = float((weights * counts).sum())
    if total <= 0:
        raise UserError("class_weights: no training image has a class with a weight above 0. Raise one.")
    scaled: np.ndarray = weights * (len(labels) / total)
    return scaled


def _positive_weights(given: Any, labels: np.ndarray, class_names: Sequence[str]) -> np.ndarray:
    """Return the weight of the images that have a class, beside those that lack it (`pos_weight`).

    'balanced' is the number of images that lack it for each that has it; 1 if none has it.
    """
    if given != "balanced":
        return _given_weights(given, class_names)
    n_having = labels.sum(0, dtype=np.int64)
    ratios: np.ndarray = np.divide(
        len(labels) - n_having, n_having, out=np.ones(len(n_having)), where=n_having > 0
    )
    return ratios


def _given_weights(given: Any, class_names: Sequence[str]) -> np.ndarray:
    """Return the weights of a list, or of a mapping by class name: float64 (n_classes,)."""
    if not isinstance(given, Mapping):
        if len(given) != len(class_names):
            raise UserError(
                f"class_weights: {len(given)} weights for {len(class_names)} classes. Give one for each "
                "class, or a mapping by class name."
            )
        return np.array(given, np.float64)
    weights = np.ones(len(class_names))
    for name, weight in given.items():
        if name not in class_names:
            raise UserError(f"class_weights: the dataset has no class {name!r}{nearest(name, class_names)}")
        if class_names.count(name) > 1:  # as ImageNet's crane
            raise UserError(f"class_weights: several classes are named {name!r}. Give a list of weights.")
        weights[class_names.index(name)] = weight
    return weights


def draw_by_class(labels: np.ndarray, sampler: str, seed: int, epoch: int) -> np.ndarray:
    """Return an epoch's samples, as many as there are images, with a chosen share of each class.

    Images of a class repeat only after all of them have occurred. The result is a function of the arguments,
    so it does not depend on trainers or restarts.

    Args:
        labels: Of the training images, int64 (n,).
        sampler: 'balanced': every class equally often. 'sqrt': as often as the root of its images.
        seed: The run's seed.
        epoch: The epoch's number.

    Returns:
        Sample numbers, int64 (n,), in random order.
    """
    random = generator(seed, epoch, Purpose.SAMPLER)
    classes, counts = np.unique(labels, return_counts=True)
    shares = np.sqrt(counts) if sampler == "sqrt" else np.ones(len(counts))
    drawn = []
    for number, n_drawn in zip(classes, _quotas(shares, len(labels), random), strict=True):
        members = np.flatnonzero(labels == number)
        n_rounds, rest = divmod(int(n_drawn), len(members))
        drawn += [members] * n_rounds + [random.permutation(members)[:rest]]
    samples: np.ndarray = random.permutation(np.concatenate(drawn))
    return samples


def _quotas(shares: np.ndarray, n_samples: int, random: np.random.Generator) -> np.ndarray:
    """Return whole numbers in proportion to `shares` that add up to n_samples; ties are broken at random."""
    exact = shares / shares.sum() * n_samples
    quotas: np.ndarray = np.floor(exact).astype(np.int64)
    order = random.permutation(len(shares))
    largest = order[np.argsort((quotas - exact)[order], kind="stable")]
    quotas[largest[: n_samples - quotas.sum()]] += 1
    return quotas


def check_classes(config: "Config", split: "Split", class_names: Sequence[str]) -> None:
    """Check, before anything starts, that weights and sampler fit a dataset.

    Args:
        config: The run's configuration.
        split: The training images.
        class_names: Of all classes.

    Raises:
        UserError: They don't fit; the message names the key.
    """
    if config.class_weights is not None:
        class_weights(config, split.labels, class_names)
    if config.sampler and split.is_read_whole(0):
        raise UserError(
            "sampler: reads single images, and theano_alexnet's files can be read only whole. "
            "Convert the folder (preprocessing/convert.py), or set sampler: null."
        )
