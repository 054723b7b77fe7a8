"""Full-batch L-BFGS with SciPy: all ranks compute loss and gradient of all images in slices."""

import numpy as np
import pytensor.tensor as pt
from digits import build_mlp, load, loss_and_error
from scipy.optimize import minimize

import lockstep.synk as synk

synk.fork()
x, y = pt.matrix("x"), pt.lvector("y")
scores, params = build_mlp(x, (64, 32, 10))
loss, error = loss_and_error(scores, y)
gradient = pt.concatenate([grad.flatten() for grad in pt.grad(loss, params)])
f = synk.function([x, y], [loss, gradient])
validate = synk.function([x, y], error)
synk.distribute()

x_train, y_train, x_val, y_val = load()
data = f.build_inputs(x_train, y_train)
shapes = [param.get_value(borrow=True).shape for param in params]
ends = np.cumsum([int(np.prod(shape)) for shape in shapes])


def loss_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
    parts = np.split(flat, ends[:-1])
    synk.broadcast(params, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])
    value, slope = f(*data, num_slices=3)
    return float(value), slope


start = np.concatenate([param.get_value().ravel() for param in params])
found = minimize(loss_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 40})
loss_and_gradient(found.x)
val_error = validate(x_val, y_val)
print(
    f"loss {loss_and_gradient(start)[0]:.4f} -> {found.fun:.4f} in {found.nit} steps, error {val_error:.1%}"
)
assert found.fun < 0.05 and val_error < 0.08
