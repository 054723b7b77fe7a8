"""The summary of a user's own images that is shown before training."""

from collections import Counter
from collections.abc import Iterable

from lockstep.text import one_line
from preprocessing.listing import Listing, SourceImage, classes_of

_N_CLASSES = 8  # classes to name with their numbers; of more, the largest and the smallest
_FEW = 200  # training images a class
_IMBALANCED = 3.0  # ratio of the largest class to the smallest
_FOR_IMBALANCE = "the classes are imbalanced: class_weights=balanced counts the errors of each class equally"
_FOR_FEW = (
    "there are few images: start from trained weights (pretrained=FILE new_head=true), and set "
    "rand_mirror=true unless left and right matter"
)


def say(line: str) -> None:
    """Print a line of the summary at once."""
    print(line, flush=True)


def class_lines(listing: Listing) -> list[str]:
    """Return the numbers of images by half and by class."""
    train, val = (_count(half) for half in (listing.train, listing.val))
    counts = {name: train[label] + val[label] for label, name in enumerate(listing.classes)}
    n_train, n_val, n_classes = len(listing.train), len(listing.val), len(listing.classes)
    lines = [f"{n_train:,} training and {n_val:,} validation images of {n_classes:,} classes"]
    in_order = sorted(counts, key=lambda name: (-counts[name], name))
    most, least = in_order[0], in_order[-1]
    shown = in_order if len(in_order) <= _N_CLASSES else [*in_order[:3], "...", *in_order[-3:]]
    named = [f"{name} {counts[name]:,}" if name in counts else name for name in shown]
    ratio = counts[most] / max(counts[least], 1)
    text = f"{ratio:.1f} times the smallest's"
    compared = "" if text.startswith("1.0 ") else f"; the largest has {text}"
    lines.append(f"images by class: {', '.join(named)}{compared}")
    if listing.task == "multilabel":
        n_labels, n_images = sum(counts.values()), n_train + n_val
        n_empty = sum(image.label == () for half in (listing.train, listing.val) for image in half)
        lines.append(f"{n_labels / n_images:.1f} classes an image, {n_empty:,} images of no class")
    elif any(";" in name for name in listing.classes):
        lines.append("classes have names with ';': if an image has several classes, set task=multilabel")
    unvalidated = [name for label, name in enumerate(listing.classes) if not val[label]]
    if unvalidated:
        names = ", ".join(unvalidated[:3]) + (", ..." if len(unvalidated) > 3 else "")
        lines.append(f"no validation images: {names}; a larger val_split gives some")
    return lines


def _count(images: Iterable[SourceImage]) -> Counter[int]:
    """Return the number of images of each class that has some."""
    return Counter(number for image in images for number in classes_of(image.label))


def advice(listing: Listing) -> list[str]:
    """Return keys to try where classes are imbalanced or images few."""
    counts = _count(listing.train)
    is_imbalanced = max(counts.values(), default=0) >= _IMBALANCED * min(counts.values(), default=1)
    fits = {
        _FOR_IMBALANCE: is_imbalanced and listing.task == "classify",
        _FOR_FEW: len(listing.train) < _FEW * len(listing.classes),
    }
    return [text for text, fitting in fits.items() if fitting]


def extent_line(shapes: Iterable[tuple[str, tuple[int, int]]]) -> str:
    """Return the smallest and the largest image.

    Args:
        shapes: The path of each image, and its rows and columns.
    """
    by_size = sorted(shapes, key=lambda item: item[1][0] * item[1][1])
    (least, small), (most, large) = by_size[0], by_size[-1]
    names = one_line(least), one_line(most)
    return (
        f"smallest image: {small[1]} x {small[0]} ({names[0]}), largest: {large[1]} x {large[0]} ({names[1]})"
    )
