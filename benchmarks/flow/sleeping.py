"""The dataflow engine beside a list schedule, with operations that sleep as long as AlexNet's layers take.

Sleeping needs no core, so that four devices run in parallel on any machine.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measure import table, verdict
from lockstep import flow
from lockstep.flow.trace import Task, Trace, list_schedule

# Of conv1 to fc8: milliseconds of forward and backward at batch 16 on one core, rounded; millions of weights
FORWARD, BACKWARD = (20, 30, 20, 16, 12, 14, 6, 2), (36, 60, 42, 32, 24, 30, 14, 4)
WEIGHTS = (0.03, 0.3, 0.9, 0.7, 0.4, 37.8, 16.8, 4.1)
FASTER = 15e3  # than milliseconds: a step of 24 ms
MERGED = 6.2e3  # million weights a second: 9.8 ms for all
REACHED = 0.97  # of the list schedule's speed


def backward_and_merge(engine: flow.Engine, at_the_end: bool) -> None:
    """Push a step of all devices that merges a layer's gradients at once, or all gradients at the end.

    The next backward pass reads the merge's result, so that it follows the merge on all devices.
    """
    sums = [engine.variable(f"gradient {layer}") for layer in range(len(FORWARD))]
    ended = []
    for device in engine.devices:
        value = engine.variable("activation")
        for length in FORWARD:
            engine.push(partial(time.sleep, length / FASTER), [value], [value], device)
        for layer in reversed(range(len(BACKWARD))):
            ended.append(
                engine.push(
                    partial(time.sleep, BACKWARD[layer] / FASTER), [value, sums[layer]], [value], device
                )
            )
    for layer in reversed(range(len(BACKWARD))):
        engine.push(
            partial(time.sleep, WEIGHTS[layer] / MERGED), (), [sums[layer]], engine.devices[0],
            after=ended if at_the_end else (), lane="communication", name="merge",
        )  # fmt: skip


def single(engine: flow.Engine) -> None:
    """Push a merge per layer and device in the first device's lane, as in Minerva's loop."""
    sums = [engine.variable(f"gradient {layer}") for layer in range(len(FORWARD))]
    for device in engine.devices:
        value, own = engine.variable("activation"), [engine.variable() for _ in sums]
        for length in FORWARD:
            engine.push(partial(time.sleep, length / 4e3), [value], [value], device)
        for layer in reversed(range(len(BACKWARD))):
            function = partial(time.sleep, BACKWARD[layer] / 4e3)
            engine.push(function, [value], [value, own[layer]], device)
            engine.push(
                partial(time.sleep, 1e-3), [own[layer]], [sums[layer]], engine.devices[0],
                lane="communication",
            )  # fmt: skip


def measure(step: Callable[[flow.Engine], None], n_devices: int) -> tuple[float, float]:
    """Return the seconds of the step, and of a list schedule of its operations' durations."""
    with flow.Engine(flow.cpus(n_devices)) as engine, flow.recording() as trace:
        step(engine)
        engine.wait_all()
    operations = trace.operations
    taken = max(o.stop for o in operations) - min(o.start for o in operations)
    return taken, list_schedule(trace.tasks())


def ideal(at_the_end: bool) -> float:
    """Return the seconds of the list schedule of the durations given above, on two devices."""
    with flow.Engine(flow.cpus(2)) as engine, flow.recording() as trace, flow.dry_run():
        backward_and_merge(engine, at_the_end)
    return list_schedule(_planned(trace))


def _planned(trace: Trace) -> dict[int, Task]:
    n = len(FORWARD)
    own = [s / FASTER for s in (*FORWARD, *reversed(BACKWARD))] * 2
    lengths = [*own, *(WEIGHTS[layer] / MERGED for layer in reversed(range(n)))]
    return {o.number: Task(o.lane, s, o.waited_for) for o, s in zip(trace.operations, lengths, strict=True)}


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    steps: dict[str, tuple[Callable[[flow.Engine], None], int]] = {
        "merging beside backward, 2 devices": (partial(backward_and_merge, at_the_end=False), 2),
        "merging at its end, 2 devices": (partial(backward_and_merge, at_the_end=True), 2),
        **{f"a merge for each device, {n} devices": (single, n) for n in (1, 2, 3, 4)},
    }
    rows: list[tuple[str, ...]] = [("", "ms", "list schedule of these durations, ms", "reached", "")]
    found = {}
    for name, (step, n_devices) in steps.items():
        taken, best = found[name] = min(
            (measure(step, n_devices) for _ in range(3)), key=lambda t: t[0] / t[1]
        )
        share = best / taken
        rows.append(
            (name, f"{taken * 1e3:.1f}", f"{best * 1e3:.1f}", f"{share:.3f}", verdict(share, REACHED))
        )
    text = table("Dataflow: sleeping operations of AlexNet's layers", rows)
    beside, end = ideal(at_the_end=False), ideal(at_the_end=True)
    text += (
        f"\nOf the lengths that they should sleep, a list schedule takes {beside * 1e3:.1f} ms with merging "
        f"beside backward and {end * 1e3:.1f} ms with merging at its end.\n"
    )
    return text, {"flow_sleeping_seconds": found, "flow_ideal_seconds": {"beside": beside, "end": end}}
