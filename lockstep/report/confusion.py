"""What the report shows of a network's mistakes."""

from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class Confusion:
    """Images of class `label` that were taken for `answer`, the surest mistakes first, a few as pictures."""

    label: str
    answer: str
    n_images: int
    n_of_class: int  # of those that were tried
    pictures: list[tuple[Image.Image, float]]  # with the network's probability for its answer


@dataclass(frozen=True)
class Examples:
    """What came of `n_images` of all `n_there` validation images."""

    n_images: int
    n_there: int
    n_wrong: int
    n_pairs: int
    confusions: list[Confusion]
