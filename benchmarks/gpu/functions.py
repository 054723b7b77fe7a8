"""The overheads of functions over data (lockstep.synk) on torch callables, two ranks on one GPU.

That is no speed-up: both compute on the same device. What is measured is what a call, a collective and a step
cost beside plain PyTorch in one process.
"""

import importlib.util
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting

_NEEDED = ("cloudpickle", "threadpoolctl")
_SMALL = 650_000  # floats: the gradient of an MLP
_N_INPUTS, _N_HIDDEN, _N_CLASSES = 784, 500, 10
_ROWS = (256, 2048)
_LARGE_CALLS = 3  # in one turn, of an output that goes to host memory as a whole
_PAPER_CALLS = 1  # nine ablations of ResNet-50 in eight rounds are many steps


def run(setting: Setting, work: Path, record: Record) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        record.keep("functions", f"not measured: there is no module {', '.join(missing)}")
        return
    if setting.rehearsal:
        os.environ["CUDA_SIM_ALL"] = "1"  # ranks are started by this process, which is one of them
    from lockstep import synk

    synk.fork(devices=["cuda:0", "cuda:0"])
    try:
        measures = {"calls": measure_calls, "steps": measure_steps, "paper": measure_paper}
        for name, measure in measures.items():
            with record.attempt(name):
                record.keep(name, measure(setting))
    finally:
        synk.close()


def measure_calls(setting: Setting) -> dict[str, float]:
    """Milliseconds of a call, of collectives, and of outputs that fold on the device."""
    from lockstep import synk

    large = setting.exchange_elements // 2
    vectors = [torch.nn.Linear(number, 1, bias=False) for number in (min(_SMALL, large // 2), large)]
    tensor = synk.share(torch.zeros(large))
    for vector in vectors:
        synk.share(vector)

    def nothing() -> None:
        return

    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.mean()

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.sum() + tensor

    empty, loss = synk.function(nothing, None), synk.function(mean)
    total = synk.function(wide, "sum")
    synk.distribute()
    data = synk.data(np.ones((_ROWS[0], _N_INPUTS), np.float32))
    sizes = [f"{vector.weight.numel():,} floats" for vector in vectors]
    functions: dict[str, Callable[[], object]] = {
        "an empty function": empty,
        f"the mean of {_ROWS[0]} x {_N_INPUTS} floats": partial(loss, data),
        f"all_reduce of a module of {sizes[0]}": partial(synk.all_reduce, synk.weights(vectors[0])),
        f"all_reduce of a module of {sizes[1]}": partial(synk.all_reduce, synk.weights(vectors[1])),
        f"all_reduce of a tensor of {sizes[1]}": partial(synk.all_reduce, tensor),
    }
    large = {f"an output of {sizes[1]}, folded by sum": partial(total, data)}
    return take_turns(functions, setting) | take_turns(
        large, setting, min(_LARGE_CALLS, setting.exchange_calls)
    )


def measure_steps(setting: Setting) -> dict[str, float]:
    """Milliseconds of an MLP's step of SGD: by two ranks on half of the rows each, and by plain PyTorch."""
    from lockstep import synk
    from lockstep.synk.extensions import torch_train

    net, plain = make_mlp(), make_mlp().to(_torch_device(setting))
    step = torch_train.make_train_function(
        net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.01)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    synk.distribute()
    x = np.ones((max(_ROWS), _N_INPUTS), np.float32)
    y = np.zeros((max(_ROWS), _N_CLASSES), np.float32)
    data = synk.data(x), synk.data(y)

    def step_plainly(n_rows: int) -> float:
        rows, targets = (torch.from_numpy(a[:n_rows]).to(_torch_device(setting)) for a in (x, y))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(plain(rows), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    functions: dict[str, Callable[[], object]] = {}
    for n_rows in _ROWS[: 1 if setting.rehearsal else None]:
        functions[f"{n_rows} rows, two ranks"] = partial(step, *data, batch=n_rows)
        functions[f"{n_rows} rows, plain PyTorch"] = partial(step_plainly, n_rows)
    return take_turns(functions, setting)


def measure_paper(setting: Setting) -> dict[str, float]:
    """Milliseconds of a step of ResNet-50, as Stooke and Abbeel 2017 take it (section 6): one rank alone, and
    two with as many images in all, and each. A rehearsal has ResNet-20 and fewer images.
    """
    from benchmarks.synk.paper import BATCH, Training

    network = importlib.import_module(f"models.{setting.residual_model}").Model(10)
    n_rows, side = (4, 32) if setting.rehearsal else (BATCH, 224)
    training = Training(network, 10, side, 4 * n_rows)
    functions: dict[str, Callable[[], object]] = {
        f"{n_rows} images, one rank alone": partial(training.single_step, n_rows, True)
    }
    for n_all, shuffle, reduces in itertools.product((n_rows, 2 * n_rows), (True, False), (True, False)):
        how = f"{'' if shuffle else 'not '}shuffled, {'with' if reduces else 'without'} all_reduce"
        functions[f"{n_all} images, two ranks, {how}"] = partial(training.step, n_all, shuffle, reduces)
    return take_turns(functions, setting, _PAPER_CALLS)


def make_mlp() -> torch.nn.Module:
    """784-500-500-10."""
    layers = torch.nn.Linear(_N_INPUTS, _N_HIDDEN), torch.nn.Tanh(), torch.nn.Linear(_N_HIDDEN, _N_HIDDEN)
    return torch.nn.Sequential(*layers, torch.nn.Tanh(), torch.nn.Linear(_N_HIDDEN, _N_CLASSES))


def take_turns(
    functions: dict[str, Callable[[], Any]], setting: Setting, n_calls: int | None = None
) -> dict[str, float]:
    """Milliseconds a call, of several one after the other, until this rank's device is done; medians."""
    from lockstep.synk import session

    gpu = session.current_team("a benchmark").context.gpu
    assert gpu is not None
    n_calls = n_calls or setting.exchange_calls
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(setting.n_rounds + 1):
        for name, function in functions.items():
            gpu.stream.synchronize()
            begin = time.perf_counter()
            for _ in range(n_calls):
                function()
            gpu.stream.synchronize()
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - begin) * 1e3 / n_calls)
    return {name: median(values) for name, values in taken.items()}


def _torch_device(setting: Setting) -> str:
    return "cpu" if setting.rehearsal else "cuda:0"
