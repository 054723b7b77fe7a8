"""Drawings for people to look at: images as they are stored and as the network sees them, and labels."""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SIDE = 128  # of an image on the sheet
_GAP = 8
_LINE = 14
_BAR_HEIGHT, _MAX_WIDTH = 160, 1200


@dataclass(frozen=True)
class Sample:
    """One image, uint8 (row, column, 3), the same as the network sees it, float32, and two lines of text."""

    stored: np.ndarray
    seen: np.ndarray
    title: str
    name: str


def draw_sheet(samples: list[Sample], columns: int) -> Image.Image:
    """A grid of samples: the stored image, the same as the network sees it, and what it is said to be."""
    width, height = 2 * _SIDE + 2 * _GAP, _SIDE + 2 * _LINE + 2 * _GAP
    rows = -(-len(samples) // columns)
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, sample in enumerate(samples):
        left, top = _GAP + number % columns * width, _GAP + number // columns * height
        sheet.paste(_thumbnail(sample.stored), (left, top))
        sheet.paste(_thumbnail(as_picture(sample.seen)), (left + _SIDE + _GAP // 2, top))
        for line, (text, colour) in enumerate(((sample.title, "black"), (sample.name, "grey"))):
            place = (left, top + _SIDE + 2 + line * _LINE)
            draw.text(place, _shortened(text, draw, font, width - _GAP), colour, font)
    return sheet


def as_picture(seen: np.ndarray) -> np.ndarray:
    """An image without its mean, with mid-grey for zero: uint8."""
    picture: np.ndarray = np.clip(np.rint(seen) + 128, 0, 255).astype(np.uint8)
    return picture


def draw_histogram(counts: dict[str, np.ndarray], classes: tuple[str, ...]) -> Image.Image:
    """How many images each class has, one row of bars for each half; a bar is at least 1 pixel wide."""
    n_classes = len(classes)
    bar = max(1, min(40, _MAX_WIDTH // n_classes))
    height = _BAR_HEIGHT + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (max(n_classes * bar, 480) + 2 * _GAP, height * len(counts)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for half, (name, numbers) in enumerate(counts.items()):
        bottom = half * height + _BAR_HEIGHT + _LINE
        most, least = int(numbers.argmax()), int(numbers.argmin())
        text = (
            f"{name}: {numbers.sum():,} images; most: {numbers[most]:,} of {classes[most][:40]}; "
            f"fewest: {numbers[least]:,} of {classes[least][:40]}"
        )
        draw.text((_GAP, half * height), _ascii(text), "black", font)
        for label, number in enumerate(numbers.tolist()):
            top = bottom - round(_BAR_HEIGHT * number / max(numbers[most], 1))
            left = _GAP + label * bar
            draw.rectangle((left, top, left + max(bar - 2, 0), bottom), "steelblue")
        draw.text((_GAP, bottom + 2), f"label 0 to {n_classes - 1}", "grey", font)
    return sheet


def _thumbnail(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()  # the font has no other letters


def _shortened(text: str, draw: ImageDraw.ImageDraw, font: object, width: int) -> str:
    text = _ascii(text)
    while text and draw.textlength(text, font) > width:  # type: ignore[arg-type]
        text = text[:-1]
    return text
