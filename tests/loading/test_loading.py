"""The ring between loader and trainer gives the same minibatches on every back end."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from conftest import goes_wrong, make_config
from simulated import Simulation
from torch import nn

from lockstep.backends import Backend, backend_of, loaders_backend
from lockstep.backends.host import HostBackend
from lockstep.comm.messages import Fill, Filled, Order, Stop, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.augmentation import device_changes, uploader_of
from lockstep.data.dataset import open_dataset
from lockstep.data.sampling import minibatches
from lockstep.errors import UserError
from lockstep.launch.ranks import run_ranks
from lockstep.loading.feed import Feed, open_feed
from lockstep.loading.reader import Reader
from lockstep.loading.slots import BlockLayout, RingShape
from lockstep.network import convolution

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
CROP = 32
Contents = tuple[bytes, ...]  # of a batch: images, labels, samples, second labels, label weights
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@dataclass(frozen=True)
class Case:
    """A way in which minibatches reach the trainer.

    Attributes:
        cut: The ring's events that are ignored, to see what they do.
        blocks: The blocks in which images are wanted.
    """

    config: Config
    simulation: Simulation | None
    cut: str = ""
    blocks: BlockLayout | None = None

    def backend(self) -> Backend:
        if self.simulation:
            simulated.use(self.simulation)
        return backend_of(self.config.devices[0])

    def loaders_backend(self) -> Backend:
        if self.simulation and uploader_of(self.config) == "loader":
            simulated.use(self.simulation)
        return loaders_backend(self.config, self.config.devices[0])

    def orders(self) -> Iterator[Order]:
        """Two epochs of 90 images by 16, the last minibatch with 10, and some validation, once none."""
        for epoch in (1, 2):
            for step, (start, stop) in enumerate(minibatches(90, 16), 1):
                yield Order("train", epoch, step, start, stop, start, stop)
            yield Order("val", epoch, 1, 0, 16, 0, 5)
            yield Order("val", epoch, 2, 16, 32, 16, 16)


def serve(case: Case, pipe: Pipe) -> None:
    """Run the loader as proc_load.py does."""
    if case.cut == "filled":  # the slower side is the one that is not waited for
        case = replace(case, simulation=case.simulation.set(delay=20_000))  # type: ignore[union-attr]
    backend, config = case.loaders_backend(), case.config
    assert pipe.receive(Subtract, "the network's mean").mean is None
    shape = pipe.receive(RingShape, "the ring's shape")
    reader = Reader(config, open_dataset(config), shape.crop_size, print, shape.changes)
    filler = backend.receive_ring(pipe, shape, reader)
    if case.cut == "released":
        filler._released = backend.memory.events(shape.n_slots)  # type: ignore[attr-defined]  # never recorded
    while not isinstance(message := pipe.receive(object, "an order"), Stop):
        assert isinstance(message, Fill)
        filler.fill(message.slot, message.order)
        pipe.send(Filled(message.slot, message.order))
    filler.close()


def feed_of(case: Case, backend: Backend, pipe: Pipe | None) -> Feed:
    config, network = case.config, SimpleNamespace(crop_size=(CROP, CROP), mean=None, blocks=case.blocks)
    dataset = open_dataset(case.config)
    feed = open_feed(backend, config, dataset, network, case.orders(), print, [pipe] if pipe else ())
    if case.cut == "filled":
        feed._ring.filled = backend.memory.events(config.n_slots)  # type: ignore[attr-defined]  # never recorded
    return feed


def consume(case: Case, backend: Backend, feed: Feed) -> list[Contents]:
    """Take every minibatch, and copy its contents out in the stream, while the host runs ahead."""
    kept = []
    for _ in case.orders():
        feed.next()
        batch = feed.batch()
        assert batch.other_labels is not None and batch.label_weights is not None
        rest = batch.labels, batch.samples, batch.other_labels, batch.label_weights
        tensors = [batch.images.permute(0, 2, 3, 1), *rest]
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy_later(backend, copy, tensor)
        feed.release()
        kept.append(copies)
    feed.close()  # waits for the stream
    return [tuple(copy.view(torch.uint8).numpy().tobytes() for copy in copies) for copies in kept]  # type: ignore[misc]


def copy_later(backend: Backend, to: torch.Tensor, tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous()
    if isinstance(backend, HostBackend):
        to.copy_(tensor)
    elif len(tensor):
        driver, array = backend.memory.driver, to.view(torch.uint8).numpy()  # type: ignore[attr-defined]
        driver.memcpy_dtoh_async(array, tensor.data_ptr(), backend.stream)  # type: ignore[attr-defined]


def load(rank: int, pipes: dict[int, Pipe], case: Case) -> list[Contents]:
    """Run a trainer as rank 0 and, if there are two ranks, its loader as rank 1."""
    if rank == 1:
        serve(case, pipes[0])
        return []
    backend = case.backend()
    backend.start_computing(case.config)
    return consume(case, backend, feed_of(case, backend, pipes.get(1)))


@pytest.fixture(scope="module")
def expected(shared_folder: Path) -> list[Contents]:
    """Return the minibatches of the CPU's loader."""
    return run_ranks(load, 2, Case(configure(shared_folder, "cpu"), None))[0]


