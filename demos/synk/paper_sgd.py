"""The paper's program (Stooke and Abbeel 2017, figure 5): a serial program with a few new lines for synk."""

import numpy as np
import pytensor.tensor as pt
from digits import build_mlp, load, loss_and_error

import lockstep.synk as synk

synk.fork()
input_var, target_var = pt.matrix("x"), pt.lvector("y")
network, params = build_mlp(input_var)
loss, error = loss_and_error(network, target_var)
updates = [(param, param - 0.5 * grad) for param, grad in zip(params, pt.grad(loss, params), strict=True)]

train_fn = synk.function(inputs=[input_var, target_var], updates=updates)
error_fn = synk.function(inputs=[input_var, target_var], outputs=error)
synk.distribute()

X_train, y_train, X_val, y_val = load()
X_train, y_train = synk.data(X_train), synk.data(y_train)

for epoch in range(10):
    order = np.random.default_rng(epoch).permutation(len(X_train))
    for first in range(0, len(order), 100):
        train_fn(X_train, y_train, batch=order[first : first + 100])
        synk.all_reduce(params, by_rows=True)  # SGD on averaged parameters is SGD on the averaged gradient
    print(f"epoch {epoch + 1}: error {error_fn(X_val, y_val):.2%}")
assert error_fn(X_val, y_val) < 0.08
