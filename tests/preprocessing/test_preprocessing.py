"""The scripts that make a dataset folder of images, as a user runs them."""

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
from preprocessing.layouts import in_validation


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "preprocessing" / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(100))


def run_on_a_terminal(name: str, *words: object) -> str:
    """Return all output, bars included. The last bar says how fast it was and that nothing is left."""
    ours, theirs = pty.openpty()
    command = [sys.executable, str(ROOT / "preprocessing" / name), *map(str, words)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100"})
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # everything that could write is gone
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
    """Images of one colour each, so that labels and images can be told to belong together."""
    source = tmp_path / "images"
    for split, n_pictures in (("train", 9), ("val", 4)):
        for number, name in enumerate(["cat", "ant", "bee"]):
            folder = source / split / name
            folder.mkdir(parents=True)
            for copy in range(n_pictures):
                exit_status = ("JPEG", "jpg", "png", "webp")[copy % 4]
                Image.new("RGB", (30 + copy, 20), (80 * number, 255 - 80 * number, 7)).save(
                    folder / f"{copy}.{exit_status}"
                )
    return source


@pytest.mark.slow
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


def names_in(dataset: Path, split: str) -> list[str]:
    """The sources of a half's images, by name."""
    lines = (dataset / "misc" / ("train_order.txt" if split == "train" else "val.txt")).read_text()
    return sorted(line.rpartition(" ")[0] for line in lines.splitlines())


def test_all_formats_suffixes_and_sub_folders_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """606 files once became 364 images, and not a word was said."""
    source = tmp_path / "images"
    names = ["1.gif", "2.BMP", "3.tiff", "4.TIF", "5.PNG", "6", "7.dat", "deep/er/8.JPeG", "deep/9.tga"]
    kinds = ["GIF", "BMP", "TIFF", "TIFF", "PNG", "WEBP", "JPEG", "JPEG", "TGA"]
    for split in ("train", "val"):
        for name, kind in zip(names, kinds, strict=True):
            path = source / split / "ant" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (9, 99, 200)).save(path, kind)
    (source / "train" / "ant" / "deep" / "circle").symlink_to(source / "train")
    assert make(source, tmp_path / "set", "--size", 10) == 0, capsys.readouterr().err
    for split in ("train", "val"):
        assert names_in(tmp_path / "set", split) == sorted(f"ant/{name}" for name in names)
    dataset = open_dataset(make_config(data_folder=str(tmp_path / "set"), n_classes=None))
    images = np.concatenate([hickle.load(file.path) for file in dataset.train.files])
    assert np.abs(images.astype(int) - (9, 99, 200)).max() <= 8
    listed = (tmp_path / "set" / "misc" / "left_out.txt").read_text()
    assert listed.splitlines()[1:] == [f"{source}/train/ant/deep/circle\ta link to a folder that it lies in"]


