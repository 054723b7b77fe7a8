"""Helpers of the training demos: scikit-learn's handwritten digits, and a network for them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from sklearn.datasets import load_digits

N_TRAIN = 1500


def load() -> tuple[np.ndarray, ...]:
    """x and y to train on, x and y to validate on: float64 (n, 64) from 0 to 1, int64 (n,)."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = pictures[order] / 16, labels[order].astype(np.int64)
    return x[:N_TRAIN], y[:N_TRAIN], x[N_TRAIN:], y[N_TRAIN:]


def build_mlp(x: Any, sizes: tuple[int, ...] = (64, 64, 10)) -> tuple[Any, list[Any]]:
    """Return the scores of each class, and the parameters."""
    random, params, hidden = np.random.default_rng(1), [], x
    for number, (n_in, n_out) in enumerate(pairwise(sizes)):
        weight = pytensor.shared(random.normal(0, n_in**-0.5, (n_in, n_out)), name=f"w{number}")
        bias = pytensor.shared(np.zeros(n_out), name=f"b{number}")
        hidden = (pt.tanh(hidden) if number else hidden).dot(weight) + bias
        params += [weight, bias]
    return hidden, params


def loss_and_error(scores: Any, y: Any) -> tuple[Any, Any]:
    """Mean cross entropy, and the share of images that are mistaken."""
    chosen = pt.special.log_softmax(scores, axis=1)[pt.arange(y.shape[0]), y]
    return -chosen.mean(), pt.neq(scores.argmax(axis=1), y).mean()
