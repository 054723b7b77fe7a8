"""Datasets that are Python objects, in whole runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved
from conftest import ROOT, Program
from forked_programs import forked
from limits import limit
from multilabel_folders import Patches
from own_datasets import N_CLASSES, Shrinking, Squares, make_squares
from PIL import Image
from torch import nn

import lockstep
from lockstep.data import hkl
from lockstep.data.items import check_label, item_of
from lockstep.data.survey import Survey
from lockstep.errors import UserError

pytestmark = pytest.mark.usefixtures("forked_runs")
MEAN = [60.0, 70.0, 80.0, 90.0]
CHECKPOINT = "checkpoints/epoch_0002.safetensors"


def keys(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"batch_size": 8, "print_freq": 2, "cpu_threads": 1, "devices": ["cpu"], "n_epochs": 2}
    return {"n_classes": N_CLASSES, "quiet": True, "weights_dir": str(folder / "runs"), **given, **more}


def train(folder: Path, data: tuple[Any, Any] | None = None, **more: Any) -> lockstep.Run:
    train_data, val_data = data or make_squares()
    return lockstep.train(train_data=train_data, val_data=val_data, **keys(folder, **more))


class Slow(Squares):
    """Squares that take time, so that an epoch is not over before its run is stopped."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(0.02)
        return super().__getitem__(index)


def bits(run: lockstep.Run) -> dict[str, np.ndarray]:
    return saved.load_file(run.folder / CHECKPOINT)


def folder_of(datasets: tuple[Squares, Squares], folder: Path) -> Path:
    """Write a dataset folder with the items of two datasets."""
    for name in ("labels", "misc", "train_hkl", "val_hkl"):
        (folder / name).mkdir(parents=True)
    for split, data in zip(("train", "val"), datasets, strict=True):
        images, labels = zip(*(data[index] for index in range(len(data))), strict=True)
        hkl.write(folder / f"{split}_hkl" / "0000.hkl", np.stack(images))
        np.save(folder / "labels" / f"{split}_labels.npy", labels)
    return folder


def pooled(n_classes: int, n_channels: int = 3) -> nn.Module:
    """A small network for images of any size."""
    layers = [nn.Conv2d(n_channels, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, n_classes))


SLOW = pytest.mark.slow
SIZES = [((36, 36), 3), pytest.param((30, 44), 1, marks=SLOW), pytest.param((36, 27), 4, marks=SLOW)]


