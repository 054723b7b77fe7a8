"""Folders of images as users have them."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"cat": (200, 30, 30), "dog": (30, 200, 30), "emu": (30, 30, 200)}


def write_classes(folder: Path, counts: dict[str, int], size: tuple[int, int] = (20, 24)) -> Path:
    """Write PNG files of each class's colour, with a little noise. Return the folder."""
    random = np.random.default_rng(len(counts))
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            write_image(folder / name / f"{number:03d}.png", COLOURS[name], size, random)
    return folder


def write_image(
    path: Path, colour: tuple[int, int, int], size: tuple[int, int], random: np.random.Generator
) -> None:
    noise = random.integers(-20, 20, (*size, 3))
    Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(path)


def write_mixed(folder: Path, n_files: int = 600) -> tuple[Path, list[Path]]:
    """Write files of every kind that a user's folder has. Return the folder and the two unusable files."""
    writers = [_png_with_alpha, _cmyk, _animation, _turned, _grey_of_16_bits, _bmp, _tiff, _webp, _unicode]
    names = list(COLOURS)
    n_links = 6
    for number in range(n_files - n_links - 2):
        place = folder / names[number % 3] / ("deep/er" if number % 7 == 0 else "")
        place.mkdir(parents=True, exist_ok=True)
        writers[number % len(writers)](place, number, COLOURS[names[number % 3]])
    outside = folder.with_name("elsewhere")
    outside.mkdir()
    for number in range(n_links):
        Image.new("RGB", (30, 30), COLOURS["cat"]).save(outside / f"{number}.png")
    (folder / "cat" / "linked").symlink_to(outside)  # a folder with all but one of them
    (outside / "0.png").rename(folder.with_name("alone.png"))
    (folder / "cat" / "link.png").symlink_to(folder.with_name("alone.png"))
    broken, text = folder / "dog" / "broken.jpg", folder / "emu" / "letter.jpg"
    whole = folder / "dog" / "whole.jpg"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(whole)
    broken.write_bytes(whole.read_bytes()[:900])
    whole.unlink()
    text.write_text("Dear reader, this is no image.")
    for hidden in (".ipynb_checkpoints", "cat/.thumbnails"):
        (folder / hidden).mkdir()
        Image.new("RGB", (9, 9)).save(folder / hidden / "1.png")
    return folder, [broken, text]


def images_below(folder: Path) -> Iterable[Path]:
    """Return the files that are images of a class."""
    for place, _, names in os.walk(folder, followlinks=True):
        if not any(part.startswith(".") for part in Path(place).relative_to(folder).parts):
            yield from (Path(place) / name for name in names)


Colour = tuple[int, int, int]


def _png_with_alpha(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGBA", (30, 20), (*colour, 255)).save(place / f"{number}.PNG")


def _cmyk(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGB", (30, 20), colour).convert("CMYK").save(place / f"{number}.JPEG", "JPEG")


def _animation(place: Path, number: int, colour: Colour) -> None:
    first, second = Image.new("RGB", (30, 20), colour), Image.new("RGB", (30, 20), "white")
    first.save(place / f"{number}.gif", save_all=True, append_images=[second])


def _turned(place: Path, number: int, colour: Colour) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20), colour).save(place / f"{number}.jpg", exif=exif)


def _grey_of_16_bits(place: Path, number: int, colour: Colour) -> None:
    Image.fromarray(np.full((20, 30), 256 * (number % 256), np.uint16)).save(place / f"{number}_grey.png")


def _bmp(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGB", (30, 20), colour).save(place / f"{number}.BMP")


def _tiff(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGB", (30, 20), colour).save(place / f"{number}.tif")


def _webp(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGB", (30, 20), colour).save(place / f"{number}", "WEBP")  # without a suffix


def _unicode(place: Path, number: int, colour: Colour) -> None:
    Image.new("RGB", (30, 20), colour).save(place / f"Käse {number} 猫.jpg")
