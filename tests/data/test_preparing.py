"""Crops, erasing and own functions against NumPy: what the loader makes of stored images."""

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZE, make_config, make_folder
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.comm.messages import Order
from lockstep.data import hkl
from lockstep.data.boxes import draw_boxes, middle_box
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.preparing import Preparer, cut, resize
from lockstep.errors import UserError
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Slot

CROP = 32
COLOR = np.array([100.2, 120.6, 140.0])


def random_images(n_images: int, rows: int = SIZE, columns: int = SIZE) -> np.ndarray:
    random = np.random.default_rng(n_images)
    return random.integers(0, 256, (n_images, rows, columns, 3), dtype=np.uint8)


def weights_of(n_old: int, n_new: int) -> np.ndarray:
    """Return the antialiased bilinear filter, float (new, old): triangles as wide as the new pixels."""
    scale = n_old / n_new
    support = max(scale, 1.0)
    centers = (np.arange(n_new) + 0.5) * scale
    distances = np.abs(np.arange(n_old) + 0.5 - centers[:, None]) / support
    triangles = (1 - distances).clip(0)
    filters: np.ndarray = triangles / triangles.sum(1, keepdims=True)
    return filters


@pytest.mark.parametrize("size", [20, 32, 80])
def test_resized_crops_are_within_one_gray_level_of_numpy_and_pillow(size: int) -> None:
    """Smaller and larger, mirrored and not, on both sides of the size from which torch mirrors."""
    images = random_images(6, 50, 70)
    boxes = np.array(
        [[0, 0, 50, 70], [3, 5, 20, 33], [10, 1, 40, 9], [49, 69, 1, 1], [0, 7, 50, 7], [9, 9, 31, 32]]
    )
    mirrors = np.array([0, 1, 1, 0, 1, 0])
    out = np.zeros((6, size, size, 3), np.uint8)
    resize(images, boxes, mirrors, out)
    for image, (row, column, n_rows, n_columns), mirrored, result in zip(
        images, boxes, mirrors, out, strict=True
    ):
        part = image[row : row + n_rows, column : column + n_columns]
        down, across = weights_of(n_rows, size), weights_of(n_columns, size)
        exact = np.einsum("yr,xc,rcb->yxb", down, across, part.astype(float))
        pillow = np.asarray(Image.fromarray(part).resize((size, size), Image.Resampling.BILINEAR))
        for expected in (exact, pillow.astype(float)):
            assert np.abs(result - (expected[:, ::-1] if mirrored else expected)).max() <= 1


def test_resized_crops_are_torchvisions(torchvision: Any) -> None:
    from torchvision.transforms import functional

    images = random_images(2, 50, 70)
    out = np.zeros((2, CROP, CROP, 3), np.uint8)
    resize(images, np.array([[3, 5, 20, 33], [10, 1, 40, 60]]), np.zeros(2, int), out)
    for image, result, box in zip(images, out, ((3, 5, 20, 33), (10, 1, 40, 60)), strict=True):
        theirs = functional.resized_crop(Image.fromarray(image), *box, [CROP, CROP])
        assert np.abs(result.astype(int) - np.asarray(theirs)).max() <= 1


