"""The ring for real GPUs: `pytest -m gpu` on a machine with one, `-m multigpu` with several.

The suites of test_conformance.py and test_loading.py belong to the ring too.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Program, Running, wait_until
from saved import assert_same, tensors

from lockstep.comm.pipes import Pipe
from lockstep.data.augment import Augmenter
from lockstep.launch.ranks import run_ranks
from lockstep.loading.slots import RingShape
from lockstep.memory.cuda import CudaMemory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TWO_RANKS = "[cuda:0, cuda:0]"


def augment_everywhere(
    rank: int, pipes: dict[int, Pipe], dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Compare every crop of random images, mirrored or not, by the kernel and by the host."""
    from lockstep.kernels.augment import CropMirrorSubtractKernel

    height, width, size = 11, 13, 7
    places = torch.cartesian_prod(torch.arange(5), torch.arange(7), torch.arange(2)).numpy()
    random = np.random.default_rng(0)
    mean = random.uniform(0, 255, (height, width, 3)).astype(np.float32)
    raw = RingShape(1, len(places), (height, width), "uint8", (size, size))
    ready = RingShape(1, len(places), (size, size), str(dtype).removeprefix("torch."), (size, size))
    source = random.integers(0, 256, raw.n_bytes, dtype=np.uint8)
    slot = raw.slots(source)[0]
    slot.crops[:] = places
    slot.shifts[:] = random.normal(0, 5, slot.shifts.shape)
    expected = np.empty((len(places), size, size, 3), np.float32)
    Augmenter(mean, (size, size)).apply(slot.images, slot.crops, expected, slot.shifts)

    memory = CudaMemory("cuda:0")
    stream = memory.driver.Stream(1)
    kernel = CropMirrorSubtractKernel(memory, stream, mean, raw, ready)
    given = memory.allocate(raw.n_bytes, "a test")
    out = memory.allocate(ready.n_bytes + 4096, "a test")
    memory.driver.memset_d8(out.pointer, 0xFF, ready.n_bytes + 4096)
    memory.driver.memcpy_htod(given.pointer, source)
    kernel.launch(given.pointer, out.pointer, len(places))
    stream.synchronize()
    found = np.empty(ready.n_bytes + 4096, np.uint8)
    memory.driver.memcpy_dtoh(found, out.pointer)
    assert (found[ready.used_bytes(len(places)) :] == 0xFF).all()  # nothing behind the images was touched
    images = ready.tensors(found)[0].images
    return images.float().numpy(), torch.from_numpy(expected).to(dtype).float().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_augments_as_the_host_does_at_every_crop(dtype: torch.dtype) -> None:
    found, expected = run_ranks(augment_everywhere, 1, dtype)[0]
    assert np.array_equal(found, expected)


def difference(ours: Running, theirs: Running) -> float:
    """Return the relative difference of all momenta in norm; weights would show less of what was learned."""

    def momenta(running: Running) -> np.ndarray:
        found = tensors(running, 2)
        return np.concatenate([found[name].ravel() for name in sorted(found) if name.startswith("momenta")])

    return float(np.linalg.norm(momenta(ours) - momenta(theirs)) / np.linalg.norm(momenta(theirs)))


FIXED = ("n_epochs=2", "learning_rate=0.001", "snapshot_freq=1")


@pytest.fixture(scope="module")
def on_cpus(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    return Program(shared_folder, tmp_path_factory.mktemp("cpu")).run(*FIXED)


@pytest.mark.parametrize(
    ("words", "devices", "bound"),
    [
        (("batch_size=16",), "[cuda:0]", 0.01),
        ((), TWO_RANKS, 0.01),
        (("exchange=staged",), TWO_RANKS, 0.01),
        (("exchange=swap",), TWO_RANKS, 0.01),
        (("augment_on=loader",), TWO_RANKS, 0.01),
        (("upload=loader",), TWO_RANKS, 0.01),
        (("para_load=false",), TWO_RANKS, 0.01),
        (("precision=tf32",), TWO_RANKS, 0.1),
        (("precision=bf16",), TWO_RANKS, 0.4),
        (("cuda_graph=true",), TWO_RANKS, 0.01),
        (("cuda_graph=false", "custom_kernels=none"), TWO_RANKS, 0.01),
        (("cuda_graph=true", "precision=bf16"), TWO_RANKS, 0.4),
    ],
    ids=str,
)
def test_a_gpu_trains_as_cpus_do(
    program: Program, on_cpus: Running, words: tuple[str, ...], devices: str, bound: float
) -> None:
    running = program.run(*FIXED, *words, devices=devices)
    running.assert_nothing_left()
    assert difference(running, on_cpus) <= bound


def test_deterministic_runs_repeat_bit_for_bit_captured_resumed_or_not(program: Program) -> None:
    words = (*FIXED, "deterministic=true")
    first = tensors(program.run(*words, devices=TWO_RANKS, name="first"), 2)
    program.run(*words[1:], "n_epochs=1", devices=TWO_RANKS, name="resumed")
    for name, more in (
        ("again", ()),
        ("staged", ("exchange=staged",)),
        ("captured", ("cuda_graph=true",)),
        ("launched", ("cuda_graph=false",)),
        ("resumed", ("resume_train=true",)),
    ):
        assert_same(tensors(program.run(*words, *more, devices=TWO_RANKS, name=name), 2), first)


def used_mib() -> int:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi, which tells the device's memory that all processes together use")
    command = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "loader 1"])
def test_a_killed_process_ends_the_run_and_all_device_memory_comes_back(
    program: Program, victim: str
) -> None:
    before = used_mib()
    running = program.start("n_epochs=2000", "on_failure=stop", devices=TWO_RANKS)
    running.wait_for_text("epoch 2 ")
    assert used_mib() > before + 100
    os.kill(running.pids()[victim], signal.SIGKILL)
    assert running.wait(15) == 1
    assert f"lockstep: {victim} (pid " in running.last_line()
    running.assert_nothing_left()
    assert running.shared_files() == []
    wait_until(lambda: used_mib() <= before + 16, "the device's memory to come back", 20)


def test_a_minibatch_too_large_for_the_gpu_is_named(program: Program) -> None:
    running = program.run("batch_size=15000000", devices="[cuda:0]", code=2)
    assert "Lower batch_size (global_batch_size, if it is set)" in running.last_line()


@pytest.mark.multigpu(2)
def test_two_gpus_train_as_cpus_do(program: Program, on_cpus: Running) -> None:
    running = program.run(*FIXED, devices="[cuda:0, cuda:1]")
    assert difference(running, on_cpus) <= 0.01
