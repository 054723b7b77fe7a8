"""A demonstration of the dataflow engine on scikit-learn's digits, with two devices.

    python -m lockstep.flow.demo

It trains a network of two layers with the loop of Minerva's document. The weights equal those of plain NumPy
up to rounding, and those of one device bit for bit. Then it captures a step; step.html shows what ran where,
when, and what it waited for. Then ParallelExecutor trains a convolutional network, with both of its
strategies, on one device and on two.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from lockstep import flow
from lockstep.extras import require
from lockstep.flow import owl
from lockstep.programs import make_parser

SIZES = 64, 400, 10
MINIBATCH, RATE, EPOCHS = 128, 0.3, 30
Gradients = list[torch.Tensor]


def main() -> None:
    """Train in three ways, and print what they have in common."""
    make_parser(__doc__, "python -m lockstep.flow.demo").parse_args()
    require("the demonstration", "demo", "sklearn")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, targets = (images / 16).astype(np.float32), np.eye(10, dtype=np.float32)[labels]
    n_train = 1437
    train = images[:n_train], targets[:n_train]
    made = flow.cpus(2, threads=1)
    with flow.Engine(made):
        weights, seconds = train_lazily([made[0], made[1]], *train)
        single, _ = train_lazily([made[0]] * 2, *train)
        reference = train_by_numpy(*train)
        error = 1 - accuracy(weights, images[n_train:], labels[n_train:])
        off = max(float(np.abs(w - r).max()) for w, r in zip(weights, reference, strict=True))
        same = all((w == a).all() for w, a in zip(weights, single, strict=True))
        print(
            f"Minerva's loop on 2 devices: {EPOCHS} epochs in {seconds:.1f} s, validation error {error:.2%}"
        )
        print(
            f"  largest difference to NumPy's weights {off:.1e}; one device's bits: {'yes' if same else 'no'}"
        )
        assert off < 1e-3 and same
        show_step(made, *train)
    train_in_parallel(images, labels, n_train)


def initial() -> list[np.ndarray]:
    """Return the initial weights (He et al. 2015, eq. 10)."""
    random = np.random.default_rng(0)
    return [random.normal(0, (2 / n) ** 0.5, (n, m)).astype(np.float32) for n, m in pairwise(SIZES)]


def train_lazily(
    gpus: Sequence[flow.Device], images: np.ndarray, targets: np.ndarray
) -> tuple[list[np.ndarray], float]:
    """Train with the loop of Minerva's document, and return the weights and the seconds that it took."""
    begin, num_gpu = time.perf_counter(), len(gpus)
    with flow.device(gpus[0]):
        weights = [owl.from_numpy(w) for w in initial()]
    size = MINIBATCH // num_gpu
    train_set = [
        (images[n : n + size], targets[n : n + size])
        for n in range(0, len(images) // MINIBATCH * MINIBATCH, size)
    ]
    for _ in range(EPOCHS):
        for mbidx in range(0, len(train_set), num_gpu):
            grads = []
            for i in range(num_gpu):
                flow.set_device(gpus[i])  # calculate each gradient on a different device
                data, label = (owl.from_numpy(part) for part in train_set[mbidx + i])
                grads.append(ff_and_bp(weights, data, label))
            flow.set_device(gpus[0])
            grad = owl.accumulate(grads)
            for weight, gradient in zip(weights, grad, strict=True):
                weight.sub_(gradient * (RATE / MINIBATCH))
    return [owl.to_numpy(weight) for weight in weights], time.perf_counter() - begin


def ff_and_bp(weights: Sequence[torch.Tensor], data: torch.Tensor, label: torch.Tensor) -> Gradients:
    """Compute forward and backward by hand, as Minerva's programs do, for the cross-entropy of a softmax."""
    hidden = (data @ weights[0]).clamp(min=0)
    wrong = torch.softmax(hidden @ weights[1], 1) - label
    back = (wrong @ weights[1].t()) * (hidden > 0)
    return [data.t() @ back, hidden.t() @ wrong]


def train_by_numpy(images: np.ndarray, targets: np.ndarray) -> list[np.ndarray]:
    """Train in the same way on whole minibatches, with NumPy only."""
    weights = initial()
    for _ in range(EPOCHS):
        for first in range(0, len(images) - MINIBATCH + 1, MINIBATCH):
            data, label = images[first : first + MINIBATCH], targets[first : first + MINIBATCH]
            hidden = np.maximum(data @ weights[0], 0)
            scores = np.exp(hidden @ weights[1] - (hidden @ weights[1]).max(1, keepdims=True))
            wrong = scores / scores.sum(1, keepdims=True) - label
            back = (wrong @ weights[1].T) * (hidden > 0)
            weights[0] -= data.T @ back * np.float32(RATE / MINIBATCH)
            weights[1] -= hidden.T @ wrong * np.float32(RATE / MINIBATCH)
    return weights


def accuracy(weights: Sequence[np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    scores = np.maximum(images @ weights[0], 0) @ weights[1]
    return float((scores.argmax(1) == labels).mean())


def show_step(devices: Sequence[flow.Device], images: np.ndarray, targets: np.ndarray) -> None:
    """Capture a convolutional network's step on both devices, and write step.html."""
    step, shares = make_step(devices, images, targets)
    with flow.device(devices[0]):
        step(*shares)
        program = flow.capture(step, *shares)
    for _ in range(3):
        program(*shares)
    with flow.recording() as trace:
        program(*shares)
        flow.wait_all()
    trace.save("step.html")
    print(f"a captured step of {len(program.operations)} operations on 2 devices:")
    print("  " + trace.summary().replace("\n", "\n  "))
    print("written: step.html")


def make_step(
    devices: Sequence[flow.Device], images: np.ndarray, targets: np.ndarray
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """Return a step and its inputs: gradients on each device, their sum and the update on the first."""
    torch.manual_seed(0)
    size, shape = 64, (1, 8, 8)
    shares = [
        torch.from_numpy(images[n * size : (n + 1) * size]).view(size, *shape) for n in range(len(devices))
    ]
    targets_by_device = [torch.from_numpy(targets[n * size : (n + 1) * size]) for n in range(len(devices))]
    with flow.device(devices[0]):
        model = flow.arrays(
            nn.Sequential(
                nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
                nn.Flatten(), nn.Linear(64 * 64, 10),
            )
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

    def step(*inputs: torch.Tensor) -> torch.Tensor:
        losses, gradients, parameters = [], [], list(model.parameters())
        for device, data, label in zip(devices, inputs[:2], inputs[2:], strict=True):
            with flow.device(device):
                losses.append(nn.functional.cross_entropy(model(data), label) / len(devices))
                gradients.append(list(torch.autograd.grad(losses[-1], parameters)))
        with flow.device(devices[0]):
            for parameter, gradient in zip(parameters, owl.accumulate(gradients), strict=True):
                parameter.grad = gradient
            optimizer.step()
            return torch.stack(losses).sum().detach()

    return step, [*shares, *targets_by_device]


def train_in_parallel(images: np.ndarray, labels: np.ndarray, n_train: int) -> None:
    """Train on two devices with both strategies, bit for bit equal, and on one, equal up to rounding."""
    data = {"images": torch.from_numpy(images).view(-1, 1, 8, 8), "labels": torch.from_numpy(labels)}
    begin = time.perf_counter()
    found, wrong = train_with_executor(flow.cpus(2, threads=1), "all_reduce", data, n_train)
    seconds = time.perf_counter() - begin
    other, _ = train_with_executor(flow.cpus(2, threads=1), "reduce", data, n_train)
    single, wrong_on_one = train_with_executor(flow.cpus(1, threads=1), "all_reduce", data, n_train)
    print(
        f"ParallelExecutor on 2 devices: {EPOCHS // 5} epochs in {seconds:.1f} s, "
        f"validation error {wrong:.2%}, on 1 device {wrong_on_one:.2%}"
    )
    same = all(torch.equal(value, other[name]) for name, value in found.items())
    off = max(float((value - single[name]).abs().max()) for name, value in found.items())
    print(
        f"  same bits by all_reduce and reduce: {'yes' if same else 'no'}; "
        f"largest difference to one device's weights after {EPOCHS // 5} epochs {off:.1e}"
    )
    assert same and wrong < 0.15


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> flow.Loss:
    scores = model(images)
    return nn.functional.cross_entropy(scores, labels), {"wrong": scores.argmax(1) != labels}


def train_with_executor(
    devices: Sequence[flow.Device], strategy: flow.Strategy, data: dict[str, torch.Tensor], n_train: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Train, and return the weights and the validation error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(576, 10))
    with flow.Engine(devices):
        executor = flow.ParallelExecutor(
            model, loss, lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9), devices, strategy=strategy
        )
        for _ in range(EPOCHS // 5):
            for first in range(0, n_train, MINIBATCH):  # the last one is smaller
                rows = slice(first, min(first + MINIBATCH, n_train))
                executor.run({name: tensor[rows] for name, tensor in data.items()})
        held_out = {name: tensor[n_train:] for name, tensor in data.items()}
        wrong = executor.evaluate(loss, held_out, ["wrong"])["wrong"]
        return executor.replica(0), wrong.double().mean().item()


if __name__ == "__main__":
    main()
