"""A small ImageNet as it is distributed: folders, tars within a tar, devkit, lists, irregular files.

Each image has one color: red encodes its class, green its number.
"""

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

WNIDS = ["n01440764", "n01443537", "n01484850", "n01491361", "n01494475"]
ABOVE = "n00001740"  # a synset above the classes, which meta.mat lists too
ILSVRC_IDS = [4, 1, 5, 2, 3]  # of WNIDS, in another order than the sorted wnids
WORDS = ["tench, Tinca tinca", "goldfish", "great white shark", "tiger shark", "hammerhead"]
N_TRAIN, N_VAL = 9, 20  # images of each training class; validation images


@dataclass(frozen=True)
class ImageNet:
    """The unpacked folders, the original tar files, Caffe's lists for the folders, validation labels."""

    folders: Path
    tars: Path
    lists: Path
    val_labels: list[int]


def build(root: Path) -> ImageNet:
    made = ImageNet(root / "folders", root / "tars", root / "lists", [(7 * n) % 5 for n in range(N_VAL)])
    _write_pictures(made)
    _write_devkit(made.folders / "ILSVRC2012_devkit_t12" / "data", made.val_labels)
    _write_tars(made)
    made.lists.mkdir()
    train = [
        f"{path.parent.name}/{path.name} {WNIDS.index(path.parent.name)}\n"
        for path in sorted(made.folders.glob("train/*/*"))
    ]
    val = [
        f"{path.name} {label}\n"
        for path, label in zip(sorted(made.folders.glob("val/*")), made.val_labels, strict=True)
    ]
    (made.lists / "train.txt").write_text("".join(train))
    (made.lists / "val.txt").write_text("".join(val))
    return made


def colour(label: int, number: int) -> tuple[int, int, int]:
    return (50 * label, 5 * number, 128)


def label_of(image: np.ndarray) -> int:
    """Return the class that the color of an image encodes; `image` is uint8 (row, column, 3)."""
    return round(float(image[..., 0].mean()) / 50)


def jpeg(label: int, number: int, size: tuple[int, int] = (50, 37)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour(label, number)).save(file, "JPEG", quality=95)
    return file.getvalue()


def _write_pictures(made: ImageNet) -> None:
    for label, wnid in enumerate(WNIDS):
        folder = made.folders / "train" / wnid
        folder.mkdir(parents=True)
        for number in range(N_TRAIN):
            (folder / f"{wnid}_{number}.JPEG").write_bytes(jpeg(label, number))
    (made.folders / "val").mkdir()
    for number, label in enumerate(made.val_labels):
        (made.folders / "val" / f"ILSVRC2012_val_{number + 1:08d}.JPEG").write_bytes(jpeg(label, number))
    # Irregular files of ImageNet: a PNG named JPEG, and CMYK.
    png = made.folders / "train" / WNIDS[1] / f"{WNIDS[1]}_0.JPEG"
    Image.new("RGB", (40, 30), colour(1, 0)).save(png, "PNG")
    cmyk = Image.new("RGB", (40, 30), colour(2, 0)).convert("CMYK")
    cmyk.save(made.folders / "train" / WNIDS[2] / f"{WNIDS[2]}_0.JPEG", "JPEG", quality=95)


def _write_devkit(folder: Path, val_labels: list[int]) -> None:
    folder.mkdir(parents=True)
    dtype = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O")]
    rows = [(i, wnid, words, "") for i, wnid, words in zip(ILSVRC_IDS, WNIDS, WORDS, strict=True)]
    rows = [*sorted(rows), (6, ABOVE, "entity", "")]
    synsets = np.array([tuple(np.array(value) for value in row) for row in rows], dtype).reshape(-1, 1)
    scipy.io.savemat(folder / "meta.mat", {"synsets": synsets})
    truth = "".join(f"{ILSVRC_IDS[label]}\n" for label in val_labels)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text(truth)


def _write_tars(made: ImageNet) -> None:
    made.tars.mkdir()
    with tarfile.open(made.tars / "ILSVRC2012_img_train.tar", "w") as outer:
        for wnid in reversed(WNIDS):
            content = tar_of(sorted((made.folders / "train" / wnid).iterdir(), reverse=True))
            member = tarfile.TarInfo(f"{wnid}.tar")
            member.size = len(content)
            outer.addfile(member, io.BytesIO(content))
    val = tar_of(list((made.folders / "val").iterdir()))
    (made.tars / "ILSVRC2012_img_val.tar").write_bytes(val)
    with tarfile.open(made.tars / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as kit:
        kit.add(made.folders / "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12")


def tar_of(paths: list[Path]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in paths:
            archive.add(path, path.name)
    return file.getvalue()
