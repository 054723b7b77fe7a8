"""preprocessing/make_fashion_mnist.py, on files laid out as those of the real dataset."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from limits import limit
from PIL import Image


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return head + array.astype(np.uint8).tobytes()


def packed(content: bytes) -> bytes:
    """Without the time in gzip's header: names of cases hold these bytes, and must be the same everywhere."""
    return gzip.compress(content, mtime=0)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Six training images, packed, and two others, not packed; each of its number's grey."""
    folder = tmp_path / "files"
    folder.mkdir()
    for name, labels in (("train", [9, 0, 0, 3, 3, 3]), ("t10k", [1, 9])):
        images = np.full((len(labels), 28, 28), np.arange(len(labels))[:, None, None] * 20)
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array(labels))):
            path = folder / f"{name}-{kind}-ubyte"
            if name == "train":
                path.with_name(f"{path.name}.gz").write_bytes(packed(idx(array)))
            else:
                path.write_bytes(idx(array))
    return folder


def run(files: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preprocessing.make_fashion_mnist", str(files), str(folder), *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))


def test_pictures_go_to_the_folders_of_their_classes(files: Path, tmp_path: Path) -> None:
    done = run(files, tmp_path / "png")
    assert done.returncode == 0 and "6 images in" in done.stdout, done.stderr
    found = {str(path.relative_to(tmp_path / "png")) for path in (tmp_path / "png").rglob("*.png")}
    assert len(found) == 8 and "train/9_ankle_boot/train_00000.png" in found
    picture = Image.open(tmp_path / "png" / "train" / "3_dress" / "train_00004.png")
    assert picture.size == (28, 28) and picture.getpixel((5, 5)) == (80, 80, 80)
    assert {"val/1_trouser/t10k_00000.png", "val/9_ankle_boot/t10k_00001.png"} <= found


def test_a_border_is_black(files: Path, tmp_path: Path) -> None:
    assert run(files, tmp_path / "png", "--border", "2").returncode == 0
    image = np.asarray(Image.open(tmp_path / "png" / "train" / "3_dress" / "train_00004.png"))
    assert image.shape == (32, 32, 3) and (image[2:-2, 2:-2] == 80).all() and image.sum() == 80 * 28**2 * 3
    refused = run(files, tmp_path / "other", "--border", "-1")
    assert refused.returncode == 2 and "--border: must be at least 0, not -1" in refused.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t10k-labels-idx1-ubyte", None, "t10k-labels-idx1-ubyte: can't be read, with .gz or without"),
        ("t10k-images-idx3-ubyte", b"\0\0\x08\x03\0", "is not a whole idx file of 3 dimensions"),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(3)), "the labels of t10k are not those of its 2 images"),
        ("train-images-idx3-ubyte.gz", packed(idx(np.zeros((9, 9))))[:-9], "can't be read"),
    ],
)
def test_broken_files_are_named(
    files: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (files / name).unlink()
    else:
        (files / name).write_bytes(content)
    done = run(files, tmp_path / "png")
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
