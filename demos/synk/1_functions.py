"""Functions: inputs are divided among the ranks, outputs are reduced by their modes."""

import numpy as np
import pytensor.tensor as pt

import lockstep.synk as synk

n_ranks = synk.fork()  # this process is a rank, too; the program itself remains serial
print(f"{n_ranks} ranks")

x, weights = pt.matrix("x"), pt.vector("weights")
scores = pt.tanh(x).dot(weights)
f = synk.function(
    inputs=[x],  # rows are divided
    bcast_inputs=[weights],  # every rank receives it whole
    outputs=[
        scores.mean(),
        (scores.max(), "max"),
        (scores.sum(), "sum"),
        (scores, "gather"),
    ],  # mean: avg, weighted
    name="scores",
)
synk.distribute()  # send functions and shared variables to the ranks

rows, one_each = np.random.default_rng(0).normal(size=(1001, 4)), np.ones(4)
mean, largest, total, each = f(rows, one_each)
expected = np.tanh(rows) @ one_each
print(
    f"mean {mean:.6f}, largest {largest:.6f}, total {total:.6f}, {len(each)} scores, modes {f.output_modes}"
)
assert np.allclose([mean, largest, total], [expected.mean(), expected.max(), expected.sum()])
assert np.allclose(each, expected)

# In slices: each rank computes one slice of its rows after another, which needs less memory.
assert np.allclose(f(rows, one_each, num_slices=4)[0], mean)
# Some outputs only; inputs by name; in this process only.
(largest_again,) = f(x=rows, weights=one_each, output_subset=[1])
assert largest_again == largest == f.alone(rows, one_each)[1]
