"""Functions over data (lockstep.synk) on 2 ranks, beside one process: calls, collectives, training steps.

CPU time is that of the busiest rank, which equals the wall time on an idle machine. Wall time is that of the
fastest round.
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.measure import table
from lockstep import synk
from lockstep.synk import session

ROUNDS = 15
N_RANKS = 2
Seconds = tuple[float, float]  # CPU of the busiest rank, fastest wall


def cpu_seconds() -> list[float]:
    """Return the CPU time of every rank so far, by clock_getcpuclockid(3)."""
    pids = [os.getpid(), *(worker.process.pid for worker in session.current_team("").workers)]
    return [time.clock_gettime((~pid << 3) | 2) for pid in pids]


def in_turns(
    functions: dict[str, Callable[[], object]], rounds: int = ROUNDS, repeat: int = 1, rest: float = 0
) -> dict[str, Seconds]:
    """Return the seconds of one call of each function, in turns after a warm-up round.

    Args:
        rest: Seconds between two calls, in which spinning threads go to sleep.
    """
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    wall: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            time.sleep(rest)
            before, begin = cpu_seconds(), time.perf_counter()
            for _ in range(repeat):
                function()
            elapsed, after = time.perf_counter() - begin, cpu_seconds()
            if number:
                wall[name].append(elapsed / repeat)
                cpu[name].append(max(b - a for a, b in zip(before, after, strict=True)) / repeat)
    return {name: (float(np.median(cpu[name])), min(wall[name])) for name in functions}


def measure_calls(rows: list[tuple[str, ...]], numbers: dict[str, Any]) -> None:
    """Measure an empty function, all_reduce of 0.65 M and 61 M floats, and a copy of 244 MB."""
    import pytensor

    n_small, n_large = 650_000, 61_000_000
    small = pytensor.shared(np.ones(n_small, "float32"), name="small")
    large = pytensor.shared(np.ones(n_large, "float32"), name="large")
    empty = synk.function([], name="empty")
    synk.function([], [small[0], large[0]], name="hold", mode="FAST_COMPILE")
    synk.distribute()
    target, source = np.ones((2, n_large), "float32")
    calls = in_turns({"call": empty}, repeat=300)
    numbers["empty_call_seconds"] = calls["call"][1]
    rows.append(("call of an empty function", f"{calls['call'][1] * 1e6:.0f} us", "at most 250 us"))
    reduced = in_turns({"small": lambda: synk.all_reduce(small)}, repeat=20)
    numbers["all_reduce_small_seconds"] = reduced["small"][1]
    rows.append(("all_reduce of 0.65 M floats", f"{reduced['small'][1] * 1e3:.2f} ms", "at most 0.7 ms"))
    both = in_turns({"copy": lambda: np.copyto(target, source), "large": lambda: synk.all_reduce(large)})
    ratio = both["large"][1] / both["copy"][1]
    numbers["all_reduce_large_seconds"], numbers["copy_seconds"] = both["large"][1], both["copy"][1]
    what = f"{both['large'][1] * 1e3:.1f} ms, {ratio:.2f} x a copy of 244 MB"
    rows.append(("all_reduce of 61 M floats", what, "at most 2.5 x"))


def make_mlp() -> tuple[Any, list[Any], Any, Any]:
    """Return the loss, parameters and inputs of a 784-500-500-10 MLP in float32."""
    import pytensor
    import pytensor.tensor as pt

    random = np.random.default_rng(0)
    x, y = pt.fmatrix("x"), pt.fmatrix("y")
    params, hidden = [], x
    for n_in, n_out in ((784, 500), (500, 500), (500, 10)):
        weight = pytensor.shared(random.normal(0, n_in**-0.5, (n_in, n_out)).astype("float32"))
        bias = pytensor.shared(np.zeros(n_out, "float32"))
        params += [weight, bias]
        hidden = (pt.tanh(hidden) if len(params) > 2 else hidden).dot(weight) + bias
    return ((hidden - y) ** 2).mean(), params, x, y


def measure_training(rows: list[tuple[str, ...]], numbers: dict[str, Any]) -> None:
    """Measure an SGD step of the MLP for several batch sizes."""
    from lockstep.synk.extensions import train, updates

    loss, params, x, y = make_mlp()
    step = train.make_train_function(loss, params, x, y, updates.sgd, 0.01)
    one = train.make_train_function_theano(loss, params, x, y, updates.sgd, 0.01)
    begin = time.perf_counter()
    synk.distribute()
    random = np.random.default_rng(1)
    x_all, y_all = random.normal(size=(2048, 784)).astype("float32"), np.zeros((2048, 10), "float32")
    data = synk.data(x_all), synk.data(y_all)
    step(*data, batch=16)
    numbers["distribute_and_first_call_seconds"] = time.perf_counter() - begin
    rows.append(
        (
            "distribute() and first step",
            f"{time.perf_counter() - begin:.2f} s",
            "at most 1 s, compiled before",
        )
    )
    goals = {256: 1.35, 512: 1.6, 2048: 1.85}
    for n_rows, goal in goals.items():
        arrays = np.array(x_all[:n_rows]), np.array(y_all[:n_rows])

        def on_both_cores(arrays: Any = arrays) -> None:
            with threadpool_limits(limits=N_RANKS):
                one(*arrays)

        ours = {"synk": lambda n=n_rows: step(*data, batch=n)}
        found = in_turns({**ours, "one": lambda a=arrays: one(*a)})
        cpu, wall = (found["one"][i] / found["synk"][i] for i in (0, 1))
        threaded = in_turns({**ours, "blas": on_both_cores}, rest=0.3)
        blas = threaded["blas"][1] / threaded["synk"][1]
        numbers[f"mlp_{n_rows}"] = found
        what = f"{cpu:.2f} x CPU, {wall:.2f} x wall; {blas:.2f} x BLAS on both cores"
        rows.append((f"MLP step, {n_rows} rows, against one thread", what, f"at least {goal} x CPU"))
    before = page_faults()
    for _ in range(20):
        step(*data, batch=256)
    faults = [(b - a) / 20 for a, b in zip(before, page_faults(), strict=True)]
    numbers["page_faults_a_step"] = faults
    rows.append(("page faults in a settled step, by rank", ", ".join(f"{f:.1f}" for f in faults), "0"))


def measure_torch(rows: list[tuple[str, ...]], numbers: dict[str, Any]) -> None:
    """Measure the MLP's step by torch callables and by the graph, on the same ranks."""
    import torch

    from lockstep.synk.extensions import torch_train, train, updates

    loss, params, x, y = make_mlp()
    step = train.make_train_function(loss, params, x, y, updates.sgd, 0.01)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(784, 500), torch.nn.Tanh(), torch.nn.Linear(500, 500), torch.nn.Tanh()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(500, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    by_torch = torch_train.make_train_function(net, torch.nn.functional.mse_loss, optimizer)
    synk.distribute()
    data = synk.data(np.ones((2048, 784), "float32")), synk.data(np.zeros((2048, 10), "float32"))

    for n_rows in (256, 2048):
        functions = {
            "graph": lambda n=n_rows: step(*data, batch=n),
            "torch": lambda n=n_rows: by_torch(*data, batch=n),
        }
        found = in_turns(functions)
        cpu, wall = (found["graph"][i] / found["torch"][i] for i in (0, 1))
        numbers[f"mlp_torch_{n_rows}"] = found
        what = f"MLP step by torch callables, {n_rows} rows, against the graph"
        rows.append((what, f"{cpu:.2f} x CPU, {wall:.2f} x wall", "at least 0.9 x"))


def page_faults() -> list[int]:
    """Return the minor page faults of every rank so far (proc(5))."""
    pids = [worker.process.pid for worker in session.current_team("").workers]
    others = [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7]) for pid in pids]
    return [resource.getrusage(resource.RUSAGE_SELF).ru_minflt, *others]