@pytest.mark.parametrize(
    ("keys", "uploader"),
    [
        ({}, "trainer"),
        ({"upload": "loader"}, "loader"),
        ({"augment_on": "loader"}, "loader"),
        ({"augment_on": "loader", "para_load": False}, "trainer"),
        ({"upload": "loader", "para_load": False}, "trainer"),
    ],
    ids=str,
)
def test_the_trainer_uploads_unless_its_loader_needs_the_device(keys: dict[str, Any], uploader: str) -> None:
    assert uploader_of(make_config(**keys)) == uploader


def configure(folder: Path, device: str, **values: object) -> Config:
    """Return a configuration whose loader uploads, if `values` say nothing else."""
    keys = {"data_folder": str(folder), "batch_size": 16, "shuffle_block": 4, "n_slots": 2}
    return make_config(devices=[device], **{**keys, "upload": "loader", **values})


@pytest.fixture
def simulation_of(request: pytest.FixtureRequest) -> Simulation | None:
    if request.param == "gpu":
        return None
    return request.getfixturevalue("simulation").set(delay=2000)


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("para_load", [True, False], ids=["loader", "direct"])
@pytest.mark.parametrize("augment_on", ["trainer", "loader"])
def test_minibatches_are_those_of_the_cpu_bit_for_bit(
    shared_folder: Path,
    simulation_of: Simulation | None,
    expected: list[Contents],
    para_load: bool,
    augment_on: str,
) -> None:
    config = configure(shared_folder, "cuda:0", para_load=para_load, augment_on=augment_on)
    found = run_ranks(load, 1 + para_load, Case(config, simulation_of))[0]
    assert found == expected


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("augment_on", ["trainer", "loader"])
def test_shifted_colours_are_those_of_the_cpu_bit_for_bit(
    shared_folder: Path,
    simulation_of: Simulation | None,
    expected: list[Contents],
    augment_on: str,
) -> None:
    on_cpu = Case(configure(shared_folder, "cpu", rand_color=0.1, para_load=False), None)
    wanted = run_ranks(load, 1, on_cpu)[0]
    config = configure(shared_folder, "cuda:0", rand_color=0.1, augment_on=augment_on)
    assert run_ranks(load, 2, Case(config, simulation_of))[0] == wanted != expected


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("augment_on", ["trainer", "loader"])
def test_bf16_images_are_the_rounded_ones(
    shared_folder: Path,
    simulation_of: Simulation | None,
    expected: list[Contents],
    augment_on: str,
) -> None:
    config = configure(shared_folder, "cuda:0", precision="bf16", augment_on=augment_on)
    found = run_ranks(load, 2, Case(config, simulation_of))[0]
    for ours, (images, *rest) in zip(found, expected, strict=True):
        rounded = torch.from_numpy(np.frombuffer(images, np.float32).copy()).bfloat16()
        assert ours == (rounded.view(torch.int16).numpy().tobytes(), *rest)


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("values", [{}, {"rand_color": 0.1, "n_slots": 4, "read_threads": 2}], ids=str)
def test_what_the_trainer_uploads_is_the_same(
    shared_folder: Path, simulation_of: Simulation | None, values: dict[str, Any]
) -> None:
    wanted = run_ranks(load, 2, Case(configure(shared_folder, "cpu", **values), None))[0]
    config = configure(shared_folder, "cuda:0", upload="trainer", **values)
    assert run_ranks(load, 2, Case(config, simulation_of))[0] == wanted


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize(
    "values",
    [{"augment_on": "trainer"}, {"augment_on": "loader"}, {"upload": "trainer"}, {"para_load": False}],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_pictures_in_blocks_are_those_of_the_cpu_rearranged(
    shared_folder: Path,
    simulation_of: Simulation | None,
    expected: list[Contents],
    values: dict[str, Any],
    precision: str,
) -> None:
    layer = nn.Conv2d(3, 4, 7, 2, 3)
    convolution.install(layer, make_config(conv_layout="space_to_depth"))
    config = configure(shared_folder, "cuda:0", precision=precision, **values)
    case = Case(config, simulation_of, blocks=layer.blocks_of(CROP))  # type: ignore[operator]
    found = run_ranks(load, 1 + config.para_load, case)[0]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for ours, (images, *rest) in zip(found, expected, strict=True):
        pictures = torch.frombuffer(bytearray(images) or bytearray(4), dtype=torch.float32)
        pictures = pictures[: len(images) // 4].view(-1, CROP, CROP, 3).permute(0, 3, 1, 2)
        wanted = layer.stack(pictures).permute(0, 2, 3, 1).to(dtype)  # type: ignore[operator]
        assert ours == (wanted.contiguous().view(torch.uint8).numpy().tobytes(), *rest)


AUGMENTED = {
    "crop": "random_resized",
    "auto_augment": "trivial",
    "color_jitter": 0.4,
    "random_erasing": 0.5,
    "mixup": 1.0,
    "cutmix": 1.0,
    "rand_color": 0.1,
    "sampler": "balanced",
}


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize(
    "values",
    [
        {"augment_on": "trainer"},
        pytest.param({"augment_on": "loader"}, marks=pytest.mark.slow),
        pytest.param({"upload": "trainer"}, marks=pytest.mark.slow),
        pytest.param({"para_load": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_images_that_the_loader_makes_are_those_of_the_cpu_bit_for_bit(
    shared_folder: Path, simulation_of: Simulation | None, values: dict[str, Any]
) -> None:
    wanted = run_ranks(load, 2, Case(configure(shared_folder, "cpu", **AUGMENTED), None))[0]
    config = configure(shared_folder, "cuda:0", **AUGMENTED, **values)
    found = run_ranks(load, 1 + config.para_load, Case(config, simulation_of))[0]
    assert found == wanted
    assert any(len(set(batch[4])) > 5 for batch in found)  # weights of mixed images have many bytes


KERNELS = {key: value for key, value in AUGMENTED.items() if key != "auto_augment"} | {"seed": 3}


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize(
    "values",
    [
        {"color_jitter": (0.4, 0.4, 0.4, 0.1)},
        {"crop": "padded", "crop_args": {"mode": "reflect"}, "augment_on": "loader"},
        pytest.param({"upload": "trainer", "batch_crop_mirror": True}, marks=pytest.mark.slow),
        pytest.param({"para_load": False, "mixup": 0.0, "cutmix": 0.0}, marks=pytest.mark.slow),
        pytest.param({"crop": "center", "color_jitter": 0.0}, marks=pytest.mark.slow),
        pytest.param({"augment_on": "cores"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_images_that_kernels_make_are_those_of_the_cpu_bit_for_bit(
    shared_folder: Path, simulation_of: Simulation | None, values: dict[str, Any]
) -> None:
    keys = {**KERNELS, **values}
    changes = device_changes(configure(shared_folder, "cuda:0", **keys))
    assert bool(changes and changes.crops) == (values.get("augment_on") != "cores")
    wanted = run_ranks(load, 2, Case(configure(shared_folder, "cpu", **keys), None))[0]
    config = configure(shared_folder, "cuda:0", **keys)
    found = run_ranks(load, 1 + config.para_load, Case(config, simulation_of))[0]
    assert found == wanted


def test_another_draw_gives_other_images(shared_folder: Path, simulation: Simulation) -> None:
    """A negative control: the comparison sees a different seed, though samples and labels stay."""
    keys = {**KERNELS, "sampler": None, "shuffle": "none", "mixup": 0.0, "cutmix": 0.0, "rand_color": 0.0}
    wanted = run_ranks(load, 1, Case(configure(shared_folder, "cpu", para_load=False, **keys), None))[0]
    found = run_ranks(load, 2, Case(configure(shared_folder, "cuda:0", **{**keys, "seed": 4}), simulation))[0]
    assert [batch[1:] for batch in found] == [batch[1:] for batch in wanted]
    assert found[0][0] != wanted[0][0] and found[6] == wanted[6]  # validation has no draws


@pytest.mark.parametrize("values", [{"para_load": False}, {"read_threads": 3}], ids=str)
def test_augmented_images_are_the_same_without_a_loader_and_with_threads(
    shared_folder: Path, values: dict[str, Any]
) -> None:
    wanted = run_ranks(load, 2, Case(configure(shared_folder, "cpu", **AUGMENTED), None))[0]
    config = configure(shared_folder, "cpu", **AUGMENTED, **values)
    assert run_ranks(load, 1 + config.para_load, Case(config, None))[0] == wanted


@pytest.mark.parametrize("cut", ["filled", "released"])
def test_without_its_events_the_ring_would_be_wrong(
    shared_folder: Path, simulation: Simulation, expected: list[Contents], cut: str
) -> None:
    """Without events the comparison fails, so the pauses are long enough to test them."""
    case = Case(configure(shared_folder, "cuda:0"), simulation.set(delay=2000), cut)
    assert goes_wrong(lambda: run_ranks(load, 2, case)[0] != expected)


def refuse(rank: int, pipes: dict[int, Pipe], case: Case) -> str:
    """Run a loader on another device than its trainer's."""
    if rank == 0:
        backend = case.backend()
        backend.start_computing(case.config)
        ring = backend.make_ring(case.config, 2, (CROP, CROP), open_dataset(case.config).mean)
        pipes[1].send(ring.shape)
        ring.block.send(pipes[1])  # type: ignore[attr-defined]
        return pipes[1].receive(str, "its answer")
    simulated.use(case.simulation)  # type: ignore[arg-type]
    backend = backend_of("cuda:1")
    shape = pipes[0].receive(RingShape, "the ring's shape")
    with pytest.raises(UserError) as caught:
        backend.receive_ring(pipes[0], shape, None)  # type: ignore[arg-type]
    pipes[0].send(str(caught.value))
    return ""


def test_a_loader_on_another_device_is_refused(shared_folder: Path, simulation: Simulation) -> None:
    case = Case(configure(shared_folder, "cuda:0"), simulation)
    text = run_ranks(refuse, 2, case)[0]
    assert text.startswith("cuda:1 (simulated device 1, 0000:02:00.0) is another device than trainer 0's")
    assert "Set the same CUDA_VISIBLE_DEVICES" in text
