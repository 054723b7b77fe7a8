"""Shared variables: every rank has its own value; collectives move, compare and combine them."""

import numpy as np
import pytensor

import lockstep.synk as synk

n_ranks = synk.fork()
stored = pytensor.shared(np.ones((4, 4)), name="stored")
weights = pytensor.shared(np.zeros((4, 5)), name="weights")
f = synk.function([], stored.dot(weights).mean(axis=0), sliceable_shareds=[stored])
synk.distribute()
print("rows by rank:", synk.get_lengths(stored))

rows, values = np.random.default_rng(0).normal(size=(8 * n_ranks + 1, 4)), np.arange(20.0).reshape(4, 5)
synk.scatter(stored, rows)  # divide by rows
synk.broadcast(weights, values)  # the same value on all ranks
print("after scatter:", synk.get_shapes(stored))
assert np.array_equal(synk.gather(stored, nd_up=0), rows)
assert np.allclose(f(), (rows @ values).mean(axis=0)), "ranks count by their rows"
assert np.allclose(f(num_slices=2), f())

for rank in range(n_ranks):
    synk.set_value(rank, "weights", values + rank)  # names work, too
synk.all_reduce(weights, op="avg")
mean = (n_ranks - 1) / 2
assert all(np.allclose(synk.get_value(rank, weights), values + mean) for rank in range(n_ranks))
print("all_reduce: every rank has", synk.get_value(n_ranks - 1, weights)[0])

synk.all_gather(stored)  # now every rank has all rows
print("after all_gather:", synk.get_lengths(stored))
