"""The files of a dataset folder beside its batches: labels, lists of names, mean image, manifest."""

import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.manifest import MANIFEST_VERSION, NAME, digest_of_labels
from lockstep.errors import UserError
from lockstep.files import checksum, write_array, write_bytes, write_text
from lockstep.text import one_line
from preprocessing.caffe_lists import Line, write_list
from preprocessing.journal import Journal
from preprocessing.listing import LEFT_OUT_LIST, Label, LeftOut, Listing, classes_of
from preprocessing.tasks import Record, Target, Task

BAD_LIST = "misc/bad_pictures.txt"
IMAGE_LISTS = {"train": "misc/train_order.txt", "val": "misc/val.txt"}  # names in the order of the files
_PACKAGES = ("h5py", "numpy", "pillow", "simplejpeg", "torch")


@dataclass(frozen=True)
class Outcome:
    """The numbers of images and of unusable images."""

    n_train: int
    n_val: int
    n_bad: int


def write_rest(
    target: Target,
    tasks: list[Task],
    journal: Journal,
    classes: tuple[list[str], list[str]],
    facts: dict[str, Any],
) -> Outcome:
    """Write these files into target.folder, whose batches are complete.

    Args:
        target: The folder and its layout.
        tasks: All tasks of the dataset.
        journal: The results of the tasks.
        classes: The classes, and a readable name for each.
        facts: Further entries of the manifest.
    """
    halves: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
    lines: dict[str, list[Line]] = {"train": [], "val": []}
    for task in tasks:
        record = journal.records[task.key]
        kept = _written_lines(task, record)
        lines[task.split] += kept
        labels = np.array_split(
            _label_array([label for _, label in kept], len(classes[0]), facts), target.parts
        )
        for entry, part in zip(
            record.files, labels, strict=False
        ):  # a task has no files if all its images were bad
            halves[task.split].append({**entry, "labels_sha256": digest_of_labels(part)})
    for split, entries in halves.items():
        if not entries:
            raise UserError(f"no {split} image could be used; {target.folder} has what there is")
        table = _label_array([label for _, label in lines[split]], len(classes[0]), facts)
        _write_names_and_labels(target, split, lines[split], table)
    mean = _write_mean(target, journal)
    n_bad = _write_bad(target.folder, tasks, journal)
    others = sorted(path for folder in ("labels", "misc") for path in (target.folder / folder).iterdir())
    manifest = {
        "version": MANIFEST_VERSION,
        **facts,
        "made_with": _versions(),
        "classes": classes[0],
        "class_names": classes[1],
        **mean,
        "images": IMAGE_LISTS,
        "others": {str(path.relative_to(target.folder)): checksum(path) for path in others},
        **halves,
    }
    write_text(target.folder / NAME, json.dumps(manifest, indent=0))
    return Outcome(len(lines["train"]), len(lines["val"]), n_bad)


def _written_lines(task: Task, record: Record) -> list[Line]:
    """Return (name, label) of the images in a task's files, in their order."""
    bad = {item.row: item for item in record.bad}
    return [
        (bad[row].instead or name if row in bad else name, label)
        for row, (name, label) in enumerate(zip(task.source.names, task.source.labels, strict=True))
        if row not in bad or bad[row].instead
    ]


def task_fact(listing: Listing) -> dict[str, str]:
    """Return the manifest's entry about the task; sets of one class for each image have none."""
    return {} if listing.task == "classify" else {"task": listing.task}


def _label_array(labels: list[Label], n_classes: int, facts: dict[str, Any]) -> np.ndarray:
    """Return the class of each image, int64 (n,); or 0 or 1 for each of its classes, uint8 (n, class)."""
    if facts.get("task") != "multilabel":
        return np.array(labels, np.int64)
    table = np.zeros((len(labels), n_classes), np.uint8)
    for row, label in enumerate(labels):
        table[row, list(classes_of(label))] = 1
    return table


def _write_names_and_labels(target: Target, split: str, lines: list[Line], labels: np.ndarray) -> None:
    """Write the labels, the sorted lists, and the names in the order of the files."""
    write_labels(target.folder / "labels", split, labels, target.parts, target.batch)
    misc = target.folder / "misc"
    if split == "val":  # not shuffled
        write_list(target.folder / IMAGE_LISTS[split], lines)
        return
    write_list(misc / "train.txt", sorted(lines, key=lambda line: (line[1], line[0])))
    write_list(target.folder / IMAGE_LISTS[split], lines)
    if target.layout == "c01b":
        names = [name.encode("utf-8", "surrogateescape") for name, _ in lines]
        write_array(misc / "shuffled_train_filenames.npy", np.array(names))


def write_labels(folder: Path, split: str, labels: np.ndarray, n_parts: int, batch: int) -> None:
    """Write <split>_labels.npy, and the labels of theano_alexnet's halves or quarters if needed."""
    write_array(folder / f"{split}_labels.npy", labels)
    if n_parts > 1:
        parts = theano_alexnet.split_labels(labels, n_parts, batch // n_parts)
        for suffix, part in zip(theano_alexnet.SUFFIXES[n_parts], parts, strict=True):
            write_array(folder / f"{split}_labels{suffix}.npy", part)


def _write_mean(target: Target, journal: Journal) -> dict[str, Any]:
    """Save the mean image in the folder's layout, and return its entries of the manifest."""
    mean = journal.sums.mean()
    old = target.layout == "c01b"
    write_array(
        target.folder / "misc" / "img_mean.npy", mean.transpose(2, 0, 1) if old else mean.astype(np.float32)
    )
    return {
        "channel_mean": journal.sums.channel_mean().tolist(),
        "channel_std": journal.sums.channel_std().tolist(),
    }


def _write_bad(folder: Path, tasks: list[Task], journal: Journal) -> int:
    """Write the list of unusable images, if any, and return their number."""
    bad_images = [bad for task in tasks for bad in journal.records[task.key].bad]
    if bad_images:
        lines = [
            f"{one_line(bad.place)}\t{bad.reason}\t{one_line(bad.instead or 'left out')}\n"
            for bad in bad_images
        ]
        text = "image\treason\tinstead\n" + "".join(lines)
        write_bytes(folder / BAD_LIST, text.encode("utf-8", "surrogateescape"))
    return len(bad_images)


def write_left_out(folder: Path, left_out: tuple[LeftOut, ...]) -> None:
    """Write the list of files that were left out, if any, before `write_rest`."""
    (folder / LEFT_OUT_LIST).unlink(missing_ok=True)  # left by an interrupted run
    if left_out:
        text = "file\treason\n" + "".join(f"{one_line(place)}\t{reason}\n" for place, reason in left_out)
        write_bytes(folder / LEFT_OUT_LIST, text.encode("utf-8", "surrogateescape"))


def _versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"lockstep": lockstep.__version__, "python": platform.python_version(), **versions}
