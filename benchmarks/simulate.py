"""A prediction of how AlexNet scales from 2 to 512 devices: python -m benchmarks.simulate [folder]

The program measures the parts of a step on this machine (forward and backward pass of each stage, the update,
an exchange between two processes), predicts the step of two trainers, and compares it with a measurement. For
GPUs it predicts from published figures: stages at the rates of benchmarks/gpu/roofline.py, and links at those
of LINKS. It writes scaling.md, .json and .png into the folder.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch

from benchmarks.exchange import all_reduce
from benchmarks.gpu import roofline
from benchmarks.hosts.packing import time_packing, time_products
from benchmarks.hosts.scaling import (
    ALEXNETS_FULL,
    BFLOAT16,
    FLOAT32,
    Link,
    Stage,
    Wire,
    factors_of_hosts,
    lone_step,
    speed_up,
    step_after,
    step_beneath,
    sum_of_hosts,
)
from benchmarks.loading.augmenting import make_folder
from benchmarks.measure import processor_seconds, table, write_results
from lockstep.launch.ranks import run_ranks
from models.alexnet import Model

BATCH, GPU_BATCH, N_STEPS = 16, 256, 24
DEVICES = [2**power for power in range(10)]
LINKS = (
    Link("NVLink 4", 370e9, 5e-6, "370 GB/s by kernels: NVIDIA/nccl-tests, issue 212"),
    Link("PCIe 5 x16", 50e9, 10e-6, "50 GB/s, of 55.6 that NVIDIA's nvbandwidth shows"),
    Link("Ethernet, 100 Gb/s", 11e9, 30e-6, "11 GB/s, of 12.5 by definition"),
)
ETHERNETS = (
    Link("1 Gb/s", 0.119e9, 50e-6, ""),
    Link("10 Gb/s", 1.19e9, 30e-6, ""),
    Link("100 Gb/s", 11.9e9, 30e-6, ""),
    Link("400 Gb/s", 47.5e9, 30e-6, ""),
)
WIRES = FLOAT32, BFLOAT16
GPUS_OF_A_HOST, EVERY = 8, 16
# images a second or speed-up by number of devices
PUBLISHED = {
    "theano_alexnet, AlexNet, cuDNN R2 (2014, Table 1)": {1: 1.0, 2: 32.76 / 19.72},
    "Minerva, AlexNet (its README)": {1: 1.0, 2: 371.0 / 189.6, 4: 632.1 / 189.6},
    "Synkhronos, ResNet-50 (2017, section 6.1)": {1: 1.0, 8: 7.5},
}
ESTIMATE = 40_000  # images a second of one GPU: between 35,000 and 45,000 by bytes and launches


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--measured", type=Path, help="parts from an earlier scaling.json instead of measuring"
    )
    words = parser.parse_args()
    parts = json.loads(words.measured.read_text()) if words.measured else measure()
    checked, here = check(parts)
    curves = {**gpu_curves(), **here}
    rows: list[tuple[str, ...]] = [("devices", *(str(n) for n in DEVICES[1:]))]
    for name, curve in curves.items():
        rows.append((name, *(f"{curve[n]:.1f}" if n in curve else "" for n in DEVICES[1:])))
    predicted = table("Speed-up that is predicted, each device with a minibatch of its own", rows)
    sources = "\n".join(f"- {link.name}: {link.source}" for link in LINKS)
    section = f"{checked}\n{predicted}\nGPUs: not measured. Links, each device its own:\n\n{sources}\n"
    section += f"\n{tables_of_hosts(parts)}"
    section += "\n![The curves, and published ones](scaling.png)\n"
    write_results(words.folder, "scaling", [(section, parts)], "python -m benchmarks.simulate")
    draw(curves, words.folder / "scaling.png")
    print(section)


def measure() -> dict[str, Any]:
    """Measure the parts of a step with one thread, an exchange, and whole steps of one and two trainers."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        seconds = run_ranks(all_reduce.measure, 2, store)[0]["lockstep"]
        make_folder(Path(folder) / "set", N_STEPS * BATCH // 2)
        steps = {n: trained_step(Path(folder), n) for n in (1, 2)}
    return {
        "load_average": load,
        "stages": [vars(stage) for stage in time_stages()],
        "update_seconds": time_update(),
        "exchange_bytes_per_second": 4 * all_reduce.N_ELEMENTS / seconds,
        "step_seconds": steps,
        "packing_seconds_per_element": {wire.name: time_packing(wire.name) for wire in WIRES},
        "seconds_per_product": time_products(2 * BATCH),
    }


def check(parts: dict[str, Any]) -> tuple[str, dict[str, dict[int, float]]]:
    """Compare prediction and measurement for two trainers, and predict the curve for more cores."""
    stages = [Stage(**stage) for stage in parts["stages"]]
    link = Link("memory", parts["exchange_bytes_per_second"], 0.0, "measured here")
    steps = {int(n): seconds for n, seconds in parts["step_seconds"].items()}
    rows: list[tuple[str, ...]] = [("trainers", "predicted, s", "measured, s", "measured / predicted")]
    for n in (1, 2):
        guess = step_after(stages, parts["update_seconds"], link, n, 8)
        rows.append((str(n), f"{guess:.3f}", f"{steps[n]:.3f}", f"{steps[n] / guess:.2f}"))
    title = f"AlexNet's step on CPUs: batch {BATCH} and one thread a trainer, `rule: weights`"
    busy = f"Load when it began: {parts['load_average']:.1f}. Predictions are for idle cores.\n"
    curve = {n: speed_up(steps[n], steps[1], n) for n in (1, 2)}
    return f"{table(title, rows)}\n{busy}", {"CPUs, measured": curve}


def time_stages() -> list[Stage]:
    """Measure CPU seconds of the forward and backward pass of each of AlexNet's stages, in float32."""
    model = Model(1000, "theano_alexnet").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(BATCH, 3, 227, 227).to(memory_format=torch.channels_last)
    found = []
    for name, layer, function in _stages(model):
        given = x.detach().requires_grad_(name != "conv1")
        wanted = [*layer.parameters(), *([given] if given.requires_grad else [])]
        out = function(given)
        gradient = torch.randn_like(out)

        def backward(out=out, wanted=wanted, gradient=gradient) -> None:  # type: ignore[no-untyped-def]
            torch.autograd.grad(out, wanted, gradient, retain_graph=True)

        def forward(function=function, given=given) -> None:  # type: ignore[no-untyped-def]
            function(given)

        times = {name: processor_seconds(way) for name, way in (("forward", forward), ("backward", backward))}
        n_parameters = sum(parameter.numel() for parameter in layer.parameters())
        found.append(Stage(name, times["forward"], times["backward"], n_parameters))
        x = out.detach()
    return found


def _stages(model: Model) -> list[tuple[str, torch.nn.Module, Any]]:
    """Yield the name of each stage, its layer with parameters, and its modules."""
    convolutions = {
        "conv1": lambda x: model._norm_and_pool(model.conv1(x)),
        "conv2": lambda x: model._norm_and_pool(model.conv2(x)),
        "conv3": lambda x: torch.relu(model.conv3(x)),
        "conv4": lambda x: torch.relu(model.conv4(x)),
        "conv5": lambda x: model.relu_pool(model.conv5(x)).flatten(1),
        "fc6": lambda x: model.dropout6(torch.relu(model.fc6(x))),
        "fc7": lambda x: model.dropout7(torch.relu(model.fc7(x))),
        "fc8": model.fc8,
    }
    return [(name, getattr(model, name), function) for name, function in convolutions.items()]


def time_update() -> float:
    """Return the processor seconds of SGD's step on all weights."""
    parameter = torch.zeros(all_reduce.N_ELEMENTS // 2, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9, weight_decay=0.0005, fused=True)
    return processor_seconds(optimizer.step)


def trained_step(folder: Path, n_trainers: int) -> float:
    """Return the seconds of a step that train.py prints: the median of all lines except the first."""
    keys = {
        "data_folder": folder / "set", "n_classes": 1000, "model": "alexnet", "batch_size": BATCH,
        "model_args": "{variant: theano_alexnet}", "devices": f"[{', '.join(['cpu'] * n_trainers)}]",
        "learning_rate": 1e-6, "cpu_threads": 1, "print_freq": N_STEPS // 6, "n_epochs": 1, "lr_step": "[]",
        "weights_dir": folder / "runs", "run_name": f"trainers-{n_trainers}", "para_load": "false",
    }  # fmt: skip
    command = [sys.executable, "train.py", *(f"{key}={value}" for key, value in keys.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    log = (folder / "runs" / f"trainers-{n_trainers}" / "log.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, log) if line["event"] == "progress"]
    return median(line["seconds_per_20"] / 20 for line in lines[1:])


def gpu_curves() -> dict[str, dict[int, float]]:
    """Return a curve per link, for a step at the roofline and at the estimate of this code's step."""
    floor = gpu_stages(1.0)
    slower = gpu_stages(GPU_BATCH / ESTIMATE / lone_step(floor, 0.0))
    curves = {}
    for name, stages in (("roofline", floor), (f"{ESTIMATE:,} images/s", slower)):
        lone = lone_step(stages, 0.0)
        for link in LINKS:
            after = {n: speed_up(step_after(stages, 0.0, link, n, 8), lone, n) for n in DEVICES}
            beneath = {n: speed_up(step_beneath(stages, 0.0, link, n, 2), lone, n) for n in DEVICES}
            curves[f"{link.name}, {name}, weights after the step"] = after
            curves[f"{link.name}, {name}, bfloat16 gradients beneath it"] = beneath
    return curves


def tables_of_hosts(parts: dict[str, Any]) -> str:
    """Return the tables of CPU hosts like this one with two trainers, and of hosts with GPUs."""
    stages = gpu_stages(GPU_BATCH / ESTIMATE / lone_step(gpu_stages(1.0), 0.0))
    gpus = step_beneath(stages, 0.0, LINKS[0], GPUS_OF_A_HOST, 4)
    cpus = {int(n): seconds for n, seconds in parts["step_seconds"].items()}[2]
    packed = [replace(w, seconds_per_element=parts["packing_seconds_per_element"][w.name]) for w in WIRES]
    rows = host_rows(cpus, 2 * BATCH, ETHERNETS[:2], "CPUs", packed, parts["seconds_per_product"])
    of_gpus = GPUS_OF_A_HOST * GPU_BATCH, ETHERNETS[2:], f"{GPUS_OF_A_HOST} GPUs", list(WIRES)
    rows += host_rows(gpus, *of_gpus, 2 / roofline.H200_FLOPS / GPUS_OF_A_HOST)
    title = (
        f"Hosts: speed-up that is predicted, of this one or of {GPUS_OF_A_HOST} GPUs at {ESTIMATE:,} images/s"
    )
    links = ", ".join(f"{link.name}: {link.bytes_per_second / 1e9:g} GB/s" for link in ETHERNETS)
    notes = (
        f"Without overlap of the network with the backward pass. {links}: 95 % of the line's bits. Packing"
    )
    notes += " is measured on CPUs, and left out on GPUs."
    return f"{table(title, [('hosts', *map(str, DEVICES[1:])), *rows])}\n{notes}\n"


def host_rows(
    inside: float,
    n_rows: int,
    links: tuple[Link, ...],
    kind: str,
    wires: list[Wire],
    seconds_per_product: float,
) -> list[tuple[str, ...]]:
    """Return a row per network and way of exchange.

    Args:
        inside: Seconds of a step within a host.
        n_rows: Images of a minibatch.
    """
    n_parameters = all_reduce.N_ELEMENTS // 2
    implementations: dict[str, Callable[[Link, int], float]] = {
        f"gradients, {wire.name}": lambda link, n, wire=wire: sum_of_hosts(link, n, n_parameters, wire)  # type: ignore[misc]
        for wire in wires
    }
    implementations["gradients, factors"] = lambda link, n: factors_of_hosts(
        link, n, n_parameters, ALEXNETS_FULL, n_rows, wires[0], seconds_per_product
    )
    implementations[f"local, every {EVERY} steps"] = lambda link, n: (
        sum_of_hosts(link, n, 2 * n_parameters, wires[0]) / EVERY
    )
    return [
        (
            f"{kind}, {link.name}, {name}",
            *(f"{speed_up(inside + seconds(link, n), inside, n):.1f}" for n in DEVICES[1:]),
        )
        for link in links
        for name, seconds in implementations.items()
    ]


def gpu_stages(factor: float) -> list[Stage]:
    """Return the roofline's seconds for 256 images times `factor`, divided among layers by operations."""
    total = factor * roofline.seconds(roofline.H200_FLOPS, roofline.H200_BYTES)
    products = sum(layer.n_products * layer.macs for layer in roofline.LAYERS)
    return [
        Stage(
            str(number),
            total * layer.macs / products,
            total * (layer.n_products - 1) * layer.macs / products,
            layer.parameters,
        )
        for number, layer in enumerate(roofline.LAYERS)
    ]


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draw the speed-up by number of devices, both in powers of two; markers are published results."""
    figure, axes = plt.subplots(figsize=(9, 6))
    axes.plot(DEVICES, DEVICES, color="0.8", label="as many times as fast")
    for number, (name, curve) in enumerate(curves.items()):
        line = "-" if "after" in name else "--"
        axes.plot(list(curve), list(curve.values()), line, color=f"C{number // 2}", label=name)
    for (name, curve), mark in zip(PUBLISHED.items(), "os^", strict=True):
        axes.plot(list(curve), list(curve.values()), mark, color="black", label=f"published: {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up")
    axes.set_ylim(1 / math.sqrt(2), None)
    axes.legend(fontsize=7)
    axes.set_title(
        "AlexNet on n devices, a minibatch each: predicted (GPUs: from published rates, not measured)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
