"""Metrics of several classes per image, against plain references and scikit-learn."""

import numpy as np
import pytest

from lockstep.runs.multilabel import LabelMetrics, average_precision


def cases() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return scores and labels: without equal scores, with many, and with all equal."""
    random = np.random.default_rng(0)
    labels = (random.random(60) < 0.3).astype(np.uint8)
    continuous = random.normal(size=60)
    return [(continuous, labels), (np.round(2 * continuous), labels), (np.zeros(60), labels)]


def reference(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the sum over all thresholds of precision times the rise of recall, threshold by threshold."""
    total, recall_before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        precision, recall = labels[chosen].mean(), labels[chosen].sum() / labels.sum()
        total += (recall - recall_before) * precision
        recall_before = recall
    return total


@pytest.mark.parametrize("number", range(3))
def test_average_precision_is_that_of_the_definition(number: int) -> None:
    scores, labels = cases()[number]
    assert average_precision(scores, labels) == pytest.approx(reference(scores, labels), abs=1e-12)
    assert (
        average_precision(scores, labels) != pytest.approx(average_precision(-scores, labels)) or number == 2
    )


@pytest.mark.parametrize("number", range(3))
def test_average_precision_is_that_of_scikit_learn(number: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = cases()[number]
    expected = metrics.average_precision_score(labels, scores)
    assert average_precision(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_a_perfect_ranking_and_a_class_without_images() -> None:
    assert average_precision(np.array([3.0, 2.0, 1.0]), np.array([1, 1, 0])) == 1.0
    assert average_precision(np.array([1.0, 2.0]), np.array([0, 0])) == 0.0
    assert average_precision(np.zeros(0), np.zeros(0)) == 0.0


def table() -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels of 40 images and 4 classes, the last of which no image has."""
    random = np.random.default_rng(3)
    labels = (random.random((40, 4)) < (0.5, 0.3, 0.1, 0.0)).astype(np.uint8)
    return np.clip(0.3 * labels + 0.7 * random.random((40, 4)), 0.01, 0.99), labels


def test_metrics_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, labels = table()
    ours, answers = LabelMetrics.of(np.log(probabilities), labels, 0.4), probabilities >= 0.4
    means = ours.means()
    for average in ("micro", "macro"):
        expected = metrics.precision_recall_fscore_support(labels, answers, average=average, zero_division=0)
        named = zip(("precision", "recall", "f1"), expected, strict=False)
        for name, value in named:
            assert means[f"{average}_{name}"] == pytest.approx(value), (average, name)
    assert means["label_error"] == pytest.approx(metrics.hamming_loss(labels, answers))
    with_images = [metrics.average_precision_score(labels[:, c], probabilities[:, c]) for c in range(3)]
    assert means["mean_average_precision"] == pytest.approx(np.mean(with_images))
    assert ours.columns()["support"] == labels.sum(0).tolist()
    assert ours.columns()["average_precision"] == pytest.approx([*with_images, 0.0])


def test_metrics_depend_neither_on_order_nor_on_trainers() -> None:
    probabilities, labels = table()
    order = np.random.default_rng(4).permutation(len(labels))
    one = LabelMetrics.of(np.log(probabilities), labels, 0.5)
    other = LabelMetrics.of(np.log(probabilities)[order], labels[order], 0.5)
    assert one.means() == other.means() and one.columns() == other.columns()


def test_a_threshold_moves_f1_and_not_the_average_precision() -> None:
    probabilities, labels = table()
    low, high = (LabelMetrics.of(np.log(probabilities), labels, t) for t in (0.2, 0.8))
    assert low.means()["mean_average_precision"] == high.means()["mean_average_precision"]
    assert low.means()["macro_recall"] > high.means()["macro_recall"]
