"""The division of a listing into tasks, as a function of the user's settings only."""

import math
from dataclasses import dataclass

from lockstep.data.hkl import Layout
from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from preprocessing.images import MAX_PIXELS, Geometry
from preprocessing.listing import Label, Listing, SourceImage
from preprocessing.tasks import ImageBatch, OnError, Task

TOY_BATCHES = 10


@dataclass(frozen=True)
class Settings:
    """The user's choices about the images. `batch`: images per file; `parts`: see tasks.Target."""

    geometry: Geometry = Geometry()  # noqa: RUF009 (frozen)
    batch: int = 256
    seed: int = 0
    layout: Layout = "b01c"
    parts: int = 1
    on_error: OnError = "stop"
    toy: bool = False

    def check(self) -> None:
        """Raise UserError for values or combinations that can't work."""
        if self.geometry.size < 1 or self.batch < 1 or self.seed < 0:
            raise UserError("--size and --batch must be at least 1, --seed at least 0")
        largest = math.isqrt(MAX_PIXELS)
        if self.geometry.size > largest:
            raise UserError(f"--size: {self.geometry.size:,} is more than {largest:,}. Give a smaller size.")
        if self.layout == "b01c" and self.parts > 1:
            raise UserError(
                "--split is for --layout c01b: a folder in the present layout serves any number of devices"
            )
        if self.layout == "c01b" and (self.batch % self.parts or self.on_error == "skip"):
            raise UserError(
                "--layout c01b has files of one size: --batch must be divisible by --split, "
                "and --on-error be stop or replace"
            )


def make_tasks(listing: Listing, settings: Settings) -> list[Task]:
    """Return the batches of both halves, with the training images shuffled once with the seed.

    Raises:
        UserError: There are too few images for a batch of theano_alexnet's layout.
    """
    order = generator(settings.seed, 0, Purpose.ORDER).permutation(len(listing.train)).tolist()
    tasks = []
    for split, images, places in (
        ("train", listing.train, order),
        ("val", listing.val, list(range(len(listing.val)))),
    ):
        spares = _spares(images) if settings.on_error == "replace" else []
        batches = [
            Task(split, number, _batch(images, spares, part, settings))
            for number, part in enumerate(_cut(places, settings))
        ]
        if not batches:
            raise UserError(f"{len(images)} {split} images do not fill a batch of {settings.batch} (--batch)")
        tasks += batches
    return tasks


def _cut(places: list[int], settings: Settings) -> list[list[int]]:
    """Cut the images into batches. theano_alexnet's layout can't hold a smaller last batch."""
    parts = [places[first : first + settings.batch] for first in range(0, len(places), settings.batch)]
    if settings.layout == "c01b" and len(parts[-1]) < settings.batch:
        parts.pop()
    return parts[:TOY_BATCHES] if settings.toy else parts


def _batch(images: list[SourceImage], spares: list[int], part: list[int], settings: Settings) -> ImageBatch:
    return ImageBatch(
        tuple(images[place] for place in part),
        tuple(images[spares[place]] for place in part) if spares else (),
        settings.geometry,
        settings.on_error,
    )


def _spares(images: list[SourceImage]) -> list[int]:
    """Return for each image the index of the next one of its class, cyclically."""
    by_class: dict[Label, list[int]] = {}
    for place, image in enumerate(images):
        by_class.setdefault(image.label, []).append(place)
    spares = [0] * len(images)
    for places in by_class.values():
        for place, following in zip(places, [*places[1:], places[0]], strict=True):
            spares[place] = following
    return spares
