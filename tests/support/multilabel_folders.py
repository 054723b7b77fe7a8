"""Images that have any number of classes: folders with a table of labels, and datasets."""

from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.data import hkl

NAMES = ("blue", "green", "red", "spotted")
_CHANNELS = {"red": 0, "green": 1, "blue": 2}


def draw(classes: tuple[int, ...], random: np.random.Generator, size: int = 24) -> np.ndarray:
    """Return an image that shows its classes: bright colors, and black spots."""
    image = random.integers(0, 60, (size, size, 3))
    for number in classes:
        if NAMES[number] in _CHANNELS:
            image[:, :, _CHANNELS[NAMES[number]]] += 150
        else:
            image[::4, ::4] = 0
            image[1::4, ::4] = 0
    return np.clip(image, 0, 255).astype(np.uint8)


def labels_of(n_images: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Return the classes of images; some have none."""
    random = np.random.default_rng(seed)
    table = random.random((n_images, len(NAMES))) < (0.5, 0.4, 0.3, 0.5)
    return [tuple(np.flatnonzero(row).tolist()) for row in table]


def write_multilabel(folder: Path, n_images: int = 120, columns: bool = False) -> Path:
    """Write PNG files and labels.csv, with names or with a column for each class. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    lines = [",".join(("path", *NAMES)) if columns else "path,label"]
    for number, classes in enumerate(labels_of(n_images)):
        Image.fromarray(draw(classes, random)).save(folder / f"{number:03d}.png")
        bits = [str(int(each in classes)) for each in range(len(NAMES))]
        names = ";".join(NAMES[each] for each in classes)
        lines.append(",".join((f"{number:03d}.png", *(bits if columns else [names]))))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


def make_multilabel_set(folder: Path, n_train: int = 37, n_val: int = 13, size: int = 36) -> Path:
    """Write a dataset folder of images with several classes, without a manifest. Return the folder."""
    random = np.random.default_rng(2)
    for split, n_images in (("train", n_train), ("val", n_val)):
        (folder / f"{split}_hkl").mkdir(parents=True)
        labels = labels_of(n_images, seed=n_images)
        images = np.stack([draw(each, random, size) for each in labels])
        hkl.write(folder / f"{split}_hkl" / "0000.hkl", images)
        table = np.zeros((n_images, len(NAMES)), np.uint8)
        for row, each in enumerate(labels):
            table[row, list(each)] = 1
        (folder / "labels").mkdir(exist_ok=True)
        np.save(folder / "labels" / f"{split}_labels.npy", table)
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", np.full((size, size, 3), 80.0))
    return folder


class Patches:
    """Images with several classes as a dataset object; `as_lists`: labels are lists and not arrays."""

    def __init__(self, n_items: int, seed: int, as_lists: bool = False) -> None:
        self.seed, self.as_lists = seed, as_lists
        self.targets = np.zeros((n_items, len(NAMES)), np.int64)
        for row, classes in enumerate(labels_of(n_items, seed)):
            self.targets[row, list(classes)] = 1

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, object]:
        label = self.targets[index]
        image = draw(tuple(np.flatnonzero(label).tolist()), np.random.default_rng([self.seed, index]), 36)
        return image, label.tolist() if self.as_lists else label


def make_patches() -> tuple[Patches, Patches]:
    """Return a training and a validation dataset, for `data: multilabel_folders:make_patches`."""
    return Patches(50, 0), Patches(20, 1)
