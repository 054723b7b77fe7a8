"""Drawings to check a dataset: images as stored and as the network sees them, with labels."""

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lockstep.report.augmented import in_colors
from lockstep.text import one_line

_SIDE = 128  # of an image on the sheet
_GAP = 8
_LINE = 14
_BAR_HEIGHT, _MAX_WIDTH = 160, 1200


@dataclass(frozen=True)
class Sample:
    """A stored image, uint8 (row, column, channel), the network's float32 input for it, and two lines."""

    stored: np.ndarray
    seen: np.ndarray
    title: str
    name: str


def draw_sheet(samples: list[Sample], columns: int) -> Image.Image:
    """Draw a grid of samples: the stored image, the network's input and the texts."""
    width, height = 2 * _SIDE + 2 * _GAP, _SIDE + 2 * _LINE + 2 * _GAP
    rows = -(-len(samples) // columns)
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), _font()
    for number, sample in enumerate(samples):
        left, top = _GAP + number % columns * width, _GAP + number // columns * height
        sheet.paste(_thumbnail(sample.stored), (left, top))
        sheet.paste(_thumbnail(as_image(sample.seen)), (left + _SIDE + _GAP // 2, top))
        for line, (text, colour) in enumerate(((sample.title, "black"), (sample.name, "grey"))):
            place = (left, top + _SIDE + 2 + line * _LINE)
            draw.text(place, _shortened(text, draw, font, width - _GAP), colour, font)
    return sheet


def as_image(seen: np.ndarray) -> np.ndarray:
    """Return the network's input as a visible uint8 image, with gray for zero."""
    image: np.ndarray = np.clip(np.rint(seen) + 128, 0, 255).astype(np.uint8)
    return image


def draw_histogram(counts: dict[str, np.ndarray], classes: tuple[str, ...]) -> Image.Image:
    """Draw the number of images per class, a row of bars for each half of the dataset."""
    n_classes = len(classes)
    bar = max(1, min(40, _MAX_WIDTH // n_classes))
    height = _BAR_HEIGHT + 2 * _LINE + _GAP
    sheet = Image.new("RGB", (max(n_classes * bar, 480) + 2 * _GAP, height * len(counts)), "white")
    draw, font = ImageDraw.Draw(sheet), _font()
    for half, (name, numbers) in enumerate(counts.items()):
        bottom = half * height + _BAR_HEIGHT + _LINE
        most, least = int(numbers.argmax()), int(numbers.argmin())
        text = (
            f"{name}: {numbers.sum():,} images; most: {numbers[most]:,} of {classes[most][:40]}; "
            f"fewest: {numbers[least]:,} of {classes[least][:40]}"
        )
        draw.text((_GAP, half * height), _drawable(text), "black", font)
        for label, number in enumerate(numbers.tolist()):
            top = bottom - round(_BAR_HEIGHT * number / max(numbers[most], 1))
            left = _GAP + label * bar
            draw.rectangle((left, top, left + max(bar - 2, 0), bottom), "steelblue")
        draw.text((_GAP, bottom + 2), f"label 0 to {n_classes - 1}", "grey", font)
    return sheet


def _thumbnail(image: np.ndarray) -> Image.Image:
    return Image.fromarray(in_colors(image)).resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return matplotlib's font, which has most alphabets, or without matplotlib Pillow's Latin one."""
    if importlib.util.find_spec("matplotlib") is None:
        return ImageFont.load_default(11)
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), 11)


def _drawable(text: str) -> str:
    """Return a text as one line without lone surrogates, which names of files may have."""
    return one_line(text.encode("utf-8", "replace").decode())


def _shortened(text: str, draw: ImageDraw.ImageDraw, font: object, width: int) -> str:
    text = _drawable(text)
    while text and draw.textlength(text, font) > width:  # type: ignore[arg-type]
        text = text[:-1]
    return text