def measure_elementwise(rows: list[tuple[str, ...]], numbers: dict[str, Any]) -> None:
    """Measure a sum of tanh over 7.8 M numbers."""
    import pytensor.tensor as pt

    x = pt.fmatrix("x")
    f = synk.function([x], (pt.tanh(x).sum(), "sum"), name="elementwise")
    synk.distribute()
    array = np.random.default_rng(2).normal(size=(7800, 1000)).astype("float32")
    data = synk.data(array)
    found = in_turns({"synk": lambda: f(data), "one": lambda: f.alone(array)})
    cpu, wall = (found["one"][i] / found["synk"][i] for i in (0, 1))
    numbers["elementwise"] = found
    rows.append(
        ("elementwise over 7.8 M numbers, against one thread", f"{cpu:.2f} x CPU, {wall:.2f} x wall", "1.9 x")
    )


def measure_start(rows: list[tuple[str, ...]], numbers: dict[str, Any]) -> None:
    """Measure fork() in a fresh program, without and with torch."""
    script = "import time, lockstep.synk as synk{more}; t = time.perf_counter(); synk.fork(2); {use}; "
    script += "print(time.perf_counter() - t)"
    torch_use = "f = synk.function(lambda x: x.sum(), 'sum'); synk.distribute(); f([1.0])"
    for name, more, use, goal in (
        ("fork()", "", "0", "1 s"),
        ("fork() to a first call with torch", ", torch", torch_use, "4 s"),
    ):
        command = [sys.executable, "-c", script.format(more=more, use=use)]
        seconds = min(float(subprocess.run(command, capture_output=True, text=True).stdout) for _ in range(3))
        numbers[name] = seconds
        rows.append((name, f"{seconds:.2f} s", f"at most {goal}"))


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    rows: list[tuple[str, ...]] = [("what", "measured", "wanted")]
    numbers: dict[str, Any] = {name: version(name) for name in ("pytensor", "numba", "cloudpickle")}
    measure_start(rows, numbers)
    synk.fork(N_RANKS)
    try:
        measure_calls(rows, numbers)
        measure_training(rows, numbers)
        measure_torch(rows, numbers)
        measure_elementwise(rows, numbers)
    finally:
        synk.close()
    title = f"Functions over data: {N_RANKS} ranks, PyTensor {numbers['pytensor']}, numba {numbers['numba']}"
    return table(title, rows), numbers


if __name__ == "__main__":
    print(run()[0])
