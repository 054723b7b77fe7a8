"""Metrics by class compared with scikit-learn's, sums over trainers, and the choice of the best epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.runs.metrics import AnswerCounts, best_of, has_ended

answers = st.integers(2, 6).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), min_size=1, max_size=40)
    )
)


@given(answers)
def test_metrics_are_scikit_learns(drawn: tuple[int, list[tuple[int, int]]]) -> None:
    """Also with classes that have no image or no answer."""
    metrics = pytest.importorskip("sklearn.metrics")
    n_classes, pairs = drawn
    labels, best = np.array(pairs).T
    counts = AnswerCounts.of(n_classes, labels, best)
    numbers = range(n_classes)
    matrix = np.zeros((n_classes, n_classes), np.int64)
    matrix[counts.labels, counts.answers] = counts.counts
    assert np.array_equal(matrix, metrics.confusion_matrix(labels, best, labels=numbers))
    theirs = metrics.precision_recall_fscore_support(labels, best, labels=numbers, zero_division=0)
    columns = counts.by_class().columns()
    for name, expected in zip(("precision", "recall", "f1", "support"), theirs, strict=True):
        assert np.allclose(columns[name], expected), name
    means = counts.by_class().means()
    for name in ("macro", "weighted"):
        expected = metrics.precision_recall_fscore_support(labels, best, average=name, zero_division=0)
        assert np.allclose([means[f"{name}_{kind}"] for kind in ("precision", "recall", "f1")], expected[:3])
    recalls = [(best[labels == number] == number).mean() for number in np.unique(labels)]
    assert means["balanced_accuracy"] == pytest.approx(np.mean(recalls))


@given(answers, st.integers(1, 5))
def test_the_counts_of_trainers_add_up(drawn: tuple[int, list[tuple[int, int]]], n_trainers: int) -> None:
    """Every trainer has a share of the images, some of them none."""
    n_classes, pairs = drawn
    labels, best = np.array(pairs).T
    whole = AnswerCounts.of(n_classes, labels, best)
    shares = [slice(rank, None, n_trainers) for rank in range(n_trainers)]
    tables = [AnswerCounts.of(n_classes, labels[share], best[share]).table() for share in shares]
    joined = AnswerCounts.joined(n_classes, np.concatenate(tables))
    assert joined.triples() == whole.triples()


RECORD = [
    {"epoch": 1, "error_top1": 0.5, "macro_f1": 0.6},
    {"epoch": 2, "error_top1": 0.3, "macro_f1": 0.4},
    {"epoch": 4, "error_top1": 0.3, "macro_f1": 0.5},
]


@pytest.mark.parametrize(("monitor", "epoch"), [("error_top1", 2), ("macro_f1", 1)])
def test_the_best_epoch_is_the_earliest_of_the_best(monitor: str, epoch: int) -> None:
    best = best_of(RECORD, monitor)
    assert best is not None and best["epoch"] == epoch


def test_patience_counts_epochs_since_the_best() -> None:
    assert has_ended(RECORD, "error_top1", 2) and not has_ended(RECORD, "error_top1", 3)
    assert has_ended(RECORD, "macro_f1", 3) and not has_ended(RECORD, "macro_f1", None)
    assert not has_ended([], "error_top1", 1)
    assert not has_ended(RECORD, "loss", 1)  # no entry of an older version has it
