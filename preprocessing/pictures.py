"""One picture: from the bytes of a file to a square RGB image.

JPEG is decoded by simplejpeg (libjpeg-turbo), which, unlike Pillow, also says when data are corrupt and would
come out as a wrong picture. Everything else, CMYK too, is Pillow's. A JPEG with both sides at least four
times as long as needed is decoded at half its size or less (the DCT's own scaling), never below twice what is
needed: photographs stay above 40 dB of PSNR against decoding in full. Resizing is PyTorch's bilinear filter
with antialiasing, the same numbers as Pillow's BILINEAR (to one level), three times as fast.
"""

import io
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from lockstep.data.manifest import Resize

MAX_PIXELS = 100_000_000  # a picture that claims more is refused before it is decoded
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # others have decoders that nobody needs here
_ORIENTATION = 0x0112  # the EXIF tag
_MAX_ASPECT = 8  # crop: of longer pictures only the middle is resized

Orientation = Literal["ignore", "apply"]
ORIENTATIONS: tuple[Orientation, ...] = get_args(Orientation)


class BadPicture(ValueError):
    """A picture that can't be used, and why."""


@dataclass(frozen=True)
class Geometry:
    """size: rows and columns of the images, in pixels.

    squash: the whole picture, its sides scaled each for itself, as theano_alexnet did. crop: the short side
    becomes `size`, then the middle is cut out. pad: the long side becomes `size`, black is put at the short
    sides. orientation: whether the camera's note (EXIF) on which side is up is ignored, as theano_alexnet
    did, or applied.
    """

    size: int = 256
    resize: Resize = "squash"
    orientation: Orientation = "ignore"


def to_image(content: bytes, geometry: Geometry) -> np.ndarray:
    """The picture in a file's bytes as uint8 (size, size, 3), RGB. Raises BadPicture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, which are not used
            return _fit(_decode(content, geometry), geometry)
    except BadPicture:
        raise
    except UnidentifiedImageError as error:
        raise BadPicture(f"is in none of these formats: {', '.join(_FORMATS)}") from error
    except Exception as error:  # whatever decoders meet in damaged bytes
        raise BadPicture(str(error) or type(error).__name__) from error


def _decode(content: bytes, geometry: Geometry) -> np.ndarray:
    """uint8 (row, column, 3), RGB, as large as in the file or a whole fraction of that."""
    if not content.startswith(b"\xff\xd8"):
        return _decode_with_pillow(content, geometry)
    height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
    _check_size(height, width)
    if colours in ("CMYK", "YCCK"):
        simplejpeg.decode_jpeg(content, "CMYK")  # says whether the data are whole
        return _decode_with_pillow(content, geometry)
    enough = 2 * geometry.size if min(height, width) >= 4 * geometry.size else 0  # 0: in full
    image: np.ndarray = simplejpeg.decode_jpeg(
        content, "RGB", min_height=enough, min_width=enough, min_factor=2
    )
    return _turn(image, content) if geometry.orientation == "apply" else image


def _decode_with_pillow(content: bytes, geometry: Geometry) -> np.ndarray:
    with Image.open(io.BytesIO(content), formats=_FORMATS) as picture:
        _check_size(picture.height, picture.width)
        picture.load()
        upright = ImageOps.exif_transpose(picture) if geometry.orientation == "apply" else picture
        return np.array(_to_rgb(upright))


def _to_rgb(picture: Image.Image) -> Image.Image:
    """Any mode of Pillow's as RGB. What is transparent gets a white background."""
    if (
        picture.mode.startswith("I;16") or picture.mode == "I"
    ):  # 16 bits a pixel: convert() would cut them off
        levels = np.asarray(picture).astype(np.int64) >> 8
        picture = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        background = Image.new("RGBA", picture.size, "white")
        background.alpha_composite(picture.convert("RGBA"))
        picture = background
    return picture.convert("RGB")


def _turn(image: np.ndarray, content: bytes) -> np.ndarray:
    """A decoded JPEG as its EXIF orientation wants it."""
    with Image.open(io.BytesIO(content), formats=("JPEG",)) as picture:
        if picture.getexif().get(_ORIENTATION, 1) == 1:
            return image
        turned = Image.fromarray(image)
        turned.getexif()[_ORIENTATION] = picture.getexif()[_ORIENTATION]
        return np.array(ImageOps.exif_transpose(turned))


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise BadPicture(f"claims {width} x {height} pixels, more than {MAX_PIXELS:,}")


def _fit(image: np.ndarray, geometry: Geometry) -> np.ndarray:
    """An image of any size, uint8 (row, column, 3), as (size, size, 3)."""
    size = geometry.size
    height, width = image.shape[:2]
    if geometry.resize == "squash":
        return _resized(image, size, size)
    if geometry.resize == "crop":
        image = _middle(image, *(min(side, _MAX_ASPECT * min(height, width)) for side in (height, width)))
        return _middle(_resized(image, *_scaled(image, size, min(image.shape[:2]))), size, size)
    inside = _resized(image, *_scaled(image, size, max(height, width)))
    padded = np.zeros((size, size, 3), np.uint8)
    _middle(padded, *inside.shape[:2])[...] = inside
    return padded


def _scaled(image: np.ndarray, size: int, side: int) -> tuple[int, int]:
    """Height and width when `side` becomes `size`."""
    return max(1, round(image.shape[0] * size / side)), max(1, round(image.shape[1] * size / side))


def _middle(image: np.ndarray, height: int, width: int) -> np.ndarray:
    row, column = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[row : row + height, column : column + width]


def _resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    result: np.ndarray = resized[0].permute(1, 2, 0).numpy()
    return result
