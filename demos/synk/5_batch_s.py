"""batch_s: the rows that each rank uses of its own shared variables, which scatter has filled."""

import numpy as np
import pytensor
import pytensor.tensor as pt

import lockstep.synk as synk

n_ranks = synk.fork()
n = 200  # rows on every rank
stored = pytensor.shared(np.zeros((1, 10)), name="stored")
weights = pytensor.shared(np.zeros((10, 5)), name="weights")
f = synk.function([], (pt.tanh(stored).dot(weights).sum(axis=0), "sum"), sliceable_shareds=[stored])
synk.distribute()

random = np.random.default_rng(0)
rows, values = random.normal(size=(n * n_ranks, 10)), random.normal(size=(10, 5))
synk.scatter(stored, rows)
synk.broadcast(weights, values)
by_rank = rows.reshape(n_ranks, n, 10)

numbers = random.integers(0, n, 50)
for name, batch_s, chosen in (
    ("a slice for all", slice(100, 200), by_rank[:, 100:]),
    ("row numbers for all", numbers, by_rank[:, numbers]),
    (
        "a slice for each",
        [slice(r, 100 + r) for r in range(n_ranks)],
        [by_rank[r, r : 100 + r] for r in range(n_ranks)],
    ),
    (
        "row numbers for each",
        [numbers[r:] for r in range(n_ranks)],
        [by_rank[r, numbers[r:]] for r in range(n_ranks)],
    ),
):
    expected = np.tanh(np.concatenate(list(chosen))).dot(values).sum(axis=0)
    assert np.allclose(f(batch_s=batch_s), expected)
    assert np.allclose(f(batch_s=batch_s, num_slices=4), expected)
    print(f"{name}: {expected.round(3)}")
