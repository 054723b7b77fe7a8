"""AlexNet's training step on data that is already on the GPU: Lockstep's trainer beside plain PyTorch."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.lone import LoneTrainer, PlainTraining, compute_in
from benchmarks.gpu.machine import query
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import Turn, device_turns, matrix_product, take_turns_kept, try_out

PLAIN, TORCHVISION = "plain PyTorch, same network", "plain PyTorch, torchvision's AlexNet"
_TORCHVISION_SIZE = 224  # what that network is made for


_PROFILED_STEPS = 5
_MOST_KERNELS = 40  # of a profile's table


def run(setting: Setting, work: Path, record: Record) -> None:
    """In bf16, the precision that counts: launched, captured, and plain PyTorch beside them."""
    measure(setting, work, record, ("bf16",))


def measure(setting: Setting, work: Path, record: Record, precisions: tuple[str, ...]) -> None:
    """The step in these precisions on resident data; with bf16 also what it is held against."""
    trainers = make_trainers(setting, dataset_folder(setting, work), record, precisions)
    if not trainers:
        return
    first, peers = next(iter(trainers.values())), {}
    if "bf16" in precisions:
        with record.attempt("ceilings"):
            record.keep("ceilings", _ceilings(first, setting))
        peers = _make_peers(first, setting, record)
    turns = {name: trainer.turn(trainer.resident) for name, trainer in trainers.items()}
    turns.update({name: peer.turn() for name, peer in peers.items()})
    timed = take_turns_kept(turns, first.synchronize, setting, record)
    for name, figures in timed.items():
        if name != TORCHVISION:  # another network, with less to do
            figures["share_of_roofline"] = figures["images_per_second"] / roofline.images_per_second()
    record.keep("steps", timed)
    record.keep("clocks_after", query("clocks.sm,clocks.mem,temperature.gpu,power.draw"))
    for name in timed:
        with record.attempt(f"loss of {name}"):
            loss = trainers[name].mean_loss() if name in trainers else peers[name].loss.item()
            if not math.isfinite(loss):
                raise ArithmeticError(f"it is {loss}: what was timed is no training")
    stages = {}
    for name in timed:
        with record.attempt(f"stages of {name}"):
            stages[name] = _stages(name, trainers, peers, first)
            record.keep("stages", stages)
    profiles = {}
    for name, turn in turns.items():
        with record.attempt(f"profile of {name}"):
            profiles[name] = profile(turn, first.synchronize)
            record.keep("profiles", profiles)
    with record.attempt("closing"):
        for trainer in trainers.values():
            trainer.close()


def profile(turn: Turn, synchronize: Callable[[], object]) -> list[tuple[str, float, float]]:
    """The time of a step on the device: a kernel's name, its ms a step, its launches a step."""
    kinds = torch.profiler.ProfilerActivity
    kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
    turn.prepare()
    turn.step()
    synchronize()
    with torch.profiler.profile(activities=[kind]) as found:
        for _ in range(_PROFILED_STEPS):
            turn.step()
        synchronize()
    rows = []
    for event in found.key_averages():
        microseconds = event.self_device_time_total if kind == kinds.CUDA else event.self_cpu_time_total
        rows.append((event.key[:120], microseconds / 1e3 / _PROFILED_STEPS, event.count / _PROFILED_STEPS))
    return sorted(rows, key=lambda row: -row[1])[:_MOST_KERNELS]


def make_trainers(
    setting: Setting, folder: Path, record: Record, precisions: tuple[str, ...]
) -> dict[str, LoneTrainer]:
    """One of each precision, without and with a graph; those last: a capture that fails can leave traces.

    In bf16 others have convolutions in other forms: the first by space-to-depth, and all that have one.
    """
    trainers = {}
    for graph, form in ((False, "plain"), (True, "plain"), (True, "space_to_depth"), (True, "all")):
        for precision in precisions if form == "plain" else {"bf16"} & {*precisions}:
            others = "" if form == "plain" else f", conv_layout: {form}"
            name = f"Lockstep {precision}{', cuda_graph' * graph}{others}"
            if graph and setting.rehearsal:
                record.keep("not rehearsed", "cuda_graph: torch computes on the CPU")
                continue
            with record.attempt(name):
                keys: dict[str, Any] = {"precision": precision, "cuda_graph": graph, "conv_layout": form}
                trainer = LoneTrainer(setting, folder, para_load=False, **keys)
                try_out(trainer.turn(trainer.resident), trainer.synchronize)
                trainers[name] = trainer
    return trainers


def _make_peers(first: LoneTrainer, setting: Setting, record: Record) -> dict[str, PlainTraining]:
    batch = first.resident.batch()
    first.synchronize()  # the batch was made in another stream than the one that copies it here
    compute_in(None, batch.images.device)
    peers = {}
    with record.attempt(PLAIN):
        module = importlib.import_module(f"models.{setting.model}")
        network = module.Model(setting.n_classes, **setting.model_args)
        peer = PlainTraining(network, batch.images, batch.labels)
        try_out(peer.turn(), first.synchronize)
        peers[PLAIN] = peer
    if find_spec("torchvision") is None:
        record.keep(TORCHVISION, "not measured: torchvision is not here")
        return peers
    with record.attempt(TORCHVISION):
        network = importlib.import_module("torchvision.models").alexnet(num_classes=setting.n_classes)
        images = batch.images[:, :, :_TORCHVISION_SIZE, :_TORCHVISION_SIZE] / 64
        peer = PlainTraining(network, images, batch.labels)
        try_out(peer.turn(), first.synchronize)
        peers[TORCHVISION] = peer
    return peers


def _ceilings(first: LoneTrainer, setting: Setting) -> dict[str, float]:
    """Measure the limits of this card: a copy on the device, and a product of random bfloat16 matrices."""
    memory, driver, stream = first.memory, first.driver, first.stream
    source = memory.allocate(setting.copy_bytes, "a copy's source")
    target = memory.allocate(setting.copy_bytes, "a copy's target")
    source.tensor(torch.uint8, (setting.copy_bytes,)).random_(0, 256)
    multiply = matrix_product(setting, first.device)
    first.synchronize()
    copy = partial(driver.memcpy_dtod_async, target.pointer, source.pointer, setting.copy_bytes, stream)
    compute_in(stream, first.device)
    seconds = device_turns({"copy": copy, "multiply": multiply}, driver, stream, 10, setting.n_rounds)
    for block in (source, target):
        block.close()
    flops, moved = 2 * setting.matrix**3 / seconds["multiply"], 2 * setting.copy_bytes / seconds["copy"]
    return {
        "copy_gb_per_second": moved / 1e9,  # read plus written
        "bf16_tflops": flops / 1e12,
        "roofline_here": roofline.images_per_second(flops, moved),
        "roofline": roofline.images_per_second(),
    }


def _stages(
    name: str, trainers: dict[str, LoneTrainer], peers: dict[str, PlainTraining], first: LoneTrainer
) -> dict[str, Any]:
    if name in peers:
        return {"stages_ms": peers[name].stages(first.driver.Event)}
    trainer = trainers[name]
    figures: dict[str, Any] = {"phases_ms": trainer.phases(trainer.resident, 20)}
    if not trainer.config.cuda_graph:
        figures["stages_ms"] = trainer.stages()
    return figures
