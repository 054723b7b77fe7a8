"""Items of datasets that are Python objects: images, labels, classes, and what is refused."""

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st
from own_datasets import Squares
from PIL import Image

from lockstep import objects
from lockstep.data.dataset import open_dataset
from lockstep.data.items import (
    channels_of,
    class_names_of,
    item_of,
    known_labels_of,
    pixels_of,
    resized,
)
from lockstep.data.survey import Survey, make_survey
from lockstep.errors import UserError

RANDOM = np.random.default_rng(0)
COLORS = RANDOM.integers(0, 256, (5, 4, 3), dtype=np.uint8)
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I")


@given(st.sampled_from(MODES), st.integers(1, 4))
def test_every_mode_of_pillow_becomes_the_channels_that_are_wanted(mode: str, n_channels: int) -> None:
    image = Image.fromarray(COLORS)
    image = image.convert("L").convert(mode) if mode.startswith("I") else image.convert(mode)
    pixels = pixels_of(image, n_channels, "here")
    assert pixels.shape == (5, 4, n_channels) and pixels.dtype == np.uint8
    assert channels_of(image) == {"1": 1, "L": 1, "LA": 2, "RGBA": 4, "I": 1, "I;16": 1}.get(mode, 3)
    if mode in ("RGB", "RGBA") and n_channels == 3:
        assert (pixels == COLORS).all()


def test_a_transparent_image_is_on_white_and_a_rotated_one_upright() -> None:
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert (pixels_of(clear, 3, "here") == 255).all()
    assert (pixels_of(clear, 4, "here") == 0).all()
    image = Image.fromarray(COLORS)
    image.getexif()[0x0112] = 6  # turn it by 90 degrees
    assert (pixels_of(image, 3, "here") == np.rot90(COLORS, -1)).all()


def test_damaged_metadata_leave_an_image_as_it_is() -> None:
    content = io.BytesIO()
    Image.fromarray(COLORS).save(content, "PNG", exif=b"neither II nor MM")
    assert (pixels_of(Image.open(content), 3, "here") == COLORS).all()


def test_16_bits_keep_their_upper_half() -> None:
    levels = np.array([[0, 255, 256, 65535]], np.uint16)
    assert pixels_of(Image.fromarray(levels), 1, "here")[0, :, 0].tolist() == [0, 0, 1, 255]


def test_arrays_and_tensors_are_taken_as_they_are() -> None:
    assert pixels_of(COLORS, 3, "here") is COLORS
    assert (pixels_of(COLORS[:, :, 0], 1, "here")[:, :, 0] == COLORS[:, :, 0]).all()
    tensor = torch.from_numpy(COLORS).permute(2, 0, 1)
    assert channels_of(tensor) == channels_of(COLORS) == 3
    assert (pixels_of(tensor, 3, "here") == COLORS).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (COLORS.astype(np.float32), r"here has an image that is float32 of shape \(5, 4, 3\)"),
        (torch.zeros(3, 5, 4), r"float32 of shape \(3, 5, 4\).* Leave out transforms such as ToTensor"),
        ("a.jpg", "here has an image that is <U5"),
        (COLORS[:, :, :2], "this run's have 3 channels"),
        (COLORS[:0], r"here has an image of shape \(0, 4, 3\). Give it pixels"),
        (
            COLORS.repeat(2, axis=2),
            r"here has an image of shape \(5, 4, 6\). Give it pixels of 1 to 4 channels",
        ),
        (Image.fromarray(np.zeros((3, 3), np.float32)), "can't be used: holds floating-point pixels"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pixels_of(image, 3, "here")


@pytest.mark.parametrize("label", [3, np.int64(3), torch.tensor(3), True + 2])
@pytest.mark.parametrize("name", ["image", "img"])
def test_items_may_be_pairs_or_rows_of_columns(label: Any, name: str) -> None:
    rows = {name: COLORS, "label": label, "id": 7, "text": "a dog"}
    assert item_of([(COLORS, label)], 0, "data") == (COLORS, 3)
    image, number = item_of([rows], 0, "data")
    assert image is COLORS and number == 3


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"a": COLORS, "b": COLORS, "label": 1}, "2 columns that may be the image, of a, b, label"),
        ({"image": COLORS, "a": 1, "b": 2}, "2 columns that may be the label"),
        ({"image": "a.jpg", "label": 1}, "0 columns that may be the image"),
        ((COLORS, "dog"), "has the label 'dog', which is no whole number"),
        ((COLORS, 1.0), "has the label 1.0"),
        ((COLORS, np.float64(1.7)), "has the label .*1.7.* which is no whole number"),
        ((COLORS, torch.tensor(float("inf"))), "has the label tensor.inf., which is no whole number"),
        ((COLORS, 1, 2), "must be .image, label., not tuple"),
        (None, "must be .image, label., not NoneType"),
    ],
)
def test_what_is_no_item_is_refused(item: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"data: item 0 .*{message}"):
        item_of([item], 0, "data")


