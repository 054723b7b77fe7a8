"""The conversion of a user's own images to the set that a run trains on."""

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from lockstep.config import Config
from lockstep.data.manifest import Resize, read_manifest
from lockstep.errors import UserError
from lockstep.network.build import build_model, input_spec_of
from preprocessing import cache
from preprocessing.build import Job, build, locked, recover, unfinished
from preprocessing.cache import SourceRecord, Stamp
from preprocessing.finish import BAD_LIST, task_fact
from preprocessing.images import Geometry
from preprocessing.inputs import VAL_SPLIT
from preprocessing.listing import LEFT_OUT_LIST, LeftOut, Listing, summary_of
from preprocessing.plan import Settings, make_tasks
from preprocessing.summary import extent_line, say
from preprocessing.tasks import ImageBatch, Record, StoredImage, Target, Task

_MARGIN = 9 / 8  # rows of a stored image to those that the network takes, so that random crops differ
_MULTIPLE = 4  # of the rows of stored images
_FEW = 1000  # images that this process decodes sooner than workers have started
_RESIZE: Resize = "crop"
_IN_USE = (
    "a run trains on it, and the images have changed since. Wait for the run to end, or set cache_folder to "
    "another folder."
)


@dataclass(frozen=True)
class Images:
    """A user's images as they are now.

    Attributes:
        source: The folder.
        stamps: The stamps of its images, by relative paths.
        list_again: Reads the folder again.
    """

    source: Path
    listing: Listing
    stamps: dict[str, Stamp]
    list_again: Callable[[], Listing]


def current_set(config: Config, source: Path, listing: Listing, list_again: Callable[[], Listing]) -> Path:
    """Return a set of the images, made or brought up to date if needed.

    Raises:
        UserError: The set can't be written, or the images changed meanwhile.
    """
    images = Images(source, listing, cache.stamps_of(listing, source), list_again)
    geometry = Geometry(stored_size(config, len(listing.classes)), _RESIZE)
    name = set_name(config, geometry.size)
    places = cache.candidates(source, config.cache_folder)
    for place in places:
        folder = place / name
        recover(folder)
        record = cache.read_record(folder)
        is_current = record and record.geometry == geometry and record.stamps() == images.stamps
        if record and is_current and has_classes(folder, listing):
            say(f"converted before, in {record.seconds:.1f} s: {folder}")
            show_images(folder, record, listing)
            return folder
    place, note = cache.first_writable(places)
    if note:
        say(f"note: {note}")
    folder = place / name
    with locked(folder, _IN_USE) if folder.exists() else nullcontext():  # runs hold the set they train on
        record = make_set(folder, images, geometry)
    show_images(folder, record, listing)
    check_unchanged(images)
    return folder


def set_name(config: Config, size: int) -> str:
    """Return the name of a set: its image size, and the task and val_split if they are not the defaults.

    Sets of different validation images have different names: otherwise a run would be validated on images
    that it was trained on, after another run had replaced its set.
    """
    task = "" if config.task == "classify" else f"_{config.task}"
    split = "" if config.val_split == VAL_SPLIT else f"_val_split_{config.val_split}"
    return f"{size}x{size}{task}{split}"


def has_classes(folder: Path, listing: Listing) -> bool:
    """Return whether a set has the classes of its source: a table may name some that no image has."""
    try:
        manifest = read_manifest(folder)
    except UserError:  # damaged: the set is made again
        return False
    return manifest is not None and list(manifest.classes) == listing.classes


def stored_size(config: Config, n_classes: int) -> int:
    """Return the rows and columns to store: those that the network takes, and a margin for random crops."""
    taken = config.input_size
    if taken is None:
        try:
            with torch.device("meta"):  # no memory and no random numbers for the weights
                taken = input_spec_of(build_model(config, n_classes), config).size
        except UserError:  # a network that computes with numbers while it is made
            taken = input_spec_of(build_model(config, n_classes), config).size
    return math.ceil(int(np.max(taken)) * _MARGIN / _MULTIPLE) * _MULTIPLE


