"""Small programs of lockstep.synk and lockstep.flow that train, save and resume:

    python -m campaigns.programs synk runs/try 3 60       three ranks with a timeout of 60 seconds
    python -m campaigns.programs flow runs/try 3          three lanes

chaos.py kills them besides train.py. Both train a network on random numbers by plain SGD, so that the weights
are the whole state.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep.synk as synk
from lockstep import flow
from lockstep.files import write_with

STEPS = 120
SAVED_EVERY = 20
_ROWS = 24

Save = Callable[[int], None]


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 5)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets of a step, which are the same at every start."""
    dice = torch.Generator().manual_seed(step)
    made = torch.randn(_ROWS, 35, generator=dice, dtype=torch.float64)
    return made[:, :30], made[:, 30:]


def newest(folder: Path) -> tuple[int, Path | None]:
    """Return the step of the newest file of weights, and the file."""
    found = [
        (int(m[1]), path)
        for path in folder.glob("*")
        if (m := re.fullmatch(r"(\d+)\.safetensors", path.name))
    ]
    return max(found, default=(0, None))


def keep(folder: Path, step: int, network: nn.Module) -> None:
    """Print the step; every SAVED_EVERY steps also write the weights, atomically."""
    print(f"step {step}", flush=True)
    if step % SAVED_EVERY == 0:
        tensors = {name: value.detach().clone() for name, value in network.state_dict().items()}
        write_with(folder / f"{step}.safetensors", lambda temporary: save_file(tensors, temporary))


def train_synk(folder: Path, network: nn.Sequential, since: int, n_ranks: int, deadline: float) -> None:
    synk.fork(n_ranks, threads=1, timeout=deadline)
    print("ranks are there", flush=True)
    synk.share(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), y)
        loss.backward()
        return loss

    def update() -> None:
        optimizer.step()

    gradient = synk.function(compute, "avg", updates=[synk.grads(network)])
    step_of_all = synk.function(update, None, updates=[synk.weights(network)])
    synk.distribute()
    for step in range(since + 1, STEPS + 1):
        gradient(*(part.numpy() for part in batch(step)))
        synk.all_reduce(synk.grads(network), by_rows=True)
        step_of_all()
        keep(folder, step, network)
    synk.close()


def train_flow(folder: Path, network: nn.Sequential, since: int, n_lanes: int) -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(x), y)

    devices = flow.cpus(n_lanes, threads=1)
    with flow.Engine(devices):
        made = flow.ParallelExecutor(network, loss, lambda p: torch.optim.SGD(p, 0.01), devices)
        for step in range(since + 1, STEPS + 1):
            x, y = batch(step)
            made.run({"x": x, "y": y}, ())
            network.load_state_dict(made.replica(0))
            keep(folder, step, network)


def main() -> None:
    kind, folder, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    network = make_network()
    since, path = newest(folder)
    if path:
        network.load_state_dict(load_file(path))
    if kind == "synk":
        train_synk(folder, network, since, size, float(sys.argv[4]))
    else:
        train_flow(folder, network, since, size)
    print("done", flush=True)


if __name__ == "__main__":
    main()