def test_what_is_left_out_is_counted_by_reason_and_listed(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = pictures / "train"
    for number in range(4):
        (train / "ant" / f"note{number}.txt").write_text("P4 is no image here")
    (train / "bee" / ".DS_Store").write_bytes(b"\0")
    Image.new("RGB", (9, 9)).save(train / "loose.png")
    os.mkfifo(train / "bee" / "pipe")
    assert make(pictures, tmp_path / "set", "--size", 10) == 0
    said = capsys.readouterr().out
    notes = ", ".join(f"{train}/ant/note{number}.txt" for number in range(3))
    assert f"left out 4, no image that Pillow reads: {notes} ...\n" in said
    assert f"left out 1, hidden: {train}/bee/.DS_Store\n" in said
    assert f"left out 1, can't be read: it is not a regular file: {train}/bee/pipe\n" in said
    assert f"left out 1, an image outside of the class folders: {train}/loose.png\n" in said
    assert f"7 files that were left out are listed in {tmp_path}/set/misc/left_out.txt" in said
    listed = (tmp_path / "set" / "misc" / "left_out.txt").read_text().splitlines()
    assert len(listed) == 8 and f"{train}/ant/note3.txt\tno image that Pillow reads" in listed
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert "misc/left_out.txt" in manifest["others"]


def test_hidden_folders_are_no_classes(pictures: Path, tmp_path: Path) -> None:
    """.ipynb_checkpoints came before all others, so that every label was one too large."""
    for split in ("train", "val"):
        for name in (".ipynb_checkpoints", "__MACOSX"):
            (pictures / split / name).mkdir()
            Image.new("RGB", (9, 9)).save(pictures / split / name / "1.png")
    assert make(pictures, tmp_path / "set", "--size", 10) == 0
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert manifest["classes"] == ["ant", "bee", "cat"]
    assert (tmp_path / "set" / "misc" / "left_out.txt").read_text().count(".ipynb_checkpoints\thidden") == 2


def test_images_are_turned_as_the_camera_noted(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    picture = Image.new("RGB", (20, 20), "white")
    picture.paste("black", (0, 0, 20, 10))
    for split in ("train", "val"):
        (tmp_path / "images" / split / "ant").mkdir(parents=True)
        picture.save(tmp_path / "images" / split / "ant" / "1.png", exif=exif)
    for name, words, above in (("turned", (), 255), ("stored", ("--orientation", "ignore"), 0)):
        assert make(tmp_path / "images", tmp_path / name, "--size", 20, *words) == 0
        dataset = open_dataset(make_config(data_folder=str(tmp_path / name), n_classes=None))
        assert dataset.manifest and dataset.manifest.orientation == ("ignore" if words else "apply")
        assert hickle.load(dataset.train.files[0].path)[0, 2, 2].tolist() == [above] * 3


@pytest.mark.slow
def test_a_bad_picture_is_named_and_no_dataset_folder_appears(pictures: Path, tmp_path: Path) -> None:
    (pictures / "train" / "bee" / "1.jpg").write_bytes(b"not an image")
    words = ("--size", 10, "--workers", 1, "--on-error", "stop")
    done = script("make_hkl.py", pictures, tmp_path / "set", *words)
    assert done.returncode == 2
    assert "train/bee/1.jpg: can't be used: " in done.stderr.splitlines()[-1]
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda source: (source / "val" / "dog").mkdir(),
            "val/dog: the training images have no such class",
        ),
        (lambda source: (source / "train").rename(source / "test"), "has no train/. Understood are: "),
        (lambda source: [p.unlink() for p in source.glob("val/*/*")], "val: holds no images"),
    ],
)
def test_folders_that_do_not_fit_are_named(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change, message: str
) -> None:
    change(pictures)
    assert make(pictures, tmp_path / "set") == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_class_folders_alone_are_split(pictures: Path, tmp_path: Path) -> None:
    assert make(pictures / "train", tmp_path / "set", "--size", 10, "--val-split", 0.3) == 0
    train, val = (names_in(tmp_path / "set", split) for split in ("train", "val"))
    assert len(train) + len(val) == 27 and len(set(train + val)) == 27
    assert val == [name for name in sorted(train + val) if in_validation(name, 0.3)]


def test_a_share_for_split_is_told_what_to_do(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(pictures, tmp_path / "set", "--split", 0.2) == 2
    said = capsys.readouterr().err
    assert "--split: 0.2 is not 1, 2 or 4" in said and "--val-split is the share" in said


def test_a_size_that_needs_too_much_memory_is_refused_in_one_line(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(pictures, tmp_path / "set", "--size", 100_000) == 2
    assert capsys.readouterr().err == "make_hkl: --size: 100,000 is more than 10,000. Give a smaller size.\n"

    def without_memory(*arguments: object) -> None:
        raise MemoryError("Unable to allocate 2 GiB")

    monkeypatch.setattr(make_hkl, "build", without_memory)
    assert make(pictures, tmp_path / "set") == 2
    said = "make_hkl: not enough memory: Unable to allocate 2 GiB. Lower --size, --batch or --workers.\n"
    assert capsys.readouterr().err == said


def test_an_existing_folder_is_left_alone(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set").mkdir()
    assert make(pictures, tmp_path / "set") == 2 and "exists already" in capsys.readouterr().err
    assert list((tmp_path / "set").iterdir()) == []


@pytest.mark.slow
def test_the_digits_are_jpeg_files_in_imagenets_layout(tmp_path: Path) -> None:
    assert script("make_digits.py", tmp_path).returncode == 0
    assert len(list(tmp_path.glob("train/*/*.JPEG"))) == 1437
    val = sorted(tmp_path.glob("val/*/*.JPEG"))
    assert len(val) == 360 and len({path.parent for path in val}) == 10
    with Image.open(val[0]) as picture:
        assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (64, 64))
