"""Decoding and resizing: every kind of image, equal quality, and damaged files."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from preprocessing.images import MAX_PIXELS, BadImage, Geometry, to_image

RED, GREEN, BLUE = (250, 10, 10), (10, 250, 10), (10, 10, 250)


def photograph(height: int, width: int) -> Image.Image:
    """Something like a photograph: smooth noise at several scales."""
    random = np.random.default_rng(height)
    total = np.zeros((height, width, 3))
    for step in (8, 16, 32, 64, 128):
        small = random.normal(size=(height // step + 2, width // step + 2, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer) * step**0.7
    return Image.fromarray(np.clip(120 + 50 * total / total.std(), 0, 255).astype(np.uint8))


def encode(picture: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **({"quality": 92} if kind == "JPEG" else {}) | options)
    return file.getvalue()


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of uint8 or float images."""
    return 10 * float(np.log10(255**2 / max(1e-9, np.mean((one.astype(float) - other) ** 2))))


def quarters(mode: str = "RGB") -> Image.Image:
    """Red and green above, blue and white below, 80 wide, 60 high."""
    picture = Image.new("RGB", (80, 60), "white")
    for place, colour in (((0, 0), RED), ((40, 0), GREEN), ((0, 30), BLUE)):
        picture.paste(colour, (*place, place[0] + 40, place[1] + 30))
    return picture.convert(mode)


def assert_quarters(image: np.ndarray, tolerance: int = 12) -> None:
    size = len(image)
    assert image.dtype == np.uint8 and image.shape == (size, size, 3)
    near, far = size // 4, 3 * size // 4
    for row, column, colour in ((near, near, RED), (near, far, GREEN), (far, near, BLUE)):
        assert np.abs(image[row, column].astype(int) - colour).max() <= tolerance, (row, column)


@pytest.mark.parametrize("size", [(375, 500), (600, 450), (90, 120)])
def test_a_photograph_is_as_good_as_pillows_own_resizing(size: tuple[int, int]) -> None:
    """Against resizing in floating point. Pillow's BILINEAR rounds to whole levels too."""
    content = encode(photograph(*size))
    decoded = np.asarray(Image.open(io.BytesIO(content)), np.float32)
    channels = [
        Image.fromarray(decoded[..., c]).resize((128, 128), Image.Resampling.BILINEAR) for c in range(3)
    ]
    reference = np.stack([np.asarray(channel) for channel in channels], -1)
    pillow = np.asarray(Image.open(io.BytesIO(content)).resize((128, 128), Image.Resampling.BILINEAR))
    ours = psnr(to_image(content, Geometry(128)), reference)
    assert ours > 55 and ours > psnr(pillow, reference) - 0.5


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_large_jpegs_decoded_small_stay_within_the_documented_tolerance(resize) -> None:
    picture = photograph(1030, 1400)
    geometry = Geometry(128, resize)
    in_full = to_image(encode(Image.open(io.BytesIO(encode(picture))), "PNG"), geometry)
    assert 40 < psnr(to_image(encode(picture), geometry), in_full) < 90  # not equal: the short cut was taken


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "1", "L", "LA", "PA", "I;16", "I"])
def test_every_mode_of_png(mode: str) -> None:
    if mode in ("RGB", "RGBA", "P"):
        assert_quarters(to_image(encode(quarters(mode), "PNG"), Geometry(40)))
        return
    if mode == "PA":
        picture = quarters("P")
        picture.info["transparency"] = 255
    elif mode.startswith("I"):
        picture = Image.fromarray(np.asarray(quarters("L")).astype(np.uint16) * 257)
    else:
        picture = quarters(mode)
    image = to_image(encode(picture, "PNG"), Geometry(40))
    expected = np.asarray(quarters().convert("1" if mode == "1" else "L").convert("RGB").resize((40, 40)))
    if mode == "PA":
        assert_quarters(image, 30)
    elif mode == "1":
        assert set(np.unique(image[::10, ::10])) <= set(range(256)) and image.mean() > 50
    else:
        assert np.abs(image[5::10, 5::10].astype(int) - expected[5::10, 5::10]).max() <= 3


