"""A torch network: the same functions, data and collectives, on callables instead of graphs."""

import numpy as np
import torch
from digits import load

import lockstep.synk as synk

synk.fork()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)).double()
synk.share(net)  # its parameters, and their gradients, are vectors that collectives work on
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return loss


def update() -> None:
    optimizer.step()


def mistakes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (net(x).argmax(1) != y).double().mean()


train_fn = synk.function(compute, "avg", updates=[synk.grads(net)])
update_fn = synk.function(update, None, updates=[synk.weights(net)])
error_fn = synk.function(mistakes, "avg")
synk.distribute()

x_train, y_train, x_val, y_val = load()
data = synk.data(x_train), synk.data(y_train)
for epoch in range(10):
    order, losses = np.random.default_rng(epoch).permutation(len(x_train)), []
    for first in range(0, len(order), 100):
        losses.append(train_fn(*data, batch=order[first : first + 100]))
        synk.all_reduce(synk.grads(net), by_rows=True)
        update_fn()
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, error {error_fn(x_val, y_val):.2%}")
assert error_fn(x_val, y_val) < 0.08
