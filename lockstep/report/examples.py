"""Which classes a network confuses, and in which pictures: its newest checkpoint tried on validation images.

On the CPU, whatever the run is on, and bounded in number and time. Images come the way they come in training.
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
from lockstep.config import Config, Layer, resolve
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.hkl import read_rows
from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from lockstep.loading.feed import Feed, open_feed
from lockstep.network.replica import Replica, open_trained
from lockstep.report.confusion import Confusion, Examples
from lockstep.runs.folder import Checkpoint

_SECONDS = 30.0
_BATCH = 8  # neighbours in the files; few, for files may be sorted by class
_MOST_PAIRS = 8
_PICTURES = 4  # of a pair
_SIDE = 96  # pixels of the longer side


@dataclass(frozen=True)
class Answer:
    """What the network says to one validation image."""

    sample: int
    label: int
    answer: int
    probability: float


def try_examples(checkpoint: Checkpoint, n_images: int) -> Examples:
    """Raises UserError where the network or the dataset of the run is not there any more."""
    config = _on_cpu(checkpoint)
    dataset = open_dataset(config)
    answers = _answers(config, dataset, checkpoint, n_images)
    wrong: dict[tuple[int, int], list[Answer]] = {}
    for answer in answers:
        if answer.answer != answer.label:
            wrong.setdefault((answer.label, answer.answer), []).append(answer)
    ordered = sorted(wrong.values(), key=lambda pair: (-len(pair), pair[0].label, pair[0].answer))
    n_wrong = sum(len(pair) for pair in ordered)
    labels = [answer.label for answer in answers]
    shown = [_confusion(dataset, pair, labels.count(pair[0].label)) for pair in ordered[:_MOST_PAIRS]]
    return Examples(len(answers), len(dataset.val), n_wrong, len(ordered), shown)


def _on_cpu(checkpoint: Checkpoint) -> Config:
    """The run's configuration, changed to a single trainer on the CPU."""
    config, _ = resolve([Layer(str(checkpoint.path.with_suffix(".json")), checkpoint.state.config)])
    return dataclasses.replace(
        config, devices=("cpu",), precision="fp32", cuda_graph=False, exchange="auto", batch_size=_BATCH
    )


def _answers(config: Config, dataset: Dataset, checkpoint: Checkpoint, n_images: int) -> list[Answer]:
    """To images from all over the validation half, until there are enough or the time is over."""
    backend = backend_of("cpu")
    replica, dataset = open_trained(config, dataset, backend.memory, checkpoint.path)
    feed = open_feed(backend, config, dataset, replica, _orders(len(dataset.val)), _silent)
    answers: list[Answer] = []
    begin = time.monotonic()
    try:
        for _ in range(-(-min(n_images, len(dataset.val)) // _BATCH)):
            feed.next()
            answers += _ask(replica, feed)
            feed.release()
            if not all(math.isfinite(answer.probability) for answer in answers[-_BATCH:]):
                raise UserError(f"{checkpoint.path}: its network gives no numbers")
            if time.monotonic() - begin > _SECONDS:
                break
    except RuntimeError as error:  # the network can't do on a CPU what it does on its devices
        raise UserError(f"{checkpoint.path}: its network does not run on the CPU: {error}") from error
    feed.close()
    return answers


def _orders(n_there: int) -> Iterator[Order]:
    """Small batches in random order, the same in every report."""
    starts = generator(0, 0, Purpose.ORDER).permutation(np.arange(0, n_there, _BATCH))
    for start in starts.tolist():
        stop = min(start + _BATCH, n_there)
        yield Order("val", 1, start // _BATCH + 1, start, stop, start, stop)


def _ask(replica: Replica, feed: Feed) -> list[Answer]:
    batch = feed.batch()
    probability, answer = replica.log_probabilities(batch).exp().max(1)
    columns = (batch.samples, batch.labels, answer, probability)
    return [Answer(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _confusion(dataset: Dataset, pair: list[Answer], n_of_class: int) -> Confusion:
    names = [_class_name(dataset, number) for number in (pair[0].label, pair[0].answer)]
    surest = sorted(pair, key=lambda answer: -answer.probability)[:_PICTURES]
    pictures = [(_picture(dataset, answer.sample), answer.probability) for answer in surest]
    return Confusion(names[0], names[1], len(pair), n_of_class, pictures)


def _class_name(dataset: Dataset, number: int) -> str:
    names = dataset.manifest.class_names if dataset.manifest else ()
    return names[number] if number < len(names) else f"class {number}"


def _picture(dataset: Dataset, sample: int) -> Image.Image:
    """A validation image as it is stored, no larger than the page shows it."""
    for file in dataset.val.files:
        if sample < file.shape[0]:
            break
        sample -= file.shape[0]
    pixels = np.empty((1, *file.row_shape), np.uint8)
    read_rows(file, sample, pixels)
    picture = Image.fromarray(pixels[0])
    picture.thumbnail((_SIDE, _SIDE))
    return picture


def _silent(text: str) -> None:
    """Nobody watches what the report is doing."""
