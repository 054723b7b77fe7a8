"""Training on digits that are divided among the ranks once: a call sends only the row numbers of a batch."""

import numpy as np
import pytensor
import pytensor.tensor as pt
from digits import build_mlp, load, loss_and_error

import lockstep.synk as synk
from lockstep.synk.extensions import updates

n_ranks = synk.fork()
x_train, y_train, x_val, y_val = load()
x_stored, y_stored = pytensor.shared(x_train[:1], name="x"), pytensor.shared(y_train[:1], name="y")
x, y = pt.matrix("x"), pt.lvector("y")
scores, params = build_mlp(x)
loss, error = loss_and_error(scores, y)
grad_updates, param_updates, gradient = updates.adam(loss, params, learning_rate=0.005)
compute = synk.function(
    [], loss, updates=grad_updates, givens={x: x_stored, y: y_stored}, sliceable_shareds=[x_stored, y_stored]
)
update = synk.function([], updates=param_updates)
validate = synk.function([x, y], [loss, error])
synk.distribute()
synk.scatter([x_stored, y_stored], [x_train, y_train])
lengths = synk.get_lengths(x_stored)
print("images by rank:", lengths)

for epoch in range(10):
    random, losses = np.random.default_rng(epoch), []
    orders = [random.permutation(length) for length in lengths]
    share = 100 // n_ranks
    for first in range(0, min(lengths), share):
        losses.append(compute(batch_s=[order[first : first + share] for order in orders]))
        synk.all_reduce(gradient, by_rows=True)
        update()
    val_loss, val_error = validate(x_val, y_val)
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, validation {val_loss:.4f}, error {val_error:.2%}")
assert val_error < 0.08
