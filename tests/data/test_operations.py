"""The operations of TrivialAugment and RandAugment against NumPy, and torchvision where it is installed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_config
from PIL import Image

from lockstep.data import operations
from lockstep.data.operations import ImageOperation, rand_table, trivial_table
from lockstep.data.policies import AutoAugment, ColorJitter, Rotation, changes_of, turn_hue

SIZE = 40
SQUARE = SIZE, SIZE


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    """Return a smooth image with some noise, uint8 (row, column, 3), whose colors have different ranges."""
    random, grid = np.random.default_rng(0), np.mgrid[:SIZE, :SIZE] / SIZE
    waves = [np.sin(3 * grid[0]) + grid[1], np.cos(5 * grid[1]) * grid[0], grid.sum(0) / 2]
    image = np.stack(waves, -1) * [100, 60, 190] + random.normal(40, 6, (SIZE, SIZE, 3))
    return image.clip(0, 255).astype(np.uint8)


def blend(base: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    return (base + factor * (image.astype(float) - base)).clip(0, 255)


def gray(image: np.ndarray) -> np.ndarray:
    return (image @ np.array([19595, 38470, 7471]) + 32768 >> 16)[..., None]  # sixteen bits of 0.299, ...


def smooth(image: np.ndarray) -> np.ndarray:
    """Pillow's filter SMOOTH, which leaves the border as it is."""
    result = image.astype(float)
    inner = np.zeros((SIZE - 2, SIZE - 2, 3))
    for row in range(3):
        for column in range(3):
            weight = 5 if row == column == 1 else 1
            inner += weight * result[row : row + SIZE - 2, column : column + SIZE - 2]
    result[1:-1, 1:-1] = np.rint(inner / 13)
    return result


def old_places(inverse: np.ndarray) -> np.ndarray:
    """Return where an affine map finds each new pixel's center: x and y, float (2, row, column)."""
    rows, columns = np.mgrid[:SIZE, :SIZE] + 0.5
    places: np.ndarray = np.einsum("ij,j...->i...", inverse, np.stack([columns, rows, np.ones_like(rows)]))
    return places


