"""Weights of classes, whose mean over the training images is 1, and draws of samples by class."""

import numpy as np
import pytest
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import Layer, resolve
from lockstep.data.classes import check_classes, class_weights, draw_by_class
from lockstep.data.hkl import HklArray
from lockstep.data.sampling import EpochSamples
from lockstep.data.split import HklSplit
from lockstep.errors import UserError

NAMES = ("cat", "dog", "owl")
labels = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(np.array)
weights = st.just("balanced") | st.lists(st.floats(0.01, 9), min_size=3, max_size=3) | st.just({"dog": 4})


@given(labels, weights)
def test_the_mean_weight_of_the_training_images_is_1(labels: np.ndarray, given_weights: object) -> None:
    values = class_weights(make_config(class_weights=given_weights), labels, NAMES)
    assert values is not None and values[labels].mean() == pytest.approx(1)


def test_balanced_weights_give_every_class_the_same_sum() -> None:
    counts = np.array([10, 3, 1])
    values = class_weights(make_config(class_weights="balanced"), np.repeat(np.arange(3), counts), NAMES)
    assert values is not None and np.allclose(values * counts, 14 / 3)
    named = class_weights(make_config(class_weights={"owl": 3}), np.repeat(np.arange(3), counts), NAMES)
    assert named is not None and np.allclose(named / named[0], [1, 1, 3])
    config, _ = resolve([Layer("command line", {"class_weights": {1: 3}})])  # YAML's {1: 3}
    numbered = class_weights(config, np.repeat(np.arange(3), counts), ("0", "1", "2"))
    assert numbered is not None and np.allclose(numbered / numbered[0], [1, 3, 1])


@given(labels, st.sampled_from(["balanced", "sqrt"]), st.integers(0, 9), st.integers(1, 5))
def test_a_draw_has_the_shares_and_uses_all_images_before_one_repeats(labels, sampler, seed, epoch) -> None:
    samples = draw_by_class(labels, sampler, seed, epoch)
    assert len(samples) == len(labels)
    classes, counts = np.unique(labels, return_counts=True)
    shares = np.sqrt(counts) if sampler == "sqrt" else np.ones(len(counts))
    drawn = np.bincount(labels[samples], minlength=3)[classes]
    assert (np.abs(drawn - shares / shares.sum() * len(labels)) < 1).all()
    times = np.bincount(samples, minlength=len(labels))
    for number in classes:
        assert np.ptp(times[labels == number]) <= 1
    assert np.array_equal(samples, draw_by_class(labels, sampler, seed, epoch))


def test_epochs_and_seeds_draw_other_samples() -> None:
    labels = np.repeat(np.arange(3), [50, 30, 20])
    first = draw_by_class(labels, "balanced", 0, 1)
    for other in (draw_by_class(labels, "balanced", 0, 2), draw_by_class(labels, "balanced", 1, 1)):
        assert not np.array_equal(first, other)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple), st.data())
def test_listed_samples_are_read_from_their_rows(file_rows: tuple[int, ...], data: st.DataObject) -> None:
    n = sum(file_rows)
    samples = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
    order = EpochSamples.listed(file_rows, samples)
    assert len(order) == n and np.array_equal(order.samples(0, n), samples)
    starts = np.cumsum([0, *file_rows])
    assert [starts[row.file] + row.first for row in order.rows(0, n)] == samples.tolist()
    assert all(row.count == 1 and row.first < file_rows[row.file] for row in order.rows(0, n))


@pytest.mark.parametrize(
    ("given_weights", "message"),
    [
        ([1.0, 2.0], "class_weights: 2 weights for 3 classes"),
        ({"dug": 2}, "the dataset has no class 'dug' \\(did you mean 'dog'\\?\\)"),
        ([0.0, 0.0, 1.0], "no training image has a class with a weight above 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given_weights: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        class_weights(make_config(class_weights=given_weights), np.array([0, 1, 1]), NAMES)


def test_a_weight_for_a_name_that_several_classes_have_is_refused() -> None:
    names, labels = ("crane", "owl", "crane"), np.array([0, 1, 2])
    with pytest.raises(UserError, match="class_weights: several classes are named 'crane'"):
        class_weights(make_config(class_weights={"crane": 2}), labels, names)
    assert class_weights(make_config(class_weights={"owl": 2}), labels, names) is not None


def test_files_that_are_read_whole_have_no_sampler() -> None:
    file = HklArray("0.hkl", "data", (3, 8, 8, 3), np.dtype(np.uint8), None, (1, 1, 1), "c01b")
    split = HklSplit((file,), np.array([0, 1, 2]))
    with pytest.raises(UserError, match="sampler: reads single images"):
        check_classes(make_config(sampler="sqrt"), split, NAMES)


SEVERAL = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]], np.uint8)


@pytest.mark.parametrize(
    ("given_weights", "expected"),
    [("balanced", [1 / 3, 3.0, 1.0]), ([2.0, 0.0, 1.0], [2.0, 0.0, 1.0]), ({"owl": 3}, None)],
)
def test_weights_of_several_classes_are_of_the_images_that_have_them(
    given_weights: object, expected: list[float] | None
) -> None:
    config = make_config(class_weights=given_weights, task="multilabel")
    values = class_weights(config, SEVERAL, NAMES)
    assert values is not None
    assert values.tolist() == (expected or [3.0 if name == "owl" else 1.0 for name in NAMES])
    with pytest.raises(UserError, match="class_weights: 2 weights for 3 classes"):
        class_weights(make_config(class_weights=[1.0, 2.0]), SEVERAL, NAMES)