def test_boxes_have_the_distribution_of_torchvisions(torchvision: Any) -> None:
    import torch
    from torchvision import transforms

    torch.manual_seed(0)
    image = torch.zeros(3, 100, 80)
    take = transforms.RandomResizedCrop.get_params
    theirs = np.array([take(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    values = {"crop": "random_resized"}
    preparer = Preparer(make_config(**values), (100, 80), (CROP, CROP), COLOR)
    preparer.draw(True, 1, 4000)
    ours = preparer._boxes
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 2
    assert np.abs(ours.std(0) - theirs.std(0)).max() < 1.5


def test_erased_parts_have_the_distribution_of_torchvisions(torchvision: Any) -> None:
    """In area, ratio and place; torchvision's ratio is of rows to columns, and its range nearly symmetric."""
    from torchvision import transforms

    torch.manual_seed(0)
    image, take = torch.zeros(3, 100, 80), transforms.RandomErasing.get_params
    theirs = np.array([take(image, [0.02, 0.33], [0.3, 3.3], [0.0])[:4] for _ in range(4000)])
    preparer = Preparer(make_config(random_erasing=1.0), (100, 80), (100, 80), COLOR)
    preparer.draw(True, 1, 4000)
    ours = preparer._erased[preparer._erased[:, 2] > 0]
    assert len(ours) > 3990
    statistics = []
    for boxes in (ours, theirs):
        rows, columns = boxes[:, 2:].T
        facts = np.stack([rows * columns / 8000, np.log(columns / rows), *(boxes / 100).T])
        statistics.append(np.concatenate([facts.mean(1), facts.std(1)]))
    differences = np.abs(statistics[0] - statistics[1])
    assert differences[[0, 6]].max() < 0.005 and differences.max() < 0.03


@pytest.mark.parametrize("size", [8, 80])
def test_cut_copies_and_mirrors(size: int) -> None:
    images = random_images(4, size + 3, size + 2)
    crops = np.array([[0, 0, 0], [3, 2, 1], [1, 2, 0], [2, 0, 1]])
    out = np.zeros((4, size, size, 3), np.uint8)
    cut(images, crops, out)
    for image, (row, column, mirrored), result in zip(images, crops, out, strict=True):
        window = image[row : row + size, column : column + size]
        assert (result == (window[:, ::-1] if mirrored else window)).all()


RATIOS = st.one_of(st.floats(0.2, 5), st.floats(1e-4, 1e4))  # usual ones, and ones that no image has


@given(
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted),
    st.tuples(RATIOS, RATIOS).map(sorted),
    st.integers(0, 99),
)
@example((256, 256), (0.08, 1), (1000, 1000), 0)
@example((32, 32), (0.08, 1), (0.001, 0.01), 0)
@settings(max_examples=60)
def test_boxes_lie_in_the_image_with_the_area_and_ratio(
    image_size: tuple[int, int], scale: Any, ratio: Any, seed: int
) -> None:
    boxes = draw_boxes(np.random.default_rng(seed), 200, image_size, tuple(scale), tuple(ratio))
    row, column, n_rows, n_columns = boxes[boxes[:, 2] > 0].T
    height, width = image_size
    assert (row >= 0).all() and (row + n_rows <= height).all()
    assert (column >= 0).all() and (column + n_columns <= width).all()
    # Sides are rounded to whole pixels.
    assert ((n_rows + 0.5) * (n_columns + 0.5) >= scale[0] * height * width).all()
    assert ((n_rows - 0.5) * (n_columns - 0.5) <= scale[1] * height * width).all()
    assert ((n_columns + 0.5) / (n_rows - 0.5) >= ratio[0]).all()
    assert ((n_columns - 0.5) / (n_rows + 0.5) <= ratio[1]).all()
    row, column, n_rows, n_columns = middle_box(image_size, tuple(ratio))
    assert 0 <= row < row + n_rows <= height and 0 <= column < column + n_columns <= width


def test_areas_are_uniform_and_every_place_occurs() -> None:
    boxes = draw_boxes(np.random.default_rng(0), 20_000, (100, 100), (0.08, 0.5), (3 / 4, 4 / 3))
    areas = boxes[:, 2] * boxes[:, 3] / 100**2
    counts, _ = np.histogram(areas, 4, (0.08, 0.5))
    assert (boxes[:, 2] > 0).all() and np.abs(counts / 5000 - 1).max() < 0.06
    logarithms = np.log(boxes[:, 3] / boxes[:, 2])
    assert abs(logarithms.mean()) < 0.01 and 0.15 < logarithms.std() < 0.18  # uniform: 0.166
    assert np.unique(boxes[:, 0]).size > 60


def prepared(images: np.ndarray, epoch: int = 1, size: int = CROP, **values: object) -> np.ndarray:
    """Return training images as the loader makes them; sample numbers count from 0, crops lie at (1, 2)."""
    preparer = Preparer(make_config(**values), images.shape[1:3], (size, size), COLOR)  # type: ignore[arg-type]
    preparer.draw(True, epoch, len(images))
    samples, crops = np.arange(len(images)), np.tile(np.array([1, 2, 0], np.int32), (len(images), 1))
    out = np.zeros((len(images), size, size, 3), np.uint8)
    preparer.apply(images, samples, samples, crops, out)
    return out


@pytest.mark.parametrize("mode", ["zero", "reflect"])
def test_padded_crops_are_those_of_the_padded_image(mode: str) -> None:
    images = random_images(3, CROP, CROP)
    out = prepared(images, crop="padded", crop_args={"padding": 3, "mode": mode})
    around = ((0, 0), (3, 3), (3, 3), (0, 0))
    padded = np.pad(images, around, "reflect") if mode == "reflect" else np.pad(images, around)
    assert (out == padded[:, 1 : 1 + CROP, 2 : 2 + CROP]).all()


@pytest.mark.parametrize(("mode", "theirs"), [("zero", "constant"), ("reflect", "reflect")])
def test_padded_crops_are_torchvisions(torchvision: Any, mode: str, theirs: str) -> None:
    from torchvision.transforms import functional

    images = random_images(3, CROP, CROP)
    out = prepared(images, crop="padded", crop_args={"padding": 3, "mode": mode})
    for image, result in zip(images, out, strict=True):
        padded = functional.pad(Image.fromarray(image), 3, padding_mode=theirs)
        assert (result == np.asarray(functional.crop(padded, 1, 2, CROP, CROP))).all()


def test_resized_crops_take_each_samples_own_part() -> None:
    images = random_images(1).repeat(50, 0)
    out = prepared(images, crop="random_resized")
    assert len({result.tobytes() for result in out}) == 50
    assert (prepared(images, crop="random_resized") == out).all()
    assert (prepared(images, 2, crop="random_resized") != out).any()
    whole = prepared(images, crop="random_resized", crop_args={"scale": [1, 1], "ratio": [1, 1]})
    boxes = np.tile([0, 0, SIZE, SIZE], (50, 1))
    expected = np.empty_like(whole)
    resize(images, boxes, np.zeros(50, int), expected)
    assert (whole == expected).all()


def test_erased_parts_have_the_mean_color_and_the_right_share() -> None:
    images = np.zeros((4000, SIZE, SIZE, 3), np.uint8)
    out = prepared(images, random_erasing=0.25)
    erased = (out != 0).any(-1)
    assert (out[erased] == [100, 121, 140]).all()
    shares = erased.mean((1, 2))
    assert abs((shares > 0).mean() - 0.25) < 0.03
    some = shares[shares > 0]
    assert some.min() > 0.01 and some.max() < 0.36 and abs(some.mean() - 0.175) < 0.02
    for picture in erased[shares > 0][:50]:
        down, across = picture.any(1), picture.any(0)
        assert (picture == down[:, None] & across).all()  # one rectangle


def test_changes_follow_the_order_of_the_document() -> None:
    """A rotation before jitter, jitter before the policy; erased parts keep the mean's color."""
    images = random_images(20)
    values = {"rotate": 30.0, "color_jitter": 0.4, "auto_augment": "rand"}
    preparer = Preparer(make_config(**values), (SIZE, SIZE), (CROP, CROP), COLOR)
    names = [type(change).__name__ for change in preparer._changes]
    assert names == ["Rotation", "ColorJitter", "AutoAugment"]
    out = prepared(images, random_erasing=1.0, **values)
    assert ((out == [100, 121, 140]).all(-1).mean((1, 2)) > 0.01).sum() >= 19  # a box may fit nowhere


def own(monkeypatch: pytest.MonkeyPatch, function: Any) -> dict[str, object]:
    module: Any = types.SimpleNamespace(change=function)
    monkeypatch.setitem(sys.modules, "my_changes", module)
    return {"augmentation": "my_changes:change"}


def test_an_own_function_gets_each_sample_with_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        image += rng.integers(50, dtype=np.uint8)  # in place is allowed
        return image

    images = np.zeros((30, SIZE, SIZE, 3), np.uint8)
    first, again, other = (prepared(images, epoch, **own(monkeypatch, add)) for epoch in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    assert len(set(first[:, 0, 0, 0].tolist())) > 10


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda image, rng: image[:-1], "returns uint8 of shape (31, 32, 3). It must return a uint8 array"),
        (lambda image, rng: image / 1.0, "returns float64 of shape (32, 32, 3). It"),
        (lambda image, rng: image * np.nan, "returns float64 of shape (32, 32, 3) that holds NaN. It"),
        (lambda image, rng: None, "returns NoneType. It must"),
        (lambda image, rng: image.missing, "fails: AttributeError: "),
    ],
)
def test_an_own_function_that_returns_something_else_names_the_sample(
    monkeypatch: pytest.MonkeyPatch, function: Any, message: str
) -> None:
    def fails_late(image: np.ndarray, rng: np.random.Generator) -> Any:
        return function(image, rng) if image[0, 0, 0] == 3 else image

    images = np.arange(5, dtype=np.uint8)[:, None, None, None] + np.zeros((1, SIZE, SIZE, 3), np.uint8)
    with pytest.raises(UserError) as caught:
        prepared(images, 7, **own(monkeypatch, fails_late))
    assert "augmentation: my_changes:change of training sample 3 in epoch 7 " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"augmentation": "nowhere:f"}, "nowhere can't be imported: ModuleNotFoundError"),
        ({"augmentation": "math:sqr"}, "math has no function sqr (did you mean 'sqrt'?)"),
        ({"augmentation": "math:pi"}, "pi of math is no function"),
        (
            {"crop": "padded", "crop_args": {"padding": SIZE, "mode": "reflect"}},
            "crop_args: padding 36 can't be reflected from images of 36 x 36: it must be below 36",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_image(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        prepared(random_images(1), **values)


def test_validation_needs_no_own_function() -> None:
    preparer = Preparer(make_config(augmentation="nowhere:f"), (SIZE, SIZE), (CROP, CROP), COLOR)
    preparer.draw(False, 1, 5)
    images, out = random_images(5), np.zeros((5, CROP, CROP, 3), np.uint8)
    preparer.apply(images, np.arange(5), np.arange(5), np.zeros((5, 3), np.int32), out)
    assert (out == images[:, :CROP, :CROP]).all()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = make_folder(tmp_path_factory.mktemp("data") / "set")
    return open_dataset(make_config(data_folder=str(folder), crop="padded"))


def test_validation_images_are_the_middle_with_the_mean_of_each_channel(dataset: Dataset) -> None:
    config = make_config(
        batch_size=16, crop="padded", auto_augment="trivial", random_erasing=1.0, mixup=1.0, rand_color=0.1
    )
    reader = Reader(config, dataset, (CROP, CROP), print)
    slot = reader.raw_shape(1).slots(np.zeros(reader.raw_shape(1).n_bytes, np.uint8))[0]
    assert slot.images.shape == (16, CROP, CROP, 3)
    images = np.concatenate([hkl.read(file.path) for file in dataset.val.files])
    reader.read(Order("train", 1, 1, 0, 16, 0, 16), slot)
    reader.read(Order("val", 1, 1, 0, 16, 0, 16), slot)
    assert (slot.images == images[:16, 2 : 2 + CROP, 2 : 2 + CROP]).all()
    assert (slot.crops == 0).all() and (slot.shifts == 0).all()
    assert (slot.label_weights == 1).all() and (slot.labels == dataset.val.labels[:16]).all()
    reader.read(Order("val", 1, 1, 0, 16, 0, 16, view=6), slot)
    assert (slot.images == images[:16, :CROP, :CROP][:, :, ::-1]).all()
    assert reader.mean.shape == (CROP, CROP, 3) and np.unique(reader.mean.reshape(-1, 3), axis=0).shape == (
        1,
        3,
    )


def test_batch_crop_mirror_takes_one_part_of_all_images(dataset: Dataset, tmp_path: Path) -> None:
    values = {"crop": "random_resized", "batch_crop_mirror": True, "batch_size": 16}
    reader = Reader(make_config(**values), dataset, (CROP, CROP), print)
    slot = reader.raw_shape(1).slots(np.zeros(reader.raw_shape(1).n_bytes, np.uint8))[0]
    order = Order("train", 1, 1, 0, 16, 0, 16)
    reader.read(order, slot)
    assert reader._preparer is not None
    images = np.concatenate([hkl.read(file.path) for file in dataset.train.files])[slot.samples]
    first = slot.samples[0]
    boxes = np.tile(reader._preparer._boxes[first], (16, 1))
    expected = np.empty_like(slot.images)
    resize(images, boxes, np.repeat(reader._crops[first, 2], 16), expected)
    assert (slot.images == expected).all()


def read_of_rare(place: Path, **values: Any) -> tuple[Slot[np.ndarray], np.ndarray]:
    """Read an epoch of 32 images in which a balanced sampler draws the only one of a class 16 times.

    Return the slot and the places of that image.
    """
    folder = make_folder(place, n_train=32)
    path = folder / "labels" / "train_labels.npy"
    np.save(path, (np.arange(32) == 5).astype(np.int64))
    config = make_config(data_folder=str(folder), sampler="balanced", batch_size=32, rand_color=0.1, **values)
    reader = Reader(config, open_dataset(config), (CROP, CROP), print)
    slot = reader.raw_shape(1).slots(np.zeros(reader.raw_shape(1).n_bytes, np.uint8))[0]
    reader.read(Order("train", 1, 1, 0, 32, 0, 32), slot)
    places = np.flatnonzero(slot.samples == 5)
    assert len(places) == 16
    return slot, places


@pytest.mark.parametrize(
    "values",
    [{"crop": "random_resized"}, {"crop": "center", "color_jitter": 0.4}, {"crop": "padded"}, {}],
    ids=str,
)
def test_an_image_that_a_sampler_repeats_is_changed_anew_each_time(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    slot, places = read_of_rare(tmp_path / "set", **values)
    seen = {(slot.images[place].tobytes(), slot.crops[place].tobytes()) for place in places}
    assert len(seen) > 8 and len(np.unique(slot.shifts[places], axis=0)) == 16


def test_an_own_function_gets_another_generator_for_each_draw_and_names_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.full_like(image, rng.integers(256))

    slot, places = read_of_rare(tmp_path / "set", **own(monkeypatch, fill))
    assert len(set(slot.images[places, 0, 0, 0].tolist())) > 8
    monkeypatch.setattr(sys.modules["my_changes"], "change", lambda image, rng: None)
    with pytest.raises(UserError, match=rf"of training sample {slot.samples[0]} in epoch 1 returns NoneType"):
        read_of_rare(tmp_path / "again", augmentation="my_changes:change")


@pytest.mark.parametrize("n_channels", [1, 2, 3, 4])
def test_the_layout_in_which_torch_resizes_does_not_change_the_bits(n_channels: int) -> None:
    """It is channels-last for speed; a contiguous copy of the rectangle is the reference."""
    random = np.random.default_rng(n_channels)
    for mirrored in (0, 1) * 10:
        image = random.integers(0, 256, (1, 50, 60, n_channels), dtype=np.uint8)
        rows, columns, *size = (int(number) for number in random.integers(1, 50, 4))
        out = np.empty((1, *size, n_channels), np.uint8)
        resize(image, np.array([[1, 2, rows, columns]]), np.array([mirrored]), out)
        part = torch.from_numpy(image[0, 1 : 1 + rows, 2 : 2 + columns].copy()).permute(2, 0, 1)[None]
        options = {"mode": "bilinear", "antialias": True}
        expected = torch.nn.functional.interpolate(part.contiguous(), tuple(size), **options)[0]
        expected = expected.flip(2) if mirrored else expected
        assert np.array_equal(out[0], expected.permute(1, 2, 0).numpy())