def test_transparency_gets_a_white_background() -> None:
    picture = quarters("RGBA")
    picture.paste((0, 0, 0, 0), (40, 30, 80, 60))
    image = to_image(encode(picture, "PNG"), Geometry(40))
    assert_quarters(image)
    assert (image[30, 30] == 255).all()


def test_the_transparent_level_of_16_bits_becomes_white() -> None:
    levels = np.full((60, 80), 40_000, np.uint16)
    levels[:, 40:] = 7
    image = to_image(encode(Image.fromarray(levels), "PNG", transparency=7), Geometry(40))
    assert (image[:, :18] == 40_000 >> 8).all() and (image[:, 22:] == 255).all()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpegs(mode: str) -> None:
    content = encode(quarters(mode))
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert psnr(to_image(content, Geometry(60, "crop")), expected[:, 10:70]) > 35


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "ICO"])
def test_what_a_file_is_called_does_not_matter(kind: str) -> None:
    assert_quarters(to_image(encode(quarters(), kind), Geometry(40)), 25)


def test_of_several_frames_the_first_counts() -> None:
    other = Image.new("RGB", (80, 60), "black")
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        content = encode(quarters(), kind, save_all=True, append_images=[other])
        assert_quarters(to_image(content, Geometry(40)), 25)


def test_a_format_without_a_signature_needs_its_suffix() -> None:
    content = encode(quarters(), "TGA")
    assert_quarters(to_image(content, Geometry(40), "a.TGA"))
    with pytest.raises(BadImage, match="no image that Pillow reads"):
        to_image(content, Geometry(40), "a.jpg")


def test_an_empty_file_is_called_so() -> None:
    with pytest.raises(BadImage, match="is empty"):
        to_image(b"", Geometry(8), "a.jpg")


def test_programs_that_draw_are_refused() -> None:
    """Pillow would run Ghostscript on EPS."""
    with pytest.raises(BadImage, match="no image that Pillow reads"):
        to_image(encode(quarters(), "EPS"), Geometry(40), "a.eps")


def test_floating_point_pixels_are_refused_with_a_reason() -> None:
    with pytest.raises(BadImage, match="floating-point pixels"):
        to_image(encode(Image.new("F", (9, 9), 0.5), "TIFF"), Geometry(8))


