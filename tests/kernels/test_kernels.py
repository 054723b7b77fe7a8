"""The CUDA kernels: compiled by nvcc if installed, and run on the host against the CPU's code, bitwise."""

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import build
import numpy as np
import pytest
import torch
from conftest import ROOT, make_config
from torch import nn

from lockstep import kernels
from lockstep.data.augment import Augmenter
from lockstep.exchange import OPS, Op, Span
from lockstep.exchange.reduction import reduce_chunk
from lockstep.network import convolution

OTHERS = "sm_80", "sm_120"  # the oldest and the newest architecture
KERNELS = sorted((ROOT / "lockstep" / "kernels").glob("*.cu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
@pytest.mark.parametrize(
    "architecture",
    ["sm_90", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
)
@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernels_compile_without_a_warning(tmp_path: Path, path: Path, architecture: str) -> None:
    command = [
        "nvcc",
        f"-arch={architecture}",
        *kernels.OPTIONS,
        "-cubin",
        "-Werror",
        "all-warnings",
        "-o",
        tmp_path / "out",
        path,
        "-Xptxas",
        "-v",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").stat().st_size > 0
    frames = dict(re.findall(r"Function properties for (\w+)\s+(\d+) bytes stack frame", done.stderr))
    assert frames.pop("fold_tree", "128") == "128"  # the sums that wait: the tree's shape is an argument
    assert frames.keys() and set(frames.values()) == {"0"}  # nothing else of a thread's own lies in memory


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not here")
    return ctypes.CDLL(str(build.build_kernels()))


def launch(library: ctypes.CDLL, name: str, packed: bytes, blocks: int, rows: int, threads: int) -> None:
    assert library.launch_kernel(name.encode(), packed, blocks, rows, threads) == 0, (
        f"there is no kernel {name}"
    )


def fold_on_device(
    library: ctypes.CDLL, op: Op, sources: list[np.ndarray], targets: list[np.ndarray], span: Span
) -> None:
    """Reduce with fewer threads than elements, so that threads loop."""
    pointers = [array.ctypes.data for array in sources] + [0] * (16 - len(sources))
    pointers += [array.ctypes.data for array in targets] + [0] * (16 - len(targets))
    packed = struct.pack("32QiiQQ", *pointers, len(sources), len(targets), *span)
    launch(library, f"fold_{op}", packed, blocks=3, rows=1, threads=5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("span", [(0, 16 * 37), (16, 16 * 30 + 7), (32, 35), (48, 48)], ids=str)
def test_fold_gives_the_bits_of_the_hosts_fold_and_touches_nothing_else(
    library: ctypes.CDLL, op: Op, n_ranks: int, span: Span
) -> None:
    n_elements, (first, last) = 16 * 37, span
    random = np.random.default_rng(n_ranks)
    scale = 10.0 ** random.integers(-2, 2, (n_ranks, n_elements))
    arrays = list((random.standard_normal((n_ranks, n_elements)) * scale).astype(np.float32))
    before = [array.copy() for array in arrays]
    expected = [array[first:last].copy() for array in arrays]
    reduce_chunk(expected, expected, op)
    fold_on_device(library, op, arrays, arrays, span)
    for array, old, wanted in zip(arrays, before, expected, strict=True):
        assert array[first:last].tobytes() == wanted.tobytes()
        assert array[:first].tobytes() == old[:first].tobytes()
        assert array[last:].tobytes() == old[last:].tobytes()


def test_what_is_not_a_number_stays_so_on_both_sides(library: ctypes.CDLL) -> None:
    values = [np.nan, 1.0, -1.0, np.inf]
    for op in OPS:
        arrays = [np.array([a] * 16, np.float32) for a in values], [np.zeros(16, np.float32)]
        fold_on_device(library, op, *arrays, (0, 16))
        expected = [np.zeros(16, np.float32)]
        reduce_chunk(arrays[0], expected, op)
        assert np.isnan(expected[0]).all() and np.isnan(arrays[1][0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [(7, 7, 3), (5, 9, 1), (9, 4, 2), (6, 8, 4)], ids=str)
def test_augment_agrees_with_the_host_at_every_crop_mirrored_and_not(
    library: ctypes.CDLL, dtype: torch.dtype, form: tuple[int, int, int]
) -> None:
    height, width, (rows, columns, channels) = 11, 13, form
    places = [
        (row, column, mirror)
        for row in range(height - rows + 1)
        for column in range(width - columns + 1)
        for mirror in (0, 1)
    ]
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (len(places), height, width, channels), dtype=np.uint8)
    mean = random.uniform(0, 255, (height, width, channels)).astype(np.float32)
    crops = np.array(places, np.int32)
    shifts = random.normal(0, 5, (len(places), channels)).astype(np.float32)
    made = np.empty((len(places), rows, columns, channels), np.float32)
    Augmenter(mean, (rows, columns)).apply(images, crops, made, shifts)
    expected = torch.from_numpy(made)
    guard = 64  # elements behind the output that no kernel may touch
    out = torch.full((expected.numel() + guard,), torch.nan, dtype=dtype)
    arrays = images, crops, shifts, mean
    pointers = *(array.ctypes.data for array in arrays), out.data_ptr()
    packed = struct.pack("5Q8i", *pointers, height, width, rows, columns, columns, channels, 1, 0)
    name = f"crop_and_subtract_{str(dtype).removeprefix('torch.')}"
    launch(library, name, packed, blocks=rows, rows=len(places), threads=8)  # 21 numbers: they go round
    assert torch.equal(out[:-guard].view(expected.shape), expected.to(dtype))
    assert out[-guard:].isnan().all()


# A convolution's window, stride and padding, the image's rows and columns: as AlexNet's, as ResNet's, where
# some of the image is left over, where much is added.
@pytest.mark.parametrize("form", [(11, 4, 0, 19), (7, 2, 3, 16), (3, 2, 0, 12), (5, 4, 2, 14)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_augment_lays_pictures_in_the_blocks_that_a_convolution_takes(
    library: ctypes.CDLL, dtype: torch.dtype, form: tuple[int, int, int, int]
) -> None:
    window, stride, padding, size = form
    n_images, height, width = 6, size + 3, size + 2
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (n_images, height, width, 3), dtype=np.uint8)
    mean = random.uniform(0, 255, (height, width, 3)).astype(np.float32)
    crops = random.integers(0, (4, 3, 2), (n_images, 3), dtype=np.int32)
    shifts = random.normal(0, 5, (n_images, 3)).astype(np.float32)
    made = np.empty((n_images, size, size, 3), np.float32)
    Augmenter(mean, (size, size)).apply(images, crops, made, shifts)
    layer = nn.Conv2d(3, 5, window, stride, padding)
    convolution.install(layer, make_config(conv_layout="space_to_depth"))
    assert isinstance(layer, convolution.Convolution)
    blocks = layer.blocks_of(size)
    expected = layer.stack(torch.from_numpy(made).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert blocks and expected.shape == (n_images, blocks.count, blocks.count, 3 * stride**2)
    guard = 64
    out = torch.full((expected.numel() + guard,), torch.nan, dtype=dtype)
    pointers = *(array.ctypes.data for array in (images, crops, shifts, mean)), out.data_ptr()
    sizes = height, width, size, size, blocks.count, 3, blocks.size, blocks.padding
    packed = struct.pack("5Q8i", *pointers, *sizes)
    name = f"crop_and_subtract_{str(dtype).removeprefix('torch.')}"
    launch(library, name, packed, blocks=blocks.count, rows=n_images, threads=8)
    assert torch.equal(out[:-guard].view(expected.shape), expected.to(dtype))
    assert out[-guard:].isnan().all()