def test_classes_and_labels_are_found_where_libraries_have_them() -> None:
    label, other = SimpleNamespace(names=["cat", "dog"]), SimpleNamespace()
    rows = SimpleNamespace(features={"image": other, "label": label, "size": other})
    folder = SimpleNamespace(classes=["cat", "dog"], targets=[0, 1, 1])
    assert class_names_of(rows) == class_names_of(folder) == ("cat", "dog")
    rows.features = {"file": other, "image": other, "labels": label}  # as those of the dataset beans
    assert class_names_of(rows) == ("cat", "dog")
    rows.features = {"file": other, "img": other, "kind": label}
    assert class_names_of(rows) == ("cat", "dog")
    rows.features["label"] = other
    assert class_names_of(rows) == ()
    assert class_names_of(SimpleNamespace(dataset=folder, indices=[0])) == ("cat", "dog")
    assert class_names_of([]) == ()
    labels = known_labels_of(folder, 3)
    assert labels is not None and labels.tolist() == [0, 1, 1] and labels.dtype == np.int64
    assert known_labels_of(folder, 4) is known_labels_of([], 0) is None
    boxes = SimpleNamespace(targets=[[1], [1, 2]], labels=[3, 4])  # of detection
    labels = known_labels_of(boxes, 2)
    assert labels is not None and labels.tolist() == [3, 4]


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 3, 4]))
def test_resizing_keeps_a_flat_image_flat(rows: int, columns: int, channels: int) -> None:
    flat = np.full((6, 5, channels), 77, np.uint8)
    result = resized(flat, rows, columns)
    assert result.shape == (rows, columns, channels) and (result == 77).all()


def survey_of(train: Any, input_size: tuple[int, int] = (32, 32), **values: object) -> Survey:
    with objects.available({"data": (train, train)}):
        config = make_config(**{"data": "caller:datasets", "n_classes": 4, **values})
        return make_survey(config, lambda n_channels, n_classes: input_size)


class Several:
    """Images of Pillow of several sizes and modes."""

    def __init__(self, *modes: str, sizes: tuple[int, ...] = (40,)) -> None:
        self.modes, self.sizes = modes, sizes

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Any, int]:
        size = self.sizes[index % len(self.sizes)], self.sizes[0]
        return Image.fromarray(COLORS).resize(size).convert(self.modes[index % len(self.modes)]), index % 4


