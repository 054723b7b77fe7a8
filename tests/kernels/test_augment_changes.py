"""The kernels that change images (augment.cu), run on the host, against the loader's code and Pillow."""

import ctypes
import shutil
import struct
from typing import Any

import build
import numpy as np
import pytest
from conftest import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.config.augmentation import device_changes
from lockstep.data.mixing import PARTS, mix
from lockstep.data.preparing import Preparer, resize
from lockstep.kernels.filters import scaling_filters
from lockstep.loading.augment_records import CHANGE, PAIR

COLOR = np.array([100.2, 120.6, 140.0])
GUARD = 64  # bytes behind an output that no kernel may touch


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not here")
    return ctypes.CDLL(str(build.build_kernels()))


def launch(
    library: ctypes.CDLL, name: str, arrays: tuple[Any, ...], numbers: tuple[int, ...], grid: Any
) -> None:
    """Launch with fewer threads than numbers in a row, so that threads loop."""
    packed = struct.pack(f"{len(arrays)}Q{len(numbers)}i", *(array.ctypes.data for array in arrays), *numbers)
    assert library.launch_kernel(name.encode(), packed, *grid, 7) == 0, f"there is no kernel {name}"


def crop(
    library: ctypes.CDLL,
    images: np.ndarray,
    changes: np.ndarray,
    size: tuple[int, int],
    reflects: bool = False,
) -> np.ndarray:
    """Return the crops that the kernel makes of images (n, row, column, channel)."""
    n_images, height, width, n_colors = images.shape
    down, across = scaling_filters(height, size[0]), scaling_filters(width, size[1])
    out = np.full(n_images * size[0] * size[1] * n_colors + GUARD, 77, np.uint8)
    numbers = down.shape[2], across.shape[2], height, width, *size, n_colors, int(reflects)
    buffers = images, changes, down, across, out
    launch(library, "augment_resized_crop", buffers, numbers, (size[0], n_images))
    assert (out[-GUARD:] == 77).all()
    return out[:-GUARD].reshape(n_images, *size, n_colors)


def change_of(box: Any, mirror: Any = 0) -> np.ndarray:
    changes = np.zeros(len(box), CHANGE)
    changes["box"], changes["mirror"], changes["order"] = box, mirror, -1
    return changes


def distance(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b).max())


@st.composite
def scalings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
    """Return images, a box of each, mirrors, and the size of the crops."""
    height, width, n_colors = draw(st.integers(2, 70)), draw(st.integers(2, 70)), draw(st.integers(1, 4))
    size = draw(st.integers(2, 40)), draw(st.integers(2, 40))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    images = random.integers(0, 256, (3, height, width, n_colors), dtype=np.uint8)
    if draw(st.booleans()):
        images = np.where(images < 128, 0, 255).astype(np.uint8)  # the largest differences
    rows, columns = random.integers(1, height + 1, 3), random.integers(1, width + 1, 3)
    firsts = random.integers(height - rows + 1), random.integers(width - columns + 1)
    return images, np.stack([*firsts, rows, columns], 1), random.integers(0, 2, 3), size


