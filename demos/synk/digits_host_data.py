"""Training on digits in host memory: row numbers choose a batch, and every rank reads its share."""

import numpy as np
import pytensor.tensor as pt
from digits import build_mlp, load, loss_and_error

import lockstep.synk as synk
from lockstep.synk.extensions import updates

synk.fork()
x, y = pt.matrix("x"), pt.lvector("y")
scores, params = build_mlp(x)
loss, error = loss_and_error(scores, y)
grad_updates, param_updates, gradient = updates.nesterov_momentum(loss, params, learning_rate=0.1)
compute = synk.function([x, y], loss, updates=grad_updates)
update = synk.function([], updates=param_updates)
validate = synk.function([x, y], [loss, error])
synk.distribute()

x_train, y_train, x_val, y_val = load()
train_data, val_data = compute.build_inputs(x_train, y_train), validate.build_inputs(x_val, y_val)
order = np.arange(len(x_train))
for epoch in range(10):
    np.random.default_rng(epoch).shuffle(order)
    losses = []
    for first in range(0, len(order), 100):
        losses.append(compute(*train_data, batch=order[first : first + 100]))
        synk.all_reduce(gradient, by_rows=True)
        update()
    val_loss, val_error = validate(*val_data, num_slices=2)
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, validation {val_loss:.4f}, error {val_error:.2%}")
assert val_error < 0.08
