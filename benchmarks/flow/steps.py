"""The overhead of the dataflow engine, and its speed beside eager torch in turns of one run.

Times are the best of several turns of a fraction of a second, because other work on the machine only adds
time. CPU time is that of all threads in the best turn.
"""

import copy
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.measure import table, verdict
from lockstep import flow
from lockstep.flow import owl
from models import alexnet, smallnet

LOOP = "smallnet 2 x 32, Minerva's loop on 2 devices x 1 thread"
FLAT_MB = 5.0  # growth over 2,000 steps that counts as none
Times = dict[str, tuple[float, float]]  # wall and CPU seconds


def in_turn(functions: dict[str, Callable[[], object]], rounds: int = 7) -> Times:
    """Return the best seconds of each function, and its processor seconds then. They take turns."""
    best: Times = {}
    for number in range(rounds + 1):
        for name, function in functions.items():
            wall, used = time.perf_counter(), time.process_time()
            function()
            taken = time.perf_counter() - wall, time.process_time() - used
            if number and (name not in best or taken < best[name]):
                best[name] = taken
    return best


def measure_engine(n: int = 3000) -> dict[str, float]:
    """Return the microseconds per operation."""
    made = flow.cpus(2, threads=1)
    one = torch.ones(4)

    def repeated(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            x = x + 1
        return x

    def of_one(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n):
            y = array + 1
        return y

    with flow.Engine(made, run_ahead=2 * n) as engine, ThreadPoolExecutor(1) as pool:
        x, array = engine.variable(), flow.array(one)
        program, apart = flow.capture(repeated, one), flow.capture(of_one, one)

        def push() -> None:
            for _ in range(n):
                engine.push(int)
            engine.wait_all()

        def hand_over() -> None:
            for number in range(n):
                engine.push(int, writes=[x], device=made[number % 2])
            engine.wait_all()

        def submit() -> None:
            futures = [pool.submit(int) for _ in range(n)]
            futures[-1].result()

        def record() -> None:
            for _ in range(n):
                array + array

        def record_and_run() -> None:
            record()
            flow.wait_all()

        functions: dict[str, Callable[[], object]] = {
            "push and run": push,
            "to another device": hand_over,
            "ThreadPoolExecutor": submit,
            "replayed addition, one behind another": lambda: program(one),
            "replayed addition, each of the same array": lambda: apart(one),
            "lazy addition recorded": record,
            "lazy addition, recorded and run": record_and_run,
            "eager addition": lambda: repeated(one),
        }
        return {name: wall / n * 1e6 for name, (wall, _) in in_turn(functions, 11).items()}


def batch(size: int, n: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n random square images of `size` pixels, and their labels."""
    return torch.randn(n, 3, size, size) * 50, torch.randint(0, classes, (n,))


def make_step(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return a function that takes one step of SGD, and returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-6, 0.9, fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measure_captured(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], n_steps: int, rounds: int
) -> Times:
    """Compare one device with all threads and eager torch with as many."""
    eager = make_step(model)
    with flow.Engine(flow.cpus(1)) as engine:
        with flow.device(engine.devices[0]):
            lazy = make_step(flow.arrays(copy.deepcopy(model)))
            lazy(*inputs)
            program = flow.capture(lazy, *inputs)

        def repeat(step: Callable[..., object]) -> Callable[[], object]:
            return lambda: ([step(*inputs) for _ in range(n_steps)], flow.wait_all())

        times = in_turn({"eager": repeat(eager), "captured": repeat(program)}, rounds)
    return {name: (wall / n_steps, used / n_steps) for name, (wall, used) in times.items()}


def measure_loop(n_steps: int = 10) -> tuple[Times, float]:
    """Compare Minerva's loop on two devices with a thread each and eager torch with two threads.

    Also return the growth over 2,000 steps in MB.
    """
    torch.manual_seed(0)
    model = smallnet.Model(10)
    images, labels = batch(32, 64, 10)
    eager = make_step(model)
    with flow.Engine(flow.cpus(2, threads=1)) as engine:
        loop = minervas_loop(copy.deepcopy(model), images, labels, n_steps)
        times = in_turn({"eager": lambda: [eager(images, labels) for _ in range(n_steps)], "loop": loop}, 9)
        small = minervas_loop(copy.deepcopy(model), images[:4], labels[:4], 10)
        for _ in range(20):
            small()
        before = resident()
        for _ in range(200):
            small()
        grown = resident() - before
        assert len(engine.devices) == 2
    return {name: (wall / n_steps, used / n_steps) for name, (wall, used) in times.items()}, grown


def minervas_loop(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, n_steps: int
) -> Callable[[], None]:
    """Return Minerva's data-parallel loop: gradients of parts on each device, summed on the first one."""
    gpus = [flow.current_device(), *(d for d in flow.current_device().engine.devices[1:])]
    with flow.device(gpus[0]):
        parameters = list(flow.arrays(model).parameters())
        optimizer = torch.optim.SGD(parameters, 1e-6, 0.9, fused=True)
    parts = list(zip(images.chunk(len(gpus)), labels.chunk(len(gpus)), strict=True))

    def loop() -> None:
        for _ in range(n_steps):
            gradients = []
            for gpu, (data, label) in zip(gpus, parts, strict=True):
                with flow.device(gpu):
                    loss = F.cross_entropy(model(data), label) / len(gpus)
                    gradients.append(list(torch.autograd.grad(loss, parameters)))
            with flow.device(gpus[0]):
                for parameter, gradient in zip(parameters, owl.accumulate(gradients), strict=True):
                    parameter.grad = gradient
                optimizer.step()
        flow.wait_all()

    return loop


def resident() -> float:
    """Return this process's resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


TARGETS_US = {
    "push and run": 8, "to another device": 40, "replayed addition, one behind another": 6,
    "lazy addition recorded": 40,
}  # fmt: skip


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    engine = measure_engine()
    rows: list[tuple[str, ...]] = [("one operation", "us", "")]
    for name, value in engine.items():
        aim = verdict(value, TARGETS_US[name], at_most=True) if name in TARGETS_US else ""
        rows.append((name, f"{value:.1f}", aim))
    text = [table("Dataflow: what an operation costs", rows)]

    torch.manual_seed(0)
    cases = {
        "smallnet, batch 64, captured on 1 device": measure_captured(
            smallnet.Model(10), batch(32, 64, 10), 8, 7
        ),
        "AlexNet, batch 16, captured on 1 device": measure_captured(
            alexnet.Model(1000), batch(227, 16, 1000), 1, 4
        ),
    }
    cases[LOOP], grown = measure_loop()
    rows = [("ms a step (CPU time)", "flow", "eager, as many threads", "speed-up", "")]
    for name, times in cases.items():
        eager, ours = times["eager"], next(value for key, value in times.items() if key != "eager")
        shown = (f"{wall * 1e3:.1f} ({used * 1e3:.1f})" for wall, used in (ours, eager))
        ratio = eager[0] / ours[0]
        rows.append(
            (name, *shown, f"{ratio:.2f} x", verdict(ratio, 1.15 if name == LOOP else round(1 / 1.03, 3)))
        )
    text.append(table("Dataflow: steps", rows))
    flat = verdict(grown, FLAT_MB, at_most=True)
    text.append(f"Memory after 2,000 more steps of Minerva's loop: {grown:+.1f} MB ({flat}).\n")
    numbers = {"flow_us": engine, "flow_step_seconds": cases, "flow_memory_mb": grown}
    return "\n".join(text), numbers
