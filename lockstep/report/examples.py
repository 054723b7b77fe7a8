"""A test of the newest checkpoint on validation images: the classes that the network confuses, with images.

It runs on the CPU, with limits on images and time. Images are prepared as in training.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from lockstep.backends import backend_of
from lockstep.comm.messages import Order
from lockstep.config import Config, resolve
from lockstep.data.dataset import Dataset
from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from lockstep.evaluate.data import open_data
from lockstep.loading.feed import Feed, open_feed
from lockstep.network.low_precision import configure
from lockstep.network.replica import Replica, open_trained
from lockstep.runs.folder import notes_on_dataset
from lockstep.runs.state import Checkpoint

_SECONDS = 30.0
_BATCH = 8  # neighbors in a file; few, because files may be sorted by class
_MOST_PAIRS = 8
_THUMBNAILS = 4  # per pair of classes
_SIDE = 96  # pixels of the longer side


@dataclass(frozen=True)
class Confusion:
    """Images of class `label` that the network took for `answer`, a few of them as thumbnails."""

    label: str
    answer: str
    n_images: int
    n_of_class: int  # tested images of the class
    images: list[tuple[Image.Image, float]]  # with the answer's probability, highest first


@dataclass(frozen=True)
class Examples:
    """The results for `n_images` of all `n_there` validation images."""

    n_images: int
    n_there: int
    n_wrong: int
    n_pairs: int
    confusions: list[Confusion]
    notes: list[str]  # on differences between the dataset and the run's


@dataclass(frozen=True)
class ImageAnswer:
    """The network's answer for one validation image."""

    sample: int
    label: int
    answer: int
    probability: float


def try_examples(checkpoint: Checkpoint, n_images: int) -> Examples:
    """Test a checkpoint on up to `n_images` validation images.

    Raises:
        UserError: The run's network or dataset is missing, or the dataset has other classes.
    """
    config = _on_cpu(checkpoint)
    dataset, notes = open_data(config, checkpoint.path.parent.parent, checkpoint.path.stem)
    notes += notes_on_dataset(config, dataset.digest, checkpoint)
    answers = _answers(config, dataset, checkpoint, n_images)
    wrong: dict[tuple[int, int], list[ImageAnswer]] = {}
    for answer in answers:
        if answer.answer != answer.label:
            wrong.setdefault((answer.label, answer.answer), []).append(answer)
    ordered = sorted(wrong.values(), key=lambda pair: (-len(pair), pair[0].label, pair[0].answer))
    n_wrong = sum(len(pair) for pair in ordered)
    labels = [answer.label for answer in answers]
    shown = [_confusion(dataset, pair, labels.count(pair[0].label)) for pair in ordered[:_MOST_PAIRS]]
    return Examples(len(answers), len(dataset.val), n_wrong, len(ordered), shown, notes)


def _on_cpu(checkpoint: Checkpoint) -> Config:
    """Return the configuration for a single trainer on the CPU."""
    config, _ = resolve([checkpoint.settings])
    return dataclasses.replace(
        config, devices=("cpu",), precision="fp32", cuda_graph=False, exchange="auto", batch_size=_BATCH
    )


def _answers(config: Config, dataset: Dataset, checkpoint: Checkpoint, n_images: int) -> list[ImageAnswer]:
    """Return the answers for images from all validation files, up to the limits of number and time."""
    backend = backend_of("cpu")
    configure(config)
    replica, dataset = open_trained(config, dataset, backend.memory, checkpoint.path)
    feed = open_feed(backend, config, dataset, replica, _orders(len(dataset.val)), lambda text: None)
    answers: list[ImageAnswer] = []
    begin = time.monotonic()
    try:
        for _ in range(-(-min(n_images, len(dataset.val)) // _BATCH)):
            feed.next()
            answers += _ask(replica, feed)
            feed.release()
            if not all(math.isfinite(answer.probability) for answer in answers[-_BATCH:]):
                raise UserError(f"{checkpoint.path}: its network returns values that are not finite")
            if time.monotonic() - begin > _SECONDS:
                break
    except RuntimeError as error:  # the network needs the run's devices
        raise UserError(f"{checkpoint.path}: its network does not run on the CPU: {error}") from error
    feed.close()
    return answers


def _orders(n_there: int) -> Iterator[Order]:
    """Yield small batches in a random order that is the same in every report."""
    starts = generator(0, 0, Purpose.ORDER).permutation(np.arange(0, n_there, _BATCH))
    for start in starts.tolist():
        stop = min(start + _BATCH, n_there)
        yield Order("val", 1, start // _BATCH + 1, start, stop, start, stop)


def _ask(replica: Replica, feed: Feed) -> list[ImageAnswer]:
    batch = feed.batch()
    probability, answer = replica.log_probabilities(batch).exp().max(1)
    columns = (batch.samples, batch.labels, answer, probability)
    return [ImageAnswer(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _confusion(dataset: Dataset, pair: list[ImageAnswer], n_of_class: int) -> Confusion:
    names = [_class_name(dataset, number) for number in (pair[0].label, pair[0].answer)]
    surest = sorted(pair, key=lambda answer: -answer.probability)[:_THUMBNAILS]
    thumbnails = [(_thumbnail(dataset, answer.sample), answer.probability) for answer in surest]
    return Confusion(names[0], names[1], len(pair), n_of_class, thumbnails)


def _class_name(dataset: Dataset, number: int) -> str:
    names = dataset.class_names if dataset.manifest or dataset.survey else ()
    return names[number] if number < len(names) else f"class {number}"


def _thumbnail(dataset: Dataset, sample: int) -> Image.Image:
    """Return a stored validation image in the size of the page."""
    pixels = dataset.val.image(sample)
    thumbnail = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    thumbnail.thumbnail((_SIDE, _SIDE))
    return thumbnail
