"""From pictures to a dataset folder, with the scripts as a user runs them."""

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import hickle
import numpy as np
import pytest
from conftest import ROOT, make_config
from limits import limit
from PIL import Image

from lockstep.data.dataset import open_dataset
from preprocessing import make_hkl


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "preprocessing" / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(100))


def run_on_a_terminal(name: str, *words: object) -> str:
    """What it prints, bars included. The last bar must say how fast it was and that nothing is left to do."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "preprocessing" / name), *map(str, words)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100"})
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # all that could write are gone
            break
    os.close(ours)
    assert process.wait(limit(60)) == 0, output
    text = output.decode()
    assert re.search(r"100%\|.*\| 39/39 \[\d\d:\d\d<00:00, +[\d.]+image/s\]", text), text
    return text


def make(*words: object) -> int:
    """make_hkl.py in this process."""
    return make_hkl.main([*map(str, words), "--workers", "1"])


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Pictures of one colour each, so that labels and images can be told to belong together."""
    source = tmp_path / "pictures"
    for split, n_pictures in (("train", 9), ("val", 4)):
        for number, name in enumerate(["cat", "ant", "bee"]):
            folder = source / split / name
            folder.mkdir(parents=True)
            for copy in range(n_pictures):
                ending = ("JPEG", "jpg", "png", "webp")[copy % 4]
                Image.new("RGB", (30 + copy, 20), (80 * number, 255 - 80 * number, 7)).save(
                    folder / f"{copy}.{ending}"
                )
    return source


def test_labels_belong_to_their_images(pictures: Path, tmp_path: Path) -> None:
    assert "27 training and 12 validation images of 3 classes" in run_on_a_terminal(
        "make_hkl.py", pictures, tmp_path / "set", "--size", "10", "--batch", "8", "--workers", "2"
    )
    dataset = open_dataset(make_config(data_folder=str(tmp_path / "set"), n_classes=None))
    assert (dataset.n_classes, len(dataset.train), len(dataset.val)) == (3, 27, 12)
    assert dataset.train.file_rows == (8, 8, 8, 3)  # the last partial file is kept
    red_of_class = [80, 160, 0]  # ant, bee, cat: sorted names
    totals = np.zeros((10, 10, 3))
    for split in (dataset.train, dataset.val):
        images = np.concatenate([hickle.load(file.path) for file in split.files])
        for image, label in zip(images, split.labels, strict=True):
            assert np.abs(image[..., 0].astype(int) - red_of_class[label]).max() <= 3
        if split is dataset.train:
            totals = images.mean(0)
    assert np.allclose(dataset.mean, totals, atol=1e-3)
    assert sorted(dataset.train.labels) == [0] * 9 + [1] * 9 + [2] * 9
    assert list(dataset.train.labels) != sorted(dataset.train.labels)  # shuffled


def test_every_image_is_named_with_label_and_checksum(pictures: Path, tmp_path: Path) -> None:
    make(pictures, tmp_path / "set", "--size", 10, "--batch", 8)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert manifest["classes"] == ["ant", "bee", "cat"]
    for split in ("train", "val"):
        labels = np.load(tmp_path / "set" / "labels" / f"{split}_labels.npy").tolist()
        lines = (tmp_path / "set" / manifest["images"][split]).read_text().splitlines()
        names = [line.split()[0] for line in lines]
        assert [int(line.split()[1]) for line in lines] == labels
        assert sorted(names) == sorted(f"{p.parent.name}/{p.name}" for p in pictures.glob(f"{split}/*/*"))
        assert [manifest["classes"][label] for label in labels] == [Path(name).parent.name for name in names]
        assert sum(entry["n_images"] for entry in manifest[split]) == len(labels)
        for entry in manifest[split]:
            content = (tmp_path / "set" / entry["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == entry["sha256"]
            assert len(content) == entry["n_bytes"]


def test_making_it_twice_gives_the_same_bytes(pictures: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert make(pictures, tmp_path / name, "--size", 10) == 0
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) == 9
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.slow
def test_a_bad_picture_is_named_and_no_dataset_folder_appears(pictures: Path, tmp_path: Path) -> None:
    (pictures / "train" / "bee" / "1.jpg").write_bytes(b"not a picture")
    done = script("make_hkl.py", pictures, tmp_path / "set", "--size", 10, "--workers", 1)
    assert done.returncode == 2
    assert "train/bee/1.jpg: can't be used: " in done.stderr.splitlines()[-1]
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda source: (source / "val" / "dog").mkdir(),
            "val/dog: the training pictures have no such class",
        ),
        (lambda source: (source / "val").rename(source / "valid"), "val: there is no such folder"),
        (lambda source: [p.unlink() for p in source.glob("val/*/*")], "val: holds no pictures"),
    ],
)
def test_folders_that_do_not_fit_are_named(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, message: str
) -> None:
    change(pictures)
    assert make(pictures, tmp_path / "set") == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_an_existing_folder_is_left_alone(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    assert make(pictures, tmp_path / "set") == 2 and "is there already" in capsys.readouterr().err
    assert list((tmp_path / "set").iterdir()) == []


def test_the_digits_are_jpeg_files_in_imagenets_layout(tmp_path: Path) -> None:
    assert script("make_digits.py", tmp_path).returncode == 0
    assert len(list(tmp_path.glob("train/*/*.JPEG"))) == 1437
    val = sorted(tmp_path.glob("val/*/*.JPEG"))
    assert len(val) == 360 and len({path.parent for path in val}) == 10
    with Image.open(val[0]) as picture:
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (64, 64))