def mapped(image: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Return the nearest old pixel of each new pixel's center; outside is black."""
    column, row = np.floor(old_places(inverse)).astype(int)
    inside = (row >= 0) & (row < SIZE) & (column >= 0) & (column < SIZE)
    return np.where(inside[..., None], image[row.clip(0, SIZE - 1), column.clip(0, SIZE - 1)], 0)


def interpolated(image: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """Return the bilinear mean of the four old pixels around each new one's center; outside is black."""
    places = old_places(inverse)
    padded = np.pad(image.astype(float), ((1, 1), (1, 1), (0, 0)), "edge")
    column, row = firsts = np.floor(places + 0.5).astype(int).clip(0, SIZE)  # in the padded image
    right, down = (places + 0.5 - firsts)[..., None]
    above = padded[row, column] * (1 - right) + padded[row, column + 1] * right
    below = padded[row + 1, column] * (1 - right) + padded[row + 1, column + 1] * right
    inside = ((places >= 0) & (places < SIZE)).all(0)[..., None]
    return np.where(inside, above * (1 - down) + below * down, 0)


def turn_back(degrees: float) -> np.ndarray:
    """Return the inverse of a counterclockwise rotation around the center."""
    cosine, sine, middle = math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), SIZE / 2
    turn = np.array([[cosine, -sine], [sine, cosine]])
    return np.column_stack([turn, [middle, middle] - turn @ [middle, middle]])


def rotated(image: np.ndarray, degrees: float) -> np.ndarray:
    return mapped(image, turn_back(degrees))


def stretched(image: np.ndarray) -> np.ndarray:
    low, high = image.min((0, 1)).astype(float), image.max((0, 1))
    return (image - low) * 255 / (high - low)


def equalized(image: np.ndarray) -> np.ndarray:
    """Pillow's definition: each color's cumulated histogram in steps of its last but one part."""
    result = np.empty_like(image)
    for number in range(3):
        counts = np.bincount(image[..., number].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        before = np.concatenate([[0], np.cumsum(counts)[:-1]]) + step // 2
        result[..., number] = (before // step).clip(0, 255)[image[..., number]]
    return result


def rows(*values: float) -> np.ndarray:
    return np.array(values, float).reshape(2, 3)


REFERENCES: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "identity": lambda image, amount: image,
    "shear_x": lambda image, amount: mapped(image, rows(1, amount, 0, 0, 1, 0)),
    "shear_y": lambda image, amount: mapped(image, rows(1, 0, 0, amount, 1, 0)),
    "translate_x": lambda image, amount: mapped(image, rows(1, 0, -int(amount), 0, 1, 0)),
    "translate_y": lambda image, amount: mapped(image, rows(1, 0, 0, 0, 1, -int(amount))),
    "rotate": rotated,
    "brightness": lambda image, amount: blend(np.zeros(3), image, 1 + amount),
    "color": lambda image, amount: blend(gray(image), image, 1 + amount),
    "contrast": lambda image, amount: blend(np.rint(gray(image).mean()), image, 1 + amount),
    "sharpness": lambda image, amount: blend(smooth(image), image, 1 + amount),
    "posterize": lambda image, amount: image >> (8 - int(amount)) << (8 - int(amount)),
    "solarize": lambda image, amount: np.where(image < amount, image, 255 - image),
    "autocontrast": lambda image, amount: stretched(image),
    "equalize": lambda image, amount: equalized(image),
}


def applied(operation: ImageOperation, amount: float, pixels: np.ndarray) -> np.ndarray:
    return np.asarray(operation.apply(Image.fromarray(pixels), amount)).astype(int)


@pytest.mark.parametrize(
    "table", [trivial_table(SQUARE, 31), rand_table(SQUARE, 31)], ids=["trivial", "rand"]
)
def test_each_operation_is_within_one_gray_level_of_numpy(
    table: list[ImageOperation], pixels: np.ndarray
) -> None:
    assert [operation.apply.__name__ for operation in table] == list(REFERENCES)
    for operation in table:
        name = operation.apply.__name__
        for amount in operation.amounts[::10]:
            for signed in (amount, -amount) if operation.is_signed else (amount,):
                # Where a pixel's center falls on a border between two old pixels, rounding decides.
                near = [1 - 1e-4, 1 + 1e-4] if name in ("shear_x", "shear_y", "rotate") else []
                expected = [REFERENCES[name](pixels, signed * factor) for factor in (1, *near)]
                made = applied(operation, signed, pixels)
                wrong = np.min([np.abs(made - each).max(-1) for each in expected], 0) > 1
                assert not wrong.any(), (name, signed)


def test_whole_thresholds_are_exact_since_pixels_may_equal_them() -> None:
    (solarize,) = (o for o in trivial_table(SQUARE, 31) if o.apply is operations.solarize)
    assert list(solarize.amounts) == [255 - 8.5 * bin_number for bin_number in range(31)]


def test_translations_of_rand_augment_have_the_share_of_their_own_side() -> None:
    config = make_config(auto_augment="rand", auto_augment_args={"bins": 2, "magnitude": 1})
    (policy,) = changes_of(config, (331, 662))
    assert isinstance(policy, AutoAugment)
    most = {operation.apply: operation.amounts[-1] for operation in policy._table}
    assert most[operations.translate_x] == 300 and most[operations.translate_y] == 150


def test_most_amounts_change_the_image(pixels: np.ndarray) -> None:
    """The comparison above would not notice operations that do nothing if the references did nothing."""
    for operation in trivial_table(SQUARE, 31)[1:]:
        assert (applied(operation, operation.amounts[-1], pixels) != pixels).any(), operation


@pytest.mark.parametrize("name", ["trivial", "rand"])
@pytest.mark.parametrize("n_rows", [SIZE, SIZE // 2])
def test_tables_and_operations_are_those_of_torchvision(
    torchvision: Any, pixels: np.ndarray, name: str, n_rows: int
) -> None:
    from torchvision.transforms import InterpolationMode, autoaugment

    if name == "trivial":
        space = autoaugment.TrivialAugmentWide()._augmentation_space(31)
        table = trivial_table((n_rows, SIZE), 31)
    else:
        space = autoaugment.RandAugment()._augmentation_space(31, (n_rows, SIZE))
        table = rand_table((n_rows, SIZE), 31)
    for operation, (title, (amounts, is_signed)) in zip(table, space.items(), strict=True):
        assert operation.apply.__name__.replace("_", "") == title.lower()
        assert operation.is_signed == is_signed
        assert np.allclose(operation.amounts, amounts.numpy(), rtol=1e-5, atol=1e-4)
        for place in (0, 7, 30):
            amount = operation.amounts[place]
            theirs = autoaugment._apply_op(
                Image.fromarray(pixels[:n_rows]), title, amount, InterpolationMode.NEAREST, [0, 0, 0]
            )
            assert np.abs(applied(operation, amount, pixels[:n_rows]) - np.asarray(theirs)).max() <= 1, title


def test_hue_is_torchvisions(torchvision: Any, pixels: np.ndarray) -> None:
    from torchvision.transforms import functional

    image = Image.fromarray(pixels)
    for share in (-0.5, -0.21, 0.0, 0.3, 0.5):
        assert (np.asarray(turn_hue(image, share)) == functional.adjust_hue(image, share)).all()


def test_jitter_is_torchvisions_with_the_same_factors_and_order(
    torchvision: Any, monkeypatch: pytest.MonkeyPatch, pixels: np.ndarray
) -> None:
    from torchvision import transforms

    ours, theirs = ColorJitter((0.4, 0.4, 0.4, 0.1)), transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)
    ours.draw(0, 1, 20)
    image = Image.fromarray(pixels)
    for sample in range(20):
        *amounts, hue = ours._amounts[sample].tolist()
        drawn = torch.from_numpy(ours._order[sample]), *(1 + amount for amount in amounts), hue
        monkeypatch.setattr(theirs, "get_params", lambda *ranges, drawn=drawn: drawn)
        assert (np.asarray(ours.apply(image, sample)) == np.asarray(theirs(image))).all()


def test_rotation_is_torchvisions(torchvision: Any, pixels: np.ndarray) -> None:
    from torchvision.transforms import InterpolationMode, functional

    rotation, image = Rotation(20.0), Image.fromarray(pixels)
    rotation.draw(0, 1, 5)
    for sample, angle in enumerate(rotation._angles.tolist()):
        theirs = functional.rotate(image, angle, InterpolationMode.BILINEAR)
        assert (np.asarray(rotation.apply(image, sample)) == np.asarray(theirs)).all()


def test_a_whole_turn_of_thirds_exchanges_the_colors(pixels: np.ndarray) -> None:
    turned = np.asarray(turn_hue(Image.fromarray(pixels), 1 / 3)).astype(int)
    differences = np.abs(turned - np.roll(pixels, 1, -1))
    assert differences.max() <= 12 and differences.mean() < 2  # HSV has 256 hues


def test_jitter_multiplies_in_the_range_and_in_every_order(pixels: np.ndarray) -> None:
    jitter = ColorJitter((0.4, 0.0, 0.0, 0.0))
    jitter.draw(3, 1, 200)
    factors = []
    image = Image.fromarray((pixels // 3) + 20)
    for sample in range(200):
        factors.append(np.asarray(jitter.apply(image, sample)).mean() / np.asarray(image).mean())
    assert 0.59 < min(factors) < 0.65 and 1.35 < max(factors) < 1.41
    every = ColorJitter((0.4, 0.4, 0.4, 0.1))
    every.draw(3, 1, 500)
    assert len({tuple(row) for row in every._order.tolist()}) == 24
    strong = ColorJitter((3.0, 0.0, 0.0, 0.0))
    strong.draw(3, 1, 500)
    assert strong._amounts[:, 0].min() >= -1 and strong._amounts[:, 0].max() > 2.5


def test_rotation_is_bilinear_and_its_angles_fill_the_range(pixels: np.ndarray) -> None:
    rotation = Rotation(20.0)
    rotation.draw(0, 1, 1000)
    assert -20 <= rotation._angles.min() < -19 and 19 < rotation._angles.max() <= 20
    for sample in range(10):
        made = np.asarray(rotation.apply(Image.fromarray(pixels), sample)).astype(float)
        inverse = turn_back(float(rotation._angles[sample]))
        assert np.abs(made - interpolated(pixels, inverse)).max() <= 1
        assert np.abs(made - mapped(pixels, inverse)).max() > 5  # the nearest pixel is another image


def test_policies_draw_every_operation_bin_and_sign_alike() -> None:
    for name, n in (("trivial", 1), ("rand", 2)):
        (policy,) = changes_of(make_config(auto_augment=name), SQUARE)
        assert isinstance(policy, AutoAugment)
        policy.draw(0, 1, 14_000)
        choices = [policy.choices(sample) for sample in range(14_000)]
        assert {len(chosen) for chosen in choices} == {n}
        names = [operation.apply.__name__ for chosen in choices for operation, _ in chosen]
        counts = [names.count(each) for each in REFERENCES]
        assert min(counts) > 850 * n and max(counts) < 1150 * n  # 1,000 n expected, 5 standard deviations
        shears = [amount for chosen in choices for each, amount in chosen if each.apply is operations.shear_x]
        amounts = sorted({round(abs(amount), 4) for amount in shears})
        assert len(amounts) == (31 if name == "trivial" else 1)
        assert 0.4 < np.mean(np.array(shears) < 0) < 0.6
        again = changes_of(make_config(auto_augment=name), SQUARE)[0]
        again.draw(0, 1, 14_000)
        assert again.choices(77) == choices[77]  # type: ignore[attr-defined]
        again.draw(0, 2, 14_000)
        assert [again.choices(sample) for sample in range(50)] != choices[:50]  # type: ignore[attr-defined]
