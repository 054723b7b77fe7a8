"""The survey of datasets that are Python objects: the facts that all processes of a run must agree on.

A separate process makes it before the run's other processes start (lockstep/launch/checks.py), because
the code of a dataset is the user's. The launcher publishes it to them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.config.tasks import is_multilabel
from lockstep.data.items import (
    NAMES,
    Label,
    channels_of,
    check_label,
    class_names_of,
    item_of,
    known_labels_of,
    length_of,
    load_datasets,
    pixels_of,
)
from lockstep.errors import UserError

_VARIABLE = "LOCKSTEP_SURVEY"  # environment variable: the path of the survey as JSON
_N_EXAMINED = 32  # training images whose size and channels decide
_N_AVERAGED = 256  # training images in the mean
_RANDOM = (
    f"{NAMES['train']}: item 0 differs from one reading to the next, so runs can't be repeated bit by bit; "
    "Lockstep's own augmentation (rand_crop, rand_mirror, ...) can"
)


@dataclass(frozen=True)
class Survey:
    """Facts about two datasets.

    Attributes:
        image_shape: (rows, columns, channels) to which images are brought.
        mean: The mean of each channel over evenly spaced training images, in gray levels.
        class_names: One for each class, or ().
        fingerprint: A digest of lengths, examined images and labels, and of the datasets' own fingerprints.
        notes: Lines for the user.
    """

    n_train: int
    n_val: int
    n_classes: int
    image_shape: tuple[int, ...]
    mean: tuple[float, ...]
    class_names: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()


class _Half:
    """The training or validation dataset while it is surveyed."""

    def __init__(self, data: Any, split: str, say: Callable[[str], object], multilabel: bool) -> None:
        self.data, self.name, self._say = data, NAMES[split], say
        self.multilabel = multilabel
        self.n_items = length_of(data, self.name)

    def item(self, index: int) -> tuple[Any, Label]:
        """Return the image, as the dataset gives it, and the label of an item."""
        self._say(f"{self.name}: reading item {index}")
        return item_of(self.data, index, self.name, self.multilabel)

    def pixels(self, index: int, n_channels: int) -> np.ndarray:
        """Return an item's image: uint8 (rows, columns, n_channels)."""
        return pixels_of(self.item(index)[0], n_channels, f"{self.name}: item {index}")

    def mean(self, index: int, n_channels: int) -> np.ndarray:
        """Return the mean of an item's channels, float64 (n_channels,)."""
        mean: np.ndarray = self.pixels(index, n_channels).mean((0, 1), np.float64)
        return mean