@pytest.mark.parametrize(
    ("data", "values", "shape"),
    [
        (Squares(90, 0), {}, (36, 36, 3)),  # as they are
        (Squares(90, 0, (63, 63)), {}, (63, 63, 3)),
        (Squares(90, 0, (64, 64)), {}, (36, 36, 3)),  # twice as large: a margin of an eighth is left
        (Squares(90, 0, (28, 28), 1), {}, (36, 36, 1)),  # too small
        (Squares(90, 0, (28, 28), 1), {"item_size": [30, 50]}, (30, 50, 1)),
        (Several("RGB", sizes=(40, 50)), {}, (36, 36, 3)),
        (Several("L"), {}, (40, 40, 1)),
        (Several("L"), {"n_channels": 3}, (40, 40, 3)),
        (Several("L", "RGB"), {}, (40, 40, 3)),
        (Several("RGBA"), {}, (40, 40, 4)),
    ],
)
def test_the_survey_chooses_size_and_channels(
    data: Any, values: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    survey = survey_of(data, **values)
    assert survey.image_shape == shape and len(survey.mean) == shape[2]
    assert (survey.n_train, survey.n_val, survey.n_classes, survey.notes) == (len(data), len(data), 4, ())


def test_a_fingerprint_changes_with_the_images_and_the_length() -> None:
    one = survey_of(Squares(90, 0)).fingerprint
    assert one == survey_of(Squares(90, 0)).fingerprint
    assert len({one, survey_of(Squares(90, 1)).fingerprint, survey_of(Squares(91, 0)).fingerprint}) == 3


def test_classes_that_differ_between_training_and_validation_are_refused() -> None:
    """Such classes come from class folders of which one part lacks a class."""
    train, val = Squares(90, 0), Squares(9, 1)
    train.classes, val.classes = ["ant", "bee", "cat", "dog"], ["ant", "cat", "dog"]
    with objects.available({"data": (train, val)}), pytest.raises(UserError) as caught:
        make_survey(make_config(data="caller:datasets", n_classes=None, item_size=36))
    assert str(caught.value) == (
        "val_data: class 1 is 'cat', and 'bee' in train_data. Give both the same classes in the same order."
    )


@pytest.mark.parametrize("keys", [{"sampler": "balanced"}, {"class_weights": "balanced"}])
def test_weights_need_the_labels_of_the_items(keys: dict[str, str]) -> None:
    """torchvision's target_transform changes the labels of items, not `targets`."""
    data = Squares(90, 0)
    data.targets = [data[index][1] for index in range(90)]
    survey_of(data, **keys)
    data.targets = [(label + 1) % 4 for label in data.targets]
    survey_of(data)
    with pytest.raises(UserError, match=r"train_data: item 0 has the label \d, and the dataset's `targets`"):
        survey_of(data, **keys)


class Other(Squares):
    """Squares of which item 57 is another."""

    def __init__(self, item: Any) -> None:
        super().__init__(90, 0)
        self.item = item

    def __getitem__(self, index: int) -> Any:
        return self.item if index == 57 else super().__getitem__(index)


IMAGE = np.zeros((36, 36, 3), np.uint8)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((IMAGE, 4), "has label 4, not one of 0 to 3"),
        ((IMAGE, -1), "has label -1, not one of 0 to 3"),
        ((IMAGE, 1.5), "has the label 1.5, which is no whole number"),
        ((IMAGE.astype(np.float32), 1), "has an image that is float32 of shape .36, 36, 3."),
        ((IMAGE[:, :, :1], 1), "has an image of shape .36, 36, 1.; this run's have 3 channels"),
        (IMAGE, "must be .image, label., not uint8 of shape .36, 36, 3."),
    ],
)
def test_a_split_names_the_item_that_it_cannot_read(item: Any, message: str) -> None:
    with objects.available({"data": (Squares(90, 0), Other(item))}):  # the survey reads of the first more
        dataset = open_dataset(make_config(data="caller:datasets", n_classes=4, item_size=36))
        out = np.empty((1, 36, 36, 3), np.uint8)
        dataset.val.read(56, 0, out)
        assert dataset.val.labels_of(np.array([56])).tolist() == [Squares(90, 0)[56][1]]
        with pytest.raises(UserError, match=f"val_data: item 57 {message}"):
            dataset.val.read(57, 0, out)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train_data: holds no items"),
        (iter([]), "train_data: has no length: TypeError"),
        ([(IMAGE, 9)], "train_data: item 0 has label 9"),
        ([("a.jpg", 1)], "train_data: item 0 has an image that is <U5"),
    ],
)
def test_a_survey_names_what_it_cannot_use(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        survey_of(data)


class Endless(Squares):
    """Squares that claim to be more than any machine holds labels of."""

    def __len__(self) -> int:
        return 10**15


@pytest.mark.parametrize(("data", "size"), [(Squares(9, 0), 10**7), (Endless(9, 0), 36)])
def test_objects_that_need_more_memory_than_there_is_are_refused(data: Squares, size: int) -> None:
    survey = replace(survey_of(data), image_shape=(size, size, 3))
    config = make_config(data="caller:datasets", n_classes=4)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr("lockstep.data.dataset.current_survey", lambda config: survey)
        open_dataset(config)
    images = f"data: too little memory for {len(data):,} and {len(data):,} images of {size} x {size}: "
    assert str(caught.value).startswith(images)
    assert str(caught.value).endswith("Lower item_size, or give shorter datasets.")


def test_a_dataset_says_how_many_classes_there_are_or_they_must_be_given() -> None:
    with pytest.raises(UserError, match=r"train_data: does not say how many classes .* Set n_classes"):
        survey_of(Squares(9, 0), n_classes=None)


class Random(Squares):
    """Squares that differ each time they are read."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, label = super().__getitem__(index)
        return image + np.random.default_rng().integers(100, size=image.shape, dtype=np.uint8), label


def test_a_survey_notes_that_items_differ_from_one_reading_to_the_next() -> None:
    survey, again = survey_of(Random(90, 0)), survey_of(Random(90, 0))
    (note,) = survey.notes
    assert "train_data: item 0 differs from one reading to the next" in note
    assert survey.fingerprint == again.fingerprint  # without the images


@pytest.mark.parametrize("names", [["a", "b", "c"], list("abcde")], ids=["fewer", "more"])
def test_a_survey_notes_names_that_are_not_used_because_n_classes_is_another_number(names: list[str]) -> None:
    data: Any = Squares(9, 0)
    data.classes = names
    survey = survey_of(data)
    assert survey.class_names == () and survey.n_classes == 4
    assert survey.notes == (
        f"train_data: names {len(names)} classes, but n_classes is 4; their numbers are used as names",
    )


def test_labels_are_known_where_the_dataset_has_them() -> None:
    data: Any = Squares(9, 0)
    with objects.available({"data": (data, data)}):
        config = make_config(data="caller:datasets", n_classes=4, item_size=36)
        dataset = open_dataset(config)
        with pytest.raises(UserError, match="Give it an attribute `targets`"):
            _ = dataset.train.labels
        data.targets = [data[index][1] for index in range(9)]
        assert open_dataset(config).train.labels.tolist() == data.targets
        data.targets[3:5] = 0, -1  # as STL10 has for unlabelled images
        with pytest.raises(UserError, match=r"item 4 has label -1, not one of 0 to 3 \(n_classes: 4\)"):
            _ = dataset.train.labels
