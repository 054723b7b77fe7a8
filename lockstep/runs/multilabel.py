"""Metrics of a multi-label validation (`task: multilabel`), from the scores and labels of all images.

They are functions of the set of (score, label) pairs, so they depend neither on the order of the images nor
on the number of trainers.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.runs.metrics import ratios


def average_precision(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the average precision of a ranking: the sum of (R_k - R_(k-1)) P_k over distinct scores.

    P_k and R_k are precision and recall of the images that score at least the k-th highest distinct score, so
    equal scores count together. It is the non-interpolated definition of scikit-learn's
    `average_precision_score`, after Manning, Raghavan and Schuetze 2008, Introduction to Information
    Retrieval, section 8.4.

    Args:
        scores: Of all images, float (n,).
        labels: 1 for images that have the class, (n,).

    Returns:
        The average precision; 0 if no image has the class.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(labels[order], dtype=np.int64)
    if not len(hits) or not hits[-1]:
        return 0.0
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # the last of equal scores
    found = hits[ends]
    precision, steps = found / (ends + 1), np.diff(found, prepend=0)
    return float((precision * steps).sum() / hits[-1])


@dataclass(frozen=True)
class LabelMetrics:
    """Metrics of every class, each (n_classes,); 0 where the definition divides by 0.

    Attributes:
        n_images: The number of images.
        support: The number of images that have the class, int64.
        predicted: The number of images for which it is predicted, int64.
        right: The number of images that are counted in both, int64.
        average_precision: See `average_precision`.
    """

    n_images: int
    support: np.ndarray
    predicted: np.ndarray
    right: np.ndarray
    average_precision: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, labels: np.ndarray, threshold: float) -> "LabelMetrics":
        """Return the metrics of a validation.

        Args:
            scores: Logarithms of the probability of each class, float (n_images, n_classes).
            labels: 0 or 1, like the scores.
            threshold: A class is predicted if its probability is at least this.
        """
        has = labels > 0
        answers = scores >= math.log(threshold)
        precisions = [average_precision(scores[:, c], has[:, c]) for c in range(scores.shape[1])]
        support, predicted, right = (each.sum(0, dtype=np.int64) for each in (has, answers, has & answers))
        return cls(len(scores), support, predicted, right, np.array(precisions, np.float64))

    @property
    def precision(self) -> np.ndarray:
        """The share of the predictions of each class that are right."""
        return ratios(self.right, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """The share of the images that have a class for which it is predicted."""
        return ratios(self.right, self.support)

    @property
    def f1(self) -> np.ndarray:
        """The harmonic mean of precision and recall."""
        return ratios(2 * self.right, self.support + self.predicted)

    def columns(self) -> dict[str, list[Any]]:
        """Return support, precision, recall, F1 and average precision in the order of the classes."""
        names = ("precision", "recall", "f1", "average_precision")
        return {"support": self.support.tolist(), **{name: getattr(self, name).tolist() for name in names}}

    def means(self) -> dict[str, float]:
        """Return the metrics over all classes.

        `mean_average_precision` is the mean over the classes that an image has. `macro_` means count every
        class once that has images or predictions. `micro_` ones count all decisions of all classes together.
        `label_error` is the share of these decisions that are wrong (the Hamming loss).
        """
        has_images, occurs = self.support > 0, self.support + self.predicted > 0
        means = {"mean_average_precision": _mean(self.average_precision[has_images])}
        right, predicted, support = (int(each.sum()) for each in (self.right, self.predicted, self.support))
        micro = {
            "precision": _ratio(right, predicted),
            "recall": _ratio(right, support),
            "f1": _ratio(2 * right, support + predicted),
        }
        for name, value in micro.items():
            means[f"macro_{name}"] = _mean(getattr(self, name)[occurs])
            means[f"micro_{name}"] = value
        n_decisions = self.n_images * len(self.support)
        return {**means, "label_error": _ratio(support + predicted - 2 * right, n_decisions)}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
