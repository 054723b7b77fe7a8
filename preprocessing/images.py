"""Decoding of one image: from the bytes of a file to a square RGB image.

simplejpeg (libjpeg-turbo) decodes JPEG. Unlike Pillow it reports corrupt data, which would give a wrong
image. Pillow decodes all other formats, and CMYK. A JPEG with both sides at least four times as long as
needed is decoded at half its size or less (the DCT's scaling), but never below twice the needed size.
Photographs then have more than 40 dB PSNR against full decoding. Resizing is PyTorch's bilinear filter with
antialiasing, which equals Pillow's BILINEAR to one level and is three times as fast.
"""

import io
import warnings
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from lockstep.data.items import check_range, resized, turn_of
from lockstep.data.manifest import Orientation, Resize
from preprocessing.formats import NO_IMAGE, formats_of

MAX_PIXELS = 100_000_000  # images that claim more are refused before they are decoded
_MAX_ASPECT = 8  # crop: only the center of longer images is resized
Shape = tuple[int, int]  # rows and columns


class BadImage(ValueError):
    """An image can't be used; the message has the reason."""


class UnreadImage(BadImage):
    """The file of an image can't be read."""


@dataclass(frozen=True)
class Geometry:
    """The geometry of the stored images.

    Attributes:
        size: Rows and columns in pixels.
        resize: 'squash' scales both sides independently, as theano_alexnet did. 'crop' scales the short
            side to `size` and cuts out the center. 'pad' scales the long side to `size` and adds black.
        orientation: 'apply' rotates images as their EXIF data say. 'ignore' does not, as in theano_alexnet.
    """

    size: int = 256
    resize: Resize = "squash"
    orientation: Orientation = "apply"


def to_image(content: bytes, geometry: Geometry, name: str = "") -> np.ndarray:
    """Return the first image in a file's bytes as uint8 (size, size, 3), RGB.

    Args:
        content: The bytes of the file.
        geometry: The size and shape of the result.
        name: The file's name. Its suffix decides for formats without a signature (TGA).

    Raises:
        BadImage: The file is not an image, damaged or too large.
    """
    return to_sized_image(content, geometry, name)[0]


def to_sized_image(content: bytes, geometry: Geometry, name: str) -> tuple[np.ndarray, Shape]:
    """Return the image as `to_image` does, and the rows and columns that the file has.

    Raises:
        BadImage: As `to_image`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metadata are not used
            image, shape = _decode(content, geometry, name)
            return _fit(image, geometry), shape
    except BadImage:
        raise
    except Exception as error:  # decoders raise many types for damaged bytes
        raise BadImage(str(error) or type(error).__name__) from error


def _decode(content: bytes, geometry: Geometry, name: str) -> tuple[np.ndarray, Shape]:
    """Decode to uint8 (row, column, 3), RGB, in the size of the file or an integer fraction of it.

    Returns:
        The image, and the file's own rows and columns.
    """
    if not content.startswith(b"\xff\xd8"):
        return _decode_with_pillow(content, geometry, name)
    height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    _check_size(height, width)
    if colours in ("CMYK", "YCCK"):
        simplejpeg.decode_jpeg(content, "CMYK")  # raises if the data are corrupt
        return _decode_with_pillow(content, geometry, name)
    enough = 2 * geometry.size if min(height, width) >= 4 * geometry.size else 0  # 0: full size
    image: np.ndarray = simplejpeg.decode_jpeg(
        content, "RGB", min_height=enough, min_width=enough, min_factor=2
    )
    may_be_rotated = (
        b"Exif" in content or b"Orientation" in content
    )  # XMP has the latter; a full parse by Pillow is slower
    if may_be_rotated and geometry.orientation == "apply":
        image = _rotated(image, content)
    return image, (height, width)


def open_by_pillow(content: bytes, name: str) -> Image.Image:
    """Open an image of a format that Pillow decodes itself. Its pixels are not read.

    Args:
        content: The file.
        name: The file's name, whose suffix names the formats without a signature.

    Raises:
        BadImage: It is no such image, or has more than MAX_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes below MAX_PIXELS
            opened = Image.open(io.BytesIO(content), formats=formats_of(name))
    except UnidentifiedImageError as error:
        raise BadImage(f"is {NO_IMAGE}" if content else "is empty") from error
    except Image.DecompressionBombError as error:
        raise BadImage(str(error)) from error
    _check_size(opened.height, opened.width)
    return opened


def _decode_with_pillow(content: bytes, geometry: Geometry, name: str) -> tuple[np.ndarray, Shape]:
    with open_by_pillow(content, name) as opened:
        if opened.format == "PNG":
            Image.open(io.BytesIO(content), formats=("PNG",)).verify()  # load() ignores the pixels' checksums
        opened.load()
        check_range(opened)
        turn = turn_of(opened) if geometry.orientation == "apply" else None
        upright = opened if turn is None else opened.transpose(turn)
        return np.array(_to_rgb(upright)), (opened.height, opened.width)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode of Pillow to RGB. Transparent parts become white."""
    if image.mode.startswith("I;16") or image.mode == "I":  # 16 bits per pixel, which convert() would clip
        levels = np.asarray(image).astype(np.int64)
        is_clear = levels == image.info.get("transparency", -1)  # the one transparent level of a PNG
        image = Image.fromarray(np.where(is_clear, 255, np.clip(levels >> 8, 0, 255)).astype(np.uint8))
    if image.has_transparency_data:
        background = Image.new("RGBA", image.size, "white")
        background.alpha_composite(image.convert("RGBA"))
        image = background
    return image.convert("RGB")


def _rotated(image: np.ndarray, content: bytes) -> np.ndarray:
    """Return a decoded JPEG rotated as its EXIF orientation says."""
    with Image.open(io.BytesIO(content), formats=("JPEG",)) as opened:
        turn = turn_of(opened)
    return image if turn is None else np.array(Image.fromarray(image).transpose(turn))


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise BadImage(f"claims {width} x {height} pixels, more than {MAX_PIXELS:,}")


def _fit(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Resize uint8 (row, column, 3) to (size, size, 3)."""
    size = geometry.size
    height, width = image.shape[:2]
    if geometry.resize == "squash":
        return resized(image, size, size)
    if geometry.resize == "crop":
        image = _center(image, *(min(side, _MAX_ASPECT * min(height, width)) for side in (height, width)))
        return _center(resized(image, *_scaled(image, size, min(image.shape[:2]))), size, size)
    inside = resized(image, *_scaled(image, size, max(height, width)))
    padded = np.zeros((size, size, 3), np.uint8)
    _center(padded, *inside.shape[:2])[...] = inside
    return padded


def _scaled(image: np.ndarray, size: int, side: int) -> tuple[int, int]:
    """Return height and width scaled so that `side` becomes `size`."""
    return max(1, round(image.shape[0] * size / side)), max(1, round(image.shape[1] * size / side))


def _center(image: np.ndarray, height: int, width: int) -> np.ndarray:
    row, column = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[row : row + height, column : column + width]