@pytest.mark.parametrize(("size", "channels"), SIZES)
def test_a_dataset_trains_to_the_bits_of_a_folder_with_its_items(
    size: tuple[int, int], channels: int, tmp_path: Path
) -> None:
    def squares(seed: int) -> tuple[Squares, Squares]:
        return Squares(90, seed, size, channels), Squares(33, 1, size, channels)

    folder = folder_of(squares(0), tmp_path / "folder")
    more: dict[str, Any] = {"rand_mirror": True, "devices": ["cpu", "cpu"], "scale": 1 / 64}
    more |= {"subtract_mean": MEAN[:channels], "n_channels": channels, "model": pooled}
    more |= {"input_size": [size[0] * 8 // 9, size[1] * 8 // 9]}
    theirs = lockstep.train(folder, **keys(tmp_path, shuffle_block=1, **more))
    ours = train(tmp_path, squares(0), **more)
    saved.assert_same(bits(ours), bits(theirs))
    if channels == 3:
        with pytest.raises(AssertionError):
            saved.assert_same(bits(train(tmp_path, squares(2), **more)), bits(ours))


@pytest.mark.slow
def test_grey_rectangles_are_learned_and_predicted(tmp_path: Path) -> None:
    data = Squares(90, 0, (27, 45), 1), Squares(33, 1, (27, 45), 1)
    more: dict[str, Any] = {"input_size": [24, 40], "model": pooled, "scale": 1 / 64, "n_epochs": 6}
    run = train(tmp_path, data, **more, learning_rate=0.05, rand_mirror=False)
    assert run.best["error_top1"] < 0.5
    model: Any = run.model()
    assert model[0].in_channels == 1
    image, _ = data[1][0]
    Image.fromarray(image[:, :, 0]).resize((300, 200)).save(tmp_path / "image.png")
    assert sum(probability for _, probability in run.predict(tmp_path / "image.png")) == pytest.approx(1)


@pytest.mark.slow
def test_threads_and_loaders_do_not_change_the_bits(tmp_path: Path) -> None:
    expected = bits(train(tmp_path))
    for more in ({"read_threads": 3}, {"para_load": False, "read_threads": 2}):
        saved.assert_same(bits(train(tmp_path, **more)), expected)


@pytest.mark.slow
def test_a_run_that_was_stopped_within_an_epoch_resumes_to_the_same_bits(tmp_path: Path) -> None:
    expected = bits(train(tmp_path))
    slow = Slow(90, 0), Squares(33, 1)
    stopped = train(tmp_path, slow, callback=lambda event: "stop", print_freq=1)
    assert not stopped.complete
    (record,) = (stopped.folder / "checkpoints").glob("epoch_0001*.json")
    assert 0 < json.loads(record.read_text())["position"] < 90
    with pytest.raises(lockstep.UserError, match=r"data: datasets was passed by a Python program"):
        lockstep.resume(stopped.folder, quiet=True)
    with pytest.raises(lockstep.UserError, match="datasets: holds another dataset than the one of the"):
        lockstep.resume(stopped.folder, train_data=Squares(90, 5), val_data=Squares(33, 1), quiet=True)
    data = dict(zip(("train_data", "val_data"), make_squares(), strict=True))
    resumed = lockstep.resume(stopped.folder, **data, quiet=True)
    saved.assert_same(bits(resumed), expected)


def test_a_run_of_objects_resumes_on_a_dataset_folder_that_is_named(tmp_path: Path) -> None:
    run = train(tmp_path)
    folder = folder_of((Squares(90, 0), Squares(20, 5)), tmp_path / "folder")
    resumed = lockstep.resume(run, n_epochs=3, data_folder=folder, subtract_mean=MEAN[:3], quiet=True)
    assert resumed.history[-1]["n_images"] == 20


@pytest.mark.slow
def test_a_dataset_by_name_trains_validates_and_predicts(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = str(ROOT / "tests" / "support")
    monkeypatch.setenv("PYTHONPATH", support)
    running = program.run("data=own_datasets:make_squares", "n_classes=4", "n_epochs=2", "cpu_threads=1")
    run = train(tmp_path, devices=["cpu", "cpu"], shuffle_block=4)
    saved.assert_same(bits(run), bits(lockstep.Run(running.run_folder)))
    done = subprocess.run(
        forked([sys.executable, "validate.py", str(running.run_folder)]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert "33 images" in done.stdout, done.stdout + done.stderr
    image, label = make_squares()[1][0]
    Image.fromarray(image).save(tmp_path / "image.png")
    (answer, _), *_ = lockstep.Run(running.run_folder).predict(tmp_path / "image.png")
    assert answer == str(label)


class Other(Squares):
    """Squares of which one item is something else."""

    def __init__(self, index: int, item: Any) -> None:
        super().__init__(90, 0)
        self.index, self.item = index, item

    def __getitem__(self, index: int) -> Any:
        if index != self.index:
            return super().__getitem__(index)
        if isinstance(self.item, Exception):
            raise self.item
        return self.item


@pytest.mark.parametrize(
    ("index", "item", "message"),
    [
        pytest.param(57, OSError("bad"), "item 57 can't be read: OSError: bad", marks=SLOW),
        (58, (np.zeros((36, 36, 3), np.uint8), 4), "item 58 has label 4, not one of 0 to 3"),
    ],
)
def test_an_item_that_cannot_be_used_is_named(index: int, item: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match=f"loader 0: val_data: {message}"):
        train(tmp_path, (Squares(90, 0), Other(index, item)))


@pytest.mark.slow
def test_a_dataset_that_shrinks_is_named(tmp_path: Path) -> None:
    length = tmp_path / "length"
    length.write_text("90")

    def shrink(event: object) -> None:
        whole = tmp_path / "new"
        whole.write_text("20")
        whole.replace(length)  # a reader finds either length

    with pytest.raises(lockstep.UserError, match="had 90 items at the start and has 20 now"):
        train(tmp_path, (Shrinking(length), Squares(33, 1)), callback=shrink, n_epochs=500, print_freq=1)


class Crashing(Squares):
    def __getitem__(self, index: int) -> Any:
        os.abort()


class Orphaning(Squares):
    """A dataset that kills the launcher of its run."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getppid(), signal.SIGKILL)


class Endless:
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (Endless(), lockstep.UserError, "train_data: has no length: TypeError"),
        pytest.param(
            Crashing(9, 0),
            lockstep.RunFailed,
            "the survey of the datasets .pid .* was killed by SIGABRT",
            marks=SLOW,
        ),
        ((item for item in ()), lockstep.UserError, "data: .* can't be pickled .* 'generator'"),
    ],
)
def test_what_is_no_dataset_is_named(data: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        train(tmp_path, (data, Squares(33, 1)))
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.slow
@pytest.mark.new_interpreter
def test_a_killed_launcher_is_named(tmp_path: Path) -> None:
    with pytest.raises(lockstep.RunFailed, match="the run's launcher was killed by SIGKILL"):
        train(tmp_path, (Orphaning(9, 0), Squares(33, 1)))


class Sizes(Squares):
    """Images of Pillow of several sizes and modes."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image, label = super().__getitem__(index)
        resized = Image.fromarray(image).resize((40 + index % 7, 30 + index % 11))
        return resized.convert(("RGB", "L", "P", "RGBA", "CMYK")[index % 5]), label


@pytest.mark.slow
def test_images_of_several_sizes_are_resized_with_a_margin(tmp_path: Path) -> None:
    run = train(tmp_path, (Sizes(90, 0), Sizes(33, 1)))
    assert "item_size:\n- 36\n- 36\n" in (run.folder / "config.yaml").read_text()
    assert run.best["error_top1"] < 0.5
    assert np.load(run.folder / "dataset_mean.npy").shape == (36, 36, 3)


def survey_of(train_data: Any, val_data: Any, **values: Any) -> Survey:
    """Return the survey that a run would make."""
    from conftest import make_config

    from lockstep import objects
    from lockstep.data.survey import make_survey

    config = make_config(data="caller:datasets", **values)
    with objects.available({"data": (train_data, val_data)}):
        return make_survey(config, lambda n_channels, n_classes: (32, 32))


def test_datasets_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["one", "two", "three", "four"]
    features = datasets.Features(
        {"id": datasets.Value("int64"), "image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    )

    def make(n_items: int, seed: int) -> Any:
        items = [Squares(n_items, seed)[index] for index in range(n_items)]
        columns = {
            "id": list(range(n_items)),
            "image": [Image.fromarray(image) for image, _ in items],
            "label": [label for _, label in items],
        }
        return datasets.Dataset.from_dict(columns, features=features)

    given = make(90, 0), make(33, 1)
    survey = survey_of(*given, n_classes=None)
    assert survey.class_names == tuple(names)
    run = train(tmp_path, given, subtract_mean=MEAN[:3], n_classes=None)
    saved.assert_same(bits(run), bits(train(tmp_path, subtract_mean=MEAN[:3])))
    assert json.loads((run.folder / "dataset.json").read_text())["class_names"] == names


def test_datasets_of_torchvision(torchvision: Any, tmp_path: Path) -> None:
    for split, data in zip(("train", "val"), make_squares(), strict=True):
        for index in range(len(data)):
            image, label = data[index]
            (tmp_path / split / f"class {label}").mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(tmp_path / split / f"class {label}" / f"{index}.png")
    given = tuple(torchvision.datasets.ImageFolder(tmp_path / split) for split in ("train", "val"))
    assert survey_of(*given, n_classes=None).class_names == tuple(f"class {label}" for label in range(4))
    run = train(tmp_path, given, n_classes=None, devices=["cpu", "cpu"])
    assert run.best["error_top1"] < 0.5


@pytest.mark.slow
def test_labels_may_be_vectors(tmp_path: Path) -> None:
    """Labels are lists or arrays, with several classes per image; the bits are the same."""
    several = {"task": "multilabel", "n_classes": None}
    pair = Patches(50, 0), Patches(20, 1)
    run = train(tmp_path / "arrays", pair, class_weights="balanced", **several)
    assert run.best["means"].keys() >= {"mean_average_precision", "micro_f1"}
    lists = Patches(50, 0, as_lists=True), Patches(20, 1, as_lists=True)
    again = train(tmp_path / "lists", lists, class_weights="balanced", **several)
    assert all(np.array_equal(value, bits(run)[name]) for name, value in bits(again).items())
    Image.fromarray(np.asarray(pair[0][0][0])).save(tmp_path / "one.png")
    everything = run.predict(tmp_path / "one.png", threshold=0.0)
    assert len(everything) == 4 and run.predict(tmp_path / "one.png", threshold=1.0) == []


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ([0, 2, 0, 0], "With task: multilabel it must be 0 or 1 for each class."),
        ([0, 1], "has a label of 2 numbers, not of one for each of 4 classes"),
        (3, "With task: multilabel it must be 0 or 1 for each class."),
    ],
)
def test_wrong_vectors_are_named(label: Any, message: str) -> None:
    image = np.zeros((36, 36, 3), np.uint8)
    with pytest.raises(UserError, match=message):
        check_label(item_of([(image, label)], 0, "train_data", multilabel=True)[1], 4, "train_data: item 0")
    with pytest.raises(UserError, match="which is no whole number"):
        item_of([(image, [0, 1])], 0, "train_data")


IMPORTING = """
import sys
from lockstep.config import Config
from lockstep.launch.checks import run_survey

class Board:
    def say(self, text):
        sys.exit(f"{text}, torch imported: {'torch' in sys.modules}")

run_survey(None, Board(), Config(data="nowhere:datasets"))
"""


@pytest.mark.slow
def test_the_survey_imports_torch_before_its_first_line() -> None:
    """Until then the launcher grants time for imports."""
    done = subprocess.run([sys.executable, "-c", IMPORTING], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "loading the datasets, torch imported: True\n"