def make_set(folder: Path, images: Images, geometry: Geometry) -> SourceRecord:
    """Make a set, with the rows that an earlier one has of unchanged images. Return its record."""
    start = time.monotonic()
    settings = Settings(geometry, on_error="skip")
    tasks = make_tasks(images.listing, settings)
    tasks = with_stored(tasks, earlier_images(folder, images, geometry), images.source)
    target = Target(unfinished(folder), geometry.size, settings.batch, settings.layout, settings.parts, True)
    chosen = {
        "resize": geometry.resize,
        "orientation": geometry.orientation,
        "seed": settings.seed,
        "fingerprint": cache.fingerprint(images.stamps),
        **task_fact(images.listing),
    }
    listing = images.listing
    made: list[SourceRecord] = []

    def complete(place: Path, records: dict[str, Record]) -> None:
        seconds = time.monotonic() - start
        record = cache.make_record(geometry, seconds, tasks, records, images.stamps, images.source)
        record.write(place)
        made.append(record)

    job = Job(folder, target, tasks, listing.classes, listing.class_names, chosen, listing.left_out, True)
    n_workers = len(os.sched_getaffinity(0)) if len(images.stamps) > _FEW else 1
    done = build(job, n_workers, sys.maxsize, complete)
    seconds = made[0].seconds
    n_images = done.n_train + done.n_val
    say(f"converted {n_images:,} images in {seconds:.1f} s ({n_images / seconds:,.0f} images/s): {folder}")
    return made[0]


def earlier_images(folder: Path, images: Images, geometry: Geometry) -> dict[str, StoredImage]:
    """Return where an earlier set holds images that have not changed since."""
    record = cache.read_record(folder)
    if record is None or record.geometry != geometry:
        return {}
    try:
        stored = cache.stored_images(folder, record, images.stamps)
    except (UserError, StopIteration):  # damaged: it is made again
        return {}
    say(f"bringing {folder} up to date: {len(images.stamps) - len(stored):,} new or changed images")
    return stored


def with_stored(tasks: list[Task], stored: dict[str, StoredImage], source: Path) -> list[Task]:
    """Return the tasks, which read the images in `stored` from there."""
    if not stored:
        return tasks
    renewed = []
    for task in tasks:
        assert isinstance(task.source, ImageBatch)
        places = tuple(stored.get(cache.relative_path(image, source)) for image in task.source.sources)
        renewed.append(replace(task, source=replace(task.source, stored=places)))
    return renewed


def check_unchanged(images: Images) -> None:
    """Raise UserError if the folder is not what it was before the conversion."""
    before, now = images.stamps, cache.stamps_of(images.list_again(), images.source)
    changed = sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))
    if changed:
        raise UserError(
            f"{images.source}: changed while it was converted: {changed[0]}"
            + (f" and {len(changed) - 1:,} more" if len(changed) > 1 else "")
            + ". The same command brings the converted set up to date."
        )


def show_images(folder: Path, record: SourceRecord, listing: Listing) -> None:
    """Show the extent of the images, and what was left out."""
    say(extent_line((entry.path, entry.shape) for entry in (*record.train, *record.val)))
    bad = bad_images(folder)
    for line in summary_of(bad):
        say(line)
    lists = [name for each, name in ((bad, BAD_LIST), (listing.left_out, LEFT_OUT_LIST)) if each]
    if lists:
        say(f"files that were left out are listed in {' and '.join(str(folder / name) for name in lists)}")


def bad_images(folder: Path) -> list[LeftOut]:
    """Return the images of a set's source that could not be used, from the set's list of them."""
    try:
        text = (folder / BAD_LIST).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    rows = [line.rsplit("\t", 2) for line in text.splitlines()[1:]]  # a name may have tabs
    return [LeftOut(row[0], f"unusable: {row[1]}") for row in rows if len(row) == 3]
