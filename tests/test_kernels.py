"""The CUDA kernels: compiled by nvcc where it is, and run on the host against the CPU's code, bit for bit."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import build
import numpy as np
import pytest
import torch
from conftest import ROOT

from lockstep.augment import Augmenter
from lockstep.exchange import shard
from lockstep.exchange.host import HostExchange

KERNELS = sorted((ROOT / "lockstep" / "kernels").glob("*.cu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_compile_without_a_warning(tmp_path: Path, path: Path, architecture: str) -> None:
    command = [
        "nvcc",
        f"-arch={architecture}",
        "-cubin",
        "-Werror",
        "all-warnings",
        "-o",
        tmp_path / "out",
        path,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").stat().st_size > 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not here")
    return ctypes.CDLL(str(build.build_kernels(tmp_path_factory.mktemp("kernels"))))


def launch(library: ctypes.CDLL, name: str, packed: bytes, blocks: int, rows: int, threads: int) -> None:
    assert library.launch_kernel(name.encode(), packed, blocks, rows, threads) == 0, (
        f"there is no kernel {name}"
    )


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7, 16])
def test_average_gives_the_bits_of_the_hosts_exchange(library: ctypes.CDLL, n_ranks: int) -> None:
    n_elements = 16 * 37
    random = np.random.default_rng(n_ranks)
    scale = 10.0 ** random.integers(-15, 15, (n_ranks, n_elements))
    arenas = torch.from_numpy((random.standard_normal((n_ranks, n_elements)) * scale).astype(np.float32))
    expected = [arena.clone() for arena in arenas]
    for rank in range(n_ranks):
        HostExchange(expected, rank).average()
    pointers = [arena.data_ptr() for arena in arenas] + [0] * (16 - n_ranks)
    for rank in range(n_ranks):
        before = arenas.clone()
        first, last = shard(n_elements, rank, n_ranks)
        packed = struct.pack("16Qi4xQQ", *pointers, n_ranks, first // 4, last // 4)
        launch(
            library, "average", packed, blocks=3, rows=1, threads=5
        )  # fewer threads than work: they must go round
        outside = torch.ones(n_elements, dtype=torch.bool)
        outside[first:last] = False
        assert torch.equal(arenas[:, outside], before[:, outside])  # other ranks' shards are left alone
    for arena, other in zip(arenas, expected, strict=True):
        assert arena.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_augment_agrees_with_the_host_at_every_crop_mirrored_and_not(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    height, width, size = 11, 13, 7
    places = [
        (row, column, mirror)
        for row in range(height - size + 1)
        for column in range(width - size + 1)
        for mirror in (0, 1)
    ]
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (len(places), height, width, 3), dtype=np.uint8)
    mean = random.uniform(0, 255, (height, width, 3)).astype(np.float32)
    crops = np.array(places, np.int32)
    made = np.empty((len(places), size, size, 3), np.float32)
    Augmenter(mean, size).apply(images, crops, made)
    expected = torch.from_numpy(made)
    guard = 64  # elements behind the output that nobody may touch
    out = torch.full((expected.numel() + guard,), torch.nan, dtype=dtype)
    pointers = (images.ctypes.data, crops.ctypes.data, mean.ctypes.data, out.data_ptr())
    packed = struct.pack("4Q3i", *pointers, height, width, size)
    threads = 32
    blocks = -(-size * size // threads) + 1
    launch(library, f"augment_{str(dtype).removeprefix('torch.')}", packed, blocks, len(places), threads)
    assert torch.equal(out[:-guard].view(expected.shape), expected.to(dtype))
    assert out[-guard:].isnan().all()