def test_32_bit_pixels_of_tiff_are_refused_and_16_bit_ones_are_read() -> None:
    levels = np.full((9, 9), 40_000, np.uint16)
    assert (to_image(encode(Image.fromarray(levels), "TIFF"), Geometry(8)) == 40_000 >> 8).all()
    with pytest.raises(BadImage, match="32-bit pixels, whose range is not known"):
        to_image(encode(Image.fromarray(levels.astype(np.int32)), "TIFF"), Geometry(8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_a_setting(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(quarters(), kind, exif=exif)
    as_stored = to_image(content, Geometry(40, "squash", "ignore"))
    assert_quarters(as_stored, 20)
    turned = to_image(content, Geometry(40))
    expected = {
        1: as_stored,
        2: as_stored[:, ::-1],
        3: as_stored[::-1, ::-1],
        4: as_stored[::-1],
        5: as_stored.swapaxes(0, 1),
        6: np.rot90(as_stored, -1),
        7: as_stored[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(as_stored),
    }[orientation]
    assert np.abs(turned.astype(int)[5::10, 5::10] - expected[5::10, 5::10]).max() <= 12


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_damaged_metadata_leave_an_image_as_it_is(kind: str) -> None:
    exif = b"Exif\0\0" * (kind != "PNG") + b"neither II nor MM"
    assert_quarters(to_image(encode(quarters(), kind, exif=exif), Geometry(40)), 25)


def test_crop_and_pad_keep_the_shape() -> None:
    """A black circle on white stays one: as wide as high."""
    disc = np.full((100, 300, 3), 255, np.uint8)
    rows, columns = np.ogrid[:100, :300]
    disc[(rows - 50) ** 2 + (columns - 150) ** 2 < 40**2] = 0
    content = encode(Image.fromarray(disc), "PNG")
    crop, pad, squash = (to_image(content, Geometry(90, r)) for r in ("crop", "pad", "squash"))
    black = {name: (image.sum(2) < 380) for name, image in (("crop", crop), ("pad", pad), ("squash", squash))}
    assert abs(int(black["crop"].any(0).sum()) - 72) <= 1 and abs(int(black["crop"].any(1).sum()) - 72) <= 1
    assert (pad[:29] == 0).all() and (pad[61:] == 0).all() and (pad[30:32] == 255).all()
    inside = black["pad"][31:59]
    assert abs(int(inside.any(0).sum()) - 24) <= 1 and abs(int(inside.any(1).sum()) - 24) <= 1
    assert (
        abs(int(black["squash"].any(0).sum()) - 24) <= 1 and abs(int(black["squash"].any(1).sum()) - 72) <= 1
    )


@given(height=st.integers(1, 70), width=st.integers(1, 70), resize=st.sampled_from(["squash", "crop", "pad"]))
@example(height=1, width=3000, resize="crop")
@example(height=3000, width=1, resize="pad")
def test_any_size_becomes_the_size(height: int, width: int, resize) -> None:
    content = encode(Image.new("RGB", (width, height), RED))
    image = to_image(content, Geometry(32, resize))
    assert image.shape == (32, 32, 3)
    assert np.abs(image[15:17, 15:17].astype(int) - RED).max(2).min() <= 8


def png_that_claims(width: int, height: int) -> bytes:
    small = encode(quarters(), "PNG")
    chunk = b"IHDR" + struct.pack(">II", width, height) + small[24:29]
    return small[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + small[33:]


def test_a_picture_that_claims_to_be_enormous_is_refused_undecoded() -> None:
    jpeg = bytearray(encode(photograph(64, 64)))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    for content in (bytes(jpeg), png_that_claims(60000, 60000), png_that_claims(11000, 11000)):
        with pytest.raises(BadImage, match=rf"more than {MAX_PIXELS:,}|exceeds limit"):
            to_image(content, Geometry(32))


WHOLE = encode(photograph(120, 160))


@settings(max_examples=80)
@given(st.integers(0, len(WHOLE) - 3))
def test_a_truncated_jpeg_is_refused(length: int) -> None:
    with pytest.raises(BadImage):
        to_image(WHOLE[:length], Geometry(32))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_other_truncated_files_are_refused(kind: str) -> None:
    whole = encode(photograph(60, 80), kind)
    for length in (0, 1, 9, 40, len(whole) // 2, len(whole) * 3 // 4):
        with pytest.raises(BadImage):
            to_image(whole[:length], Geometry(32))


@settings(max_examples=150)
@given(data=st.data())
def test_damaged_jpegs_are_refused_or_decode_as_libjpeg_says(data: st.DataObject) -> None:
    """Never a crash; and where libjpeg meets corrupt data, not the image that it makes up."""
    content = bytearray(WHOLE)
    place = data.draw(st.integers(2, len(content) - 9), "place")
    content[place : place + 8] = data.draw(st.binary(min_size=8, max_size=8), "damage")
    try:
        image = to_image(bytes(content), Geometry(32))
    except BadImage as error:
        assert str(error)
    else:
        assert image.shape == (32, 32, 3)


def test_corrupt_data_that_pillow_passes_over_is_refused() -> None:
    content = bytearray(WHOLE)
    content[len(content) // 2 : len(content) // 2 + 2] = b"\xff\xd9"  # the end, in the middle
    with pytest.raises(BadImage):
        to_image(bytes(content), Geometry(32))


def test_a_png_of_which_a_byte_has_changed_is_refused() -> None:
    whole = encode(photograph(60, 80), "PNG", compress_level=0)  # stored, so the decoder itself sees nothing
    content = bytearray(whole)
    content[len(content) // 2] ^= 255
    with pytest.raises(BadImage, match="checksum"):
        to_image(bytes(content), Geometry(32))


@settings(max_examples=60)
@given(
    st.binary(max_size=300), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"GIF89a"])
)
def test_bytes_that_are_no_picture_are_refused(content: bytes, start: bytes) -> None:
    with pytest.raises(BadImage):
        to_image(start + content, Geometry(32))