def make_survey(
    config: Config,
    input_size: Callable[[int, int], tuple[int, int]] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Survey:
    """Survey the datasets of a configuration by reading up to some hundred training items.

    Args:
        config: The run's configuration.
        input_size: Returns rows and columns of the network's images, for a number of channels and of classes.
            It is called if `item_size` does not say how large the images are to be.
        say: Called with a line about the current activity.

    Raises:
        UserError: A dataset or an item can't be used; the message names it.
    """
    data = load_datasets(config)
    halves = [_Half(each, split, say, is_multilabel(config)) for each, split in zip(data, NAMES, strict=True)]
    train, val = halves
    names = class_names_of(train.data)
    n_classes = config.n_classes or len(names) or _count_classes(train)
    places = np.unique(np.linspace(0, train.n_items - 1, _N_AVERAGED).round().astype(int)).tolist()
    examined = places[:: -(-len(places) // _N_EXAMINED)]
    items = [train.item(place) for place in examined]
    for place, (_, label) in zip(examined, items, strict=True):
        check_label(label, n_classes, f"{train.name}: item {place}")
    if len(names) <= n_classes:
        _check_same_classes(names, class_names_of(val.data))
    if config.class_weights or config.sampler:
        _check_known_labels(train, dict(zip(examined, (label for _, label in items), strict=True)))
    n_channels = config.n_channels or _common_channels([image for image, _ in items])
    images = [
        pixels_of(image, n_channels, f"{train.name}: item {place}")
        for place, (image, _) in zip(examined, items, strict=True)
    ]
    val.pixels(0, n_channels)
    size = config.item_size or _size_of(images, n_channels, n_classes, input_size)
    rows, columns = (size, size) if isinstance(size, int) else size
    means = [train.mean(place, n_channels) for place in places]
    is_same = np.array_equal(images[0], train.pixels(0, n_channels))
    notes = () if is_same else (_RANDOM,)
    if names and len(names) != n_classes:
        text = f"{train.name}: names {len(names)} classes, but n_classes is {n_classes}"
        names, notes = (), (*notes, f"{text}; their numbers are used as names")
    return Survey(
        n_train=train.n_items,
        n_val=val.n_items,
        n_classes=n_classes,
        image_shape=(rows, columns, n_channels),
        mean=tuple(np.mean(means, 0).tolist()),
        class_names=names,
        fingerprint=_fingerprint(train, val, images if is_same else [], [label for _, label in items]),
        notes=notes,
    )


def _check_same_classes(train: tuple[str, ...], val: tuple[str, ...]) -> None:
    """Raise UserError if a class has another name in the validation data, as with fewer class folders."""
    for number, (name, other) in enumerate(zip(train, val, strict=False)):
        if name != other:
            raise UserError(
                f"{NAMES['val']}: class {number} is {other!r}, and {name!r} in {NAMES['train']}. "
                "Give both the same classes in the same order."
            )


def _check_known_labels(train: _Half, labels: Mapping[int, Label]) -> None:
    """Raise UserError if the dataset's list of labels, which decides on weights, is not that of its items.

    Args:
        train: The training dataset.
        labels: The labels of some items by their numbers.
    """
    known = known_labels_of(train.data, train.n_items, train.multilabel)
    if known is None:
        return
    for index, label in labels.items():
        if not np.array_equal(known[index], label):
            raise UserError(
                f"{train.name}: item {index} has the label {label}, and the dataset's `targets` have "
                f"{known[index]}. class_weights and sampler need `targets` that are the items' labels."
            )


def _common_channels(images: list[Any]) -> int:
    """Return the channels that all images have; 3 if they differ."""
    found = {channels_of(image) for image in images}
    return found.pop() if len(found) == 1 and found <= {1, 2, 3, 4} else 3


def _count_classes(train: _Half) -> int:
    if train.multilabel:
        label = train.item(0)[1]
        assert isinstance(label, np.ndarray)
        return len(label)
    labels = known_labels_of(train.data, train.n_items)
    if labels is None:
        raise UserError(f"{train.name}: does not say how many classes there are. Set n_classes.")
    return int(labels.max()) + 1


def _size_of(
    images: list[np.ndarray],
    n_channels: int,
    n_classes: int,
    input_size: Callable[[int, int], tuple[int, int]] | None,
) -> tuple[int, int]:
    """Return the images' own size if they share one that suits the network, else its size with a margin."""
    shapes = {image.shape[:2] for image in images}
    own = shapes.pop() if len(shapes) == 1 else None
    if input_size is None:
        if own is None:
            raise UserError(f"{NAMES['train']}: its images have several sizes. Set item_size.")
        return own
    wanted = input_size(n_channels, n_classes)
    if own and all(side <= have < 2 * side for side, have in zip(wanted, own, strict=True)):
        return own
    return wanted[0] * 9 // 8, wanted[1] * 9 // 8


def _fingerprint(train: _Half, val: _Half, images: list[np.ndarray], labels: Sequence[Label]) -> str:
    plain = [label.tolist() if isinstance(label, np.ndarray) else label for label in labels]
    digest = hashlib.sha256(repr((train.n_items, val.n_items, plain)).encode())
    for half in (train, val):
        own = getattr(half.data, "fingerprint", getattr(half.data, "_fingerprint", ""))
        digest.update(repr(own() if callable(own) else own).encode())
    for image in images:
        digest.update(repr(image.shape).encode() + image.tobytes())
    return digest.hexdigest()


def publish(survey: Survey) -> None:
    """Have the processes that this one starts from now on use the survey."""
    file = os.memfd_create("the survey of the datasets")  # open as long as this process
    os.write(file, json.dumps(asdict(survey)).encode())
    os.environ[_VARIABLE] = f"/proc/{os.getpid()}/fd/{file}"


def current_survey(config: Config) -> Survey:
    """Return the survey that the launcher has published, or a new one in a program without a launcher."""
    if _VARIABLE not in os.environ:
        return make_survey(config)
    with open(os.environ[_VARIABLE], encoding="utf-8") as file:
        values = json.load(file)
    tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Survey(**{**values, **tuples})
