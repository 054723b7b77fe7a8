"""The image formats that Pillow reads, recognized by a file's first bytes or its suffix."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from io import BytesIO

from PIL import Image, UnidentifiedImageError

# EPS and WMF are programs for other software. Pillow has no decoder of its own for the others.
_REFUSED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
NO_IMAGE = "no image that Pillow reads"


def formats_of(name: str) -> tuple[str, ...]:
    """Return the formats to try: those with a signature, and the one of the suffix of `name`."""
    named = _formats_by_suffix().get(os.path.splitext(name)[1].lower())
    return signed_formats() if named is None else (*signed_formats(), named)


@cache
def signed_formats() -> tuple[str, ...]:
    """Return the formats that begin with a signature, so that other files are not taken for them."""
    return tuple(name for name in _readable() if Image.OPEN[name][1])


@cache
def _formats_by_suffix() -> dict[str, str]:
    """Return each suffix in lower case with its format."""
    readable = _readable()
    return {suffix: name for suffix, name in Image.registered_extensions().items() if name in readable}


@cache
def _readable() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in Image.OPEN if name not in _REFUSED)


def why_no_image(name: str, get: Callable[[], str | BytesIO]) -> str | None:
    """Return why a file is not an image, or None if its suffix or its first bytes are those of an image.

    A damaged file with an image's suffix counts as an image; its reader reports the damage.

    Args:
        name: The file's name.
        get: Returns its path or its bytes. It is called only if the suffix does not suffice.
    """
    if os.path.splitext(name)[1].lower() in _formats_by_suffix():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Image.open(get(), formats=signed_formats()).close()
    except UnidentifiedImageError:
        return NO_IMAGE
    except OSError as error:
        return f"can't be read: {error.strerror}" if error.strerror else NO_IMAGE
    except Image.DecompressionBombError:
        return None  # its reader refuses it with the reason
    except Exception:  # Pillow's readers raise many types for other files
        return NO_IMAGE
    return None
