"""Metrics of a validation by class, from counts of (label, answer), and the choice of the best epoch.

Trainers add their counts, which are whole numbers, so the metrics do not depend on the number of trainers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

HIGHER_IS_BETTER = {
    "error_top1": False,
    "loss": False,
    "macro_f1": True,
    "balanced_accuracy": True,
    "micro_f1": True,
    "mean_average_precision": True,
}


@dataclass(frozen=True)
class AnswerCounts:
    """The sparse confusion matrix of a validation. Each (label, answer) occurs once, in ascending order.

    Attributes:
        n_classes: The number of classes.
        labels: int64 (n,), the classes of images.
        answers: int64 (n,), the most probable classes.
        counts: int64 (n,), the number of such images.
    """

    n_classes: int
    labels: np.ndarray
    answers: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, n_classes: int, labels: np.ndarray, answers: np.ndarray) -> "AnswerCounts":
        """Return the counts for one label and one answer per image, int64 (n_images,)."""
        pairs, counts = np.unique(labels * n_classes + answers, return_counts=True)
        return cls(n_classes, pairs // n_classes, pairs % n_classes, counts)

    @classmethod
    def joined(cls, n_classes: int, table: np.ndarray) -> "AnswerCounts":
        """Return the sum of the counts of several trainers, whose `table`s stand one after another."""
        pairs, places = np.unique(table[:, 0] * n_classes + table[:, 1], return_inverse=True)
        counts = np.zeros(len(pairs), np.int64)
        np.add.at(counts, places, table[:, 2])
        return cls(n_classes, pairs // n_classes, pairs % n_classes, counts)

    def table(self) -> np.ndarray:
        """Return (label, answer, count) for every pair that occurs, int64 (n, 3)."""
        return np.stack([self.labels, self.answers, self.counts], 1)

    def triples(self) -> list[list[int]]:
        """Return the rows of `table` as lists."""
        triples: list[list[int]] = self.table().tolist()
        return triples

    def by_class(self) -> "ClassMetrics":
        """Return the metrics of every class."""
        support, answered = (self._sums(each, self.counts) for each in (self.labels, self.answers))
        right = self._sums(self.labels, np.where(self.labels == self.answers, self.counts, 0))
        precision, recall = ratios(right, answered), ratios(right, support)
        return ClassMetrics(support, answered, precision, recall, ratios(2 * right, support + answered))

    def _sums(self, classes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        sums = np.zeros(self.n_classes, np.int64)
        np.add.at(sums, classes, counts)
        return sums


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of every class, each (n_classes,); 0 where the definition divides by 0.

    Attributes:
        support: The number of its images, int64.
        answered: The number of images for which it is the answer, int64.
        precision: The share of these answers that are right.
        recall: The share of its images that are recognized.
        f1: The harmonic mean of precision and recall.
    """

    support: np.ndarray
    answered: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray

    def columns(self) -> dict[str, list[Any]]:
        """Return support, precision, recall and F1 as lists in the order of the classes."""
        shares = {"precision": self.precision, "recall": self.recall, "f1": self.f1}
        return {"support": self.support.tolist(), **{name: each.tolist() for name, each in shares.items()}}

    def means(self) -> dict[str, float]:
        """Return the means over classes.

        `macro_` means count every class once that has images or answers, `weighted_` ones every class as
        often as it has images. `balanced_accuracy` is the mean recall of the classes that have images.
        """
        occurs, has_images = self.support + self.answered > 0, self.support > 0
        means = {"balanced_accuracy": float(self.recall[has_images].mean())}
        for name in ("precision", "recall", "f1"):
            values = getattr(self, name)
            means[f"macro_{name}"] = float(values[occurs].mean())
            means[f"weighted_{name}"] = float(np.average(values, weights=self.support))
        return means


def error_of(entry: Mapping[str, float]) -> float:
    """Return the top-1 error of a validation, or for `task: multilabel` 1 less the mean average precision."""
    error = entry.get("error_top1")
    return 1 - entry["mean_average_precision"] if error is None else error


def best_of(record: Iterable[Mapping[str, float]], monitor: str) -> Mapping[str, float] | None:
    """Return the earliest of the best entries; None if no entry has the monitored value.

    Args:
        record: Entries of validations, oldest first.
        monitor: A key of HIGHER_IS_BETTER.
    """
    return min(
        (each for each in record if each.get(monitor) is not None),
        key=partial(cost_of, monitor=monitor),
        default=None,
    )


def cost_of(entry: Mapping[str, float], monitor: str) -> float:
    """Return the monitored value of an entry that has it, negated if higher is better."""
    return -entry[monitor] if HIGHER_IS_BETTER[monitor] else entry[monitor]


def best_epoch(record: Sequence[Mapping[str, float]], monitor: str) -> int | None:
    """Return the epoch of the earliest best entry; None if no entry has the monitored value."""
    best = best_of(record, monitor)
    if best is None:
        return None
    return int(best.get("epoch", record.index(best) + 1))  # older records have every epoch


def has_ended(record: Sequence[Mapping[str, float]], monitor: str, patience: int | None) -> bool:
    """Return whether the last `patience` epochs have brought no improvement. None never ends."""
    best = best_of(record, monitor) if patience is not None else None
    if patience is None or best is None:
        return False
    return record[-1].get("epoch", 0) - best.get("epoch", 0) >= patience


def ratios(parts: np.ndarray, wholes: np.ndarray) -> np.ndarray:
    """Return parts / wholes, float64 (n,), and 0 where a whole is 0."""
    quotients: np.ndarray = np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0)
    return quotients
