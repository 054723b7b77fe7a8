"""A network's mistakes as the report shows them."""

from dataclasses import dataclass

from PIL import Image


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