def by_pillow(image: np.ndarray, box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Scale a box of an image, each channel alone."""
    row, column, rows, columns = box.tolist()
    part = image[row : row + rows, column : column + columns]
    channels = [
        Image.fromarray(np.ascontiguousarray(part[:, :, number])).resize(
            (size[1], size[0]), Image.Resampling.BILINEAR
        )
        for number in range(part.shape[2])
    ]
    return np.stack([np.asarray(channel) for channel in channels], 2)


@given(scalings())
@settings(max_examples=60)
def test_scaled_crops_are_those_of_the_loader_and_within_two_gray_levels_of_pillow(
    library: ctypes.CDLL, case: Any
) -> None:
    images, boxes, mirrors, size = case
    found = crop(library, images, change_of(boxes, mirrors), size)
    ours = np.zeros_like(found)
    resize(images, boxes, mirrors, ours)
    assert distance(found, ours) <= 1
    for image, box, mirror, result in zip(images, boxes, mirrors, found, strict=True):
        assert distance(result[:, ::-1] if mirror else result, by_pillow(image, box, size)) <= 2


def test_scaled_crops_have_the_loaders_bits(library: ctypes.CDLL) -> None:
    random = np.random.default_rng(3)
    images = random.integers(0, 256, (40, 75, 61, 3), dtype=np.uint8)
    corners, sides = random.integers(0, (20, 15), (40, 2)), random.integers(4, (56, 47), (40, 2))
    boxes, mirrors = np.concatenate([corners, sides], 1), random.integers(0, 2, 40)
    found = crop(library, images, change_of(boxes, mirrors), (32, 28))
    ours = np.zeros_like(found)
    resize(images, boxes, mirrors, ours)
    assert (found == ours).all()
    boxes[:, 1] += 1  # negative control: boxes that are one column away
    assert distance(crop(library, images, change_of(boxes, mirrors), (32, 28)), ours) > 20


def described(n_images: int, size: int, place: Any = (0, 0, 0), n_colors: int = 3, **values: Any) -> Any:
    """Return a preparer that makes all changes, and the changes that kernels are to make."""
    config = make_config(**values)
    preparers = [
        Preparer(config, (size, size), (size, size), COLOR[:n_colors], each)
        for each in (None, device_changes(config))
    ]
    samples, places = np.arange(n_images), np.tile(np.array(place, np.int32), (n_images, 1))
    changes = np.full(n_images, 3, np.uint8).repeat(CHANGE.itemsize).view(CHANGE)  # left by an earlier batch
    for preparer in preparers:
        preparer.draw(True, 1, n_images)
    preparers[1].describe(samples, samples, places, changes)
    return lambda images, out: preparers[0].apply(images, samples, samples, places, out), changes


def random_images(n_images: int, size: int, n_colors: int = 3) -> np.ndarray:
    random = np.random.default_rng(n_images)
    return random.integers(0, 256, (n_images, size, size, n_colors), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["zero", "reflect"])
@pytest.mark.parametrize("n_colors", [1, 3])
def test_padded_crops_are_those_of_the_loader(library: ctypes.CDLL, mode: str, n_colors: int) -> None:
    images, values = (
        random_images(1, 12, n_colors),
        {"crop": "padded", "crop_args": {"padding": 5, "mode": mode}},
    )
    for place in [(0, 0, 0), (10, 10, 1), (5, 5, 0), (3, 8, 1), (9, 0, 0)]:
        apply, changes = described(1, 12, place, n_colors, **values)
        wanted = np.zeros_like(images)
        apply(images, wanted)
        on_device = device_changes(make_config(**values))
        assert on_device and on_device.reflects == (mode == "reflect")
        found = crop(library, images, changes, (12, 12), on_device.reflects)
        assert (found == wanted).all()
        other = crop(library, images, changes, (12, 12), not on_device.reflects)
        assert (other != wanted).any() == (place != (5, 5, 0))  # negative control: the other border


def jitter(library: ctypes.CDLL, images: np.ndarray, changes: np.ndarray) -> np.ndarray:
    n_images, rows, columns, _ = images.shape
    sums, out = np.zeros(n_images, np.uint64), images.copy()
    for name in ("augment_sum_gray", "augment_jitter"):
        launch(library, name, (out, changes, sums), (rows, columns), (rows, n_images))
    return out


@pytest.mark.parametrize(
    "strengths",
    [(0.9, 0, 0), (0, 0.9, 0), (0, 0, 1.5), (0, 0, 0, 0.5), (0.4, 0.4, 0.4, 0.1), (2, 2, 2, 0.5)],
    ids=str,
)
def test_jittered_colors_are_those_of_the_loader(library: ctypes.CDLL, strengths: tuple[float, ...]) -> None:
    images = random_images(60, 16)
    images[:20] //= 3  # dark ones, which are far from both ends
    apply, changes = described(60, 16, color_jitter=strengths)
    wanted = np.zeros_like(images)
    apply(images, wanted)
    assert (jitter(library, images, changes) == wanted).all()
    changes["order"] = changes["order"][:, ::-1]  # negative control: another order
    n_used = sum(strength > 0 for strength in strengths)
    assert (jitter(library, images, changes) != wanted).any() == (n_used > 1)
    changes["factors"] *= 0.75  # negative control: other factors
    assert distance(jitter(library, images, changes), wanted) > 1


@pytest.mark.slow
def test_every_color_is_turned_as_by_pillow(library: ctypes.CDLL) -> None:
    """All levels of green and blue with every third level of red, each of which is turned by another hue."""
    red, green, blue = np.meshgrid(np.arange(0, 256, 3), np.arange(256), np.arange(256), indexing="ij")
    images = np.stack([red, green, blue], -1).astype(np.uint8)
    apply, changes = described(len(images), 256, color_jitter=(0, 0, 0, 0.5))
    wanted = np.zeros_like(images)
    apply(images, wanted)
    assert (jitter(library, images, changes) == wanted).all()


def test_erased_parts_are_those_of_the_loader(library: ctypes.CDLL) -> None:
    images = random_images(50, 20)
    apply, changes = described(50, 20, random_erasing=0.5)
    wanted, found = np.zeros_like(images), images.copy()
    apply(images, wanted)
    launch(library, "augment_erase", (found, changes), (20, 20, 3), (20, 50))
    assert (found == wanted).all() and 10 < (found != images).any((1, 2, 3)).sum() < 40


def test_a_place_without_an_image_is_left_alone(library: ctypes.CDLL) -> None:
    images, changes = random_images(2, 9), change_of(np.zeros((2, 4)))
    changes["order"], changes["factors"], changes["erased"] = [0, 1, 2, 3], 2, [0, 0, 9, 9]
    found = jitter(library, images, changes)
    launch(library, "augment_erase", (found, changes), (9, 9, 3), (9, 2))
    assert (found == images).all() and (crop(library, images, changes, (9, 9)) == 77).all()


@given(
    st.integers(0, PARTS),
    st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
@settings(max_examples=60)
def test_mixed_images_are_those_of_the_loader(
    library: ctypes.CDLL, weight: int, box: tuple[int, ...], numbers: tuple[int, int]
) -> None:
    images, (own, partner) = random_images(4, 11), numbers
    area = box[2] * box[3] / 121
    pairs = np.array([(own, partner, round((1 - area) * PARTS) if box[2] else weight, box)], PAIR)
    wanted, found = np.zeros_like(images[0]), np.zeros_like(images[:1])
    mix(images[own], images[partner], 1 - area if box[2] else weight / PARTS, np.array(box), wanted)
    launch(library, "augment_mix", (images, pairs, found), (11, 11, 3), (11, 1))
    assert (found == wanted).all()
    if own != partner and 1 < weight < PARTS - 1 and not box[2]:
        pairs["own"], pairs["partner"] = partner, own  # negative control
        launch(library, "augment_mix", (images, pairs, found), (11, 11, 3), (11, 1))
        assert (found != wanted).any() or weight == PARTS // 2


def test_filters_add_up_and_reach_no_further_than_the_image() -> None:
    filters = scaling_filters(90, 17).astype(int)
    firsts, shifts, weights = filters[:, :, 0], filters[:, :, 1], filters[:, :, 2:]
    sums = weights.sum(2) / (1 << shifts)
    assert np.abs(sums - 1).max() < 1e-3 and (weights >= 0).all() and (weights.max((1, 2)) >= 1 << 14).all()
    last = firsts + np.where(weights > 0, np.arange(weights.shape[2]), 0).max(2)  # with a weight
    assert (firsts >= 0).all() and (last < np.arange(1, 91)[:, None]).all()
