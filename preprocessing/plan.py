"""From a listing of pictures to the tasks that make a dataset folder: a function of what the user gives."""

from dataclasses import dataclass

from lockstep.data.hkl import Layout
from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from preprocessing.listing import Listing, Picture
from preprocessing.pictures import Geometry
from preprocessing.tasks import OnError, PictureBatch, Task

TOY_BATCHES = 10


@dataclass(frozen=True)
class Settings:
    """What the user chooses about the images. `batch`: images in a file; `parts`: see tasks.Target."""

    geometry: Geometry = Geometry()  # noqa: RUF009 (frozen)
    batch: int = 256
    seed: int = 0
    layout: Layout = "b01c"
    parts: int = 1
    on_error: OnError = "stop"
    toy: bool = False

    def check(self) -> None:
        """Raises UserError for values that can't work, alone or together."""
        if self.geometry.size < 1 or self.batch < 1 or self.seed < 0:
            raise UserError("--size and --batch must be at least 1, --seed at least 0")
        if self.parts not in (1, 2, 4):
            raise UserError("--split must be 1, 2 or 4")
        if self.layout == "b01c" and self.parts > 1:
            raise UserError(
                "--split is for --layout c01b: one dataset folder of today's serves any number of devices"
            )
        if self.layout == "c01b" and (self.batch % self.parts or self.on_error == "skip"):
            raise UserError(
                "--layout c01b has files of one size: --batch must be divisible by --split, "
                "and --on-error be stop or replace"
            )


def make_tasks(listing: Listing, settings: Settings) -> list[Task]:
    """The batches of both halves. Training pictures are shuffled once, with the seed. Raises UserError."""
    order = generator(settings.seed, 0, Purpose.ORDER).permutation(len(listing.train)).tolist()
    tasks = []
    for split, pictures, places in (
        ("train", listing.train, order),
        ("val", listing.val, list(range(len(listing.val)))),
    ):
        spares = _spares(pictures) if settings.on_error == "replace" else []
        found = [
            Task(split, number, _batch(pictures, spares, part, settings))
            for number, part in enumerate(_cut(places, settings))
        ]
        if not found:
            raise UserError(
                f"{len(pictures)} {split} pictures do not fill a batch of {settings.batch} (--batch)"
            )
        tasks += found
    return tasks


def _cut(places: list[int], settings: Settings) -> list[list[int]]:
    """In batches; theano_alexnet's layout has no place for a last one that is smaller."""
    parts = [places[first : first + settings.batch] for first in range(0, len(places), settings.batch)]
    if settings.layout == "c01b" and len(parts[-1]) < settings.batch:
        parts.pop()
    return parts[:TOY_BATCHES] if settings.toy else parts


def _batch(pictures: list[Picture], spares: list[int], part: list[int], settings: Settings) -> PictureBatch:
    return PictureBatch(
        tuple(pictures[place] for place in part),
        tuple(pictures[spares[place]] for place in part) if spares else (),
        settings.geometry,
        settings.on_error,
    )


def _spares(pictures: list[Picture]) -> list[int]:
    """For each picture the place of the next one of its class; the first follows the last."""
    by_class: dict[int, list[int]] = {}
    for place, picture in enumerate(pictures):
        by_class.setdefault(picture.label, []).append(place)
    spares = [0] * len(pictures)
    for places in by_class.values():
        for place, following in zip(places, [*places[1:], places[0]], strict=True):
            spares[place] = following
    return spares
