"""batch: the rows of the inputs that a call uses. Every rank reads its share from shared memory."""

import numpy as np
import pytensor.tensor as pt

import lockstep.synk as synk

synk.fork()
x, y = pt.matrix("x"), pt.matrix("y")
f = synk.function([x], x.dot(y).mean(axis=0), bcast_inputs=[y])
synk.distribute()

random = np.random.default_rng(0)
rows, columns = random.normal(size=(1000, 10)), random.normal(size=(10, 5))
data = f.build_inputs(rows, columns)  # Data for every input

for name, batch, chosen in (
    ("the first 100", 100, rows[:100]),
    ("a slice, a view for each rank", slice(10, 100), rows[10:100]),
    ("a list, in its order", [7, 3, 3, 999], rows[[7, 3, 3, 999]]),
    ("a mask", rows[:, 0] > 0, rows[rows[:, 0] > 0]),
    ("a shuffle", random.permutation(1000), rows),
):
    found = f(*data, batch=batch)
    assert np.allclose(found, (chosen @ columns).mean(axis=0))
    print(f"{name}: {found.round(4)}")

# A minibatch holds just the batch's rows: its row i goes with row i of the batch.
noise = synk.data(random.normal(size=(64, 10)), minibatch=True)
z = pt.matrix("z")
g = synk.function([x, z], ((x + z).sum(), "sum"))
synk.distribute()
batch = random.permutation(1000)[:64]
assert np.allclose(g(data[0], noise, batch=batch), (rows[batch] + noise[:]).sum())
