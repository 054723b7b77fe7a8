"""Single changes of the CPU's step beside the code that they replaced: python -m benchmarks.kernels.changes

Both take turns with one thread. docs/results/performance-log.md records the expectations.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import medians, table
from lockstep.data.augment import Augmenter
from lockstep.network.layers import LocalResponseNorm

BATCH, SIZE, CROP = 32, 256, 227
Ways = dict[str, Callable[[], object]]


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers; the first row of each group is the present code."""
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = [("what", "way", "ms", "times the first's")]
    numbers: dict[str, Any] = {}
    for what, implementations in (
        (f"LRN, {BATCH} x 96 x 27 x 27, forward and backward", norms()),
        (f"{BATCH} images to float32: where it is done now, and what `uint8` slots would add", pictures()),
        ("seeding torch for a step", seeds()),
        ("a convolution and a fully connected layer, forward and backward", precisions()),
    ):
        seconds = numbers[what] = medians(implementations, rounds=9)
        first = next(iter(seconds.values()))
        rows += [(what, way, f"{s * 1e3:.3f}", f"{s / first:.2f} x") for way, s in seconds.items()]
    return table("Single changes, one thread, medians of 9 in turns", rows), numbers


def norms() -> Ways:
    """Compare the closed form, its formula by autograd with a float power, and torch's module."""
    x = torch.randn(BATCH, 96, 27, 27).to(memory_format=torch.channels_last).requires_grad_()
    closed, stock = LocalResponseNorm(), nn.LocalResponseNorm(5, 5e-4, 0.75, 2.0)
    gradient = torch.ones_like(x)

    def both(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.autograd.grad(norm(x), x, gradient)

    def by_autograd(given: torch.Tensor) -> torch.Tensor:
        sums = nn.functional.conv2d(given * given, closed.band(given)) * closed.alpha + closed.k
        return given * sums.pow(-closed.beta)

    implementations = {
        "closed form": closed,
        "autograd of the formula": by_autograd,
        "nn.LocalResponseNorm": stock,
    }
    return {name: partial(both, norm) for name, norm in implementations.items()}


def pictures() -> Ways:
    """Return the loader's crop to float32, its crop to bytes, and the trainer's conversion of those."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (BATCH, SIZE, SIZE, 3), dtype=np.uint8)
    mean = random.uniform(100, 130, (SIZE, SIZE, 3)).astype(np.float32)
    crops = random.integers(0, (SIZE - CROP + 1, SIZE - CROP + 1, 2), (BATCH, 3)).astype(np.int32)
    out = np.empty((BATCH, CROP, CROP, 3), np.float32)
    cut = np.empty(out.shape, np.uint8)
    part = torch.from_numpy(mean[:CROP, :CROP].copy())

    def crop() -> None:
        for image, (row, column, mirrored), result in zip(images, crops.tolist(), cut, strict=True):
            piece = torch.from_numpy(image)[row : row + CROP, column : column + CROP]
            if mirrored:
                piece = piece.permute(2, 0, 1).flip(2).permute(1, 2, 0)
            torch.from_numpy(result).copy_(piece)

    return {
        "the loader, to float32": partial(Augmenter(mean, (CROP, CROP)).apply, images, crops, out),
        "a loader, to cropped bytes": crop,
        "a trainer, bytes to float32 less one mean": lambda: (
            torch.from_numpy(out).copy_(torch.from_numpy(cut)).sub_(part)
        ),
    }


def seeds() -> Ways:
    """Return two ways to seed torch."""
    return {
        "the host's generator": lambda: torch.default_generator.manual_seed(1),
        "torch.manual_seed": lambda: torch.manual_seed(1),
    }


def precisions() -> Ways:
    """Compare precisions. ONEDNN_MAX_CPU_ISA=AVX512_CORE or AVX2 emulates a CPU without bfloat16."""
    layers = nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 14 * 14, 256)
    network: Any = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(16, 64, 14, 14).to(memory_format=torch.channels_last)

    def both(is_bf16: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            y = network(x)
        y.float().sum().backward()

    return {"fp32": partial(both, False), "bf16": partial(both, True)}


if __name__ == "__main__":
    print(run()[0])
