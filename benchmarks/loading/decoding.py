"""Decoding of JPEGs to 256 x 256 beside other libraries, by one and two workers; conversion of layouts."""

import importlib.util
import io
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image

from benchmarks.measure import medians, table
from lockstep.data import c01b, hkl
from preprocessing.images import Geometry, to_image
from preprocessing.listing import SourceImage
from preprocessing.tasks import ImageBatch, Target, Task, make_files
from preprocessing.workers import in_parallel

SIZE = 256
N_PICTURES = 16  # different ones, of 500 x 375 as most of ImageNet's
N_TASKS, PER_TASK = 40, 64  # for the comparison of one and two workers

Peer = Callable[[bytes], np.ndarray]


def run() -> tuple[str, dict[str, Any]]:
    """Return the tables and the numbers."""
    torch.set_num_threads(1)
    pictures = [encode(photograph(375, 500, number)) for number in range(N_PICTURES)]
    sections = [measure_decoding(pictures), measure_workers(pictures), measure_layouts()]
    text = "\n".join(section for section, _ in sections)
    return text, {key: value for _, values in sections for key, value in values.items()}


def photograph(height: int, width: int, seed: int) -> Image.Image:
    """Return an image like a photograph: smooth noise at several scales, and a little grain."""
    random = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for step in (4, 8, 16, 32, 64, 128):
        small = random.normal(size=(height // step + 2, width // step + 2, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(small[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            total[..., channel] += np.asarray(layer) * step**0.7
    pixels = 120 + 50 * total / total.std() + 4 * random.normal(size=(height, width, 1))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encode(picture: Image.Image) -> bytes:
    """Return an image as a JPEG file of quality 90."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


def peers() -> dict[str, Peer]:
    """Return the functions to compare, the plain Pillow loop first."""

    def pillow(content: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(content)) as picture:
            return np.asarray(picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))

    def simplejpeg_and_pillow(content: bytes) -> np.ndarray:
        picture = Image.fromarray(simplejpeg.decode_jpeg(content))
        return np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR))

    def pillow_and_torch(content: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(content)) as picture:
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(pixels, (SIZE, SIZE), mode="bilinear", antialias=True)
        return resized[0].permute(1, 2, 0).numpy()

    ours = partial(to_image, geometry=Geometry(SIZE))
    return {
        "Pillow: open, convert, resize": pillow,
        "simplejpeg, resized by Pillow": simplejpeg_and_pillow,
        "Pillow, resized by PyTorch": pillow_and_torch,
        **(opencv() if importlib.util.find_spec("cv2") else {}),
        "Lockstep: simplejpeg, resized by PyTorch": ours,
    }


def opencv() -> dict[str, Peer]:
    """Return OpenCV's two functions if it is installed; it is not a dependency."""
    import cv2

    cv2.setNumThreads(1)

    def resized(content: bytes, way: int) -> np.ndarray:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        return np.asarray(cv2.resize(image, (SIZE, SIZE), interpolation=way))

    return {
        "OpenCV, INTER_AREA": partial(resized, way=cv2.INTER_AREA),
        "OpenCV, INTER_LINEAR (no antialiasing)": partial(resized, way=cv2.INTER_LINEAR),
    }


def measure_decoding(pictures: list[bytes]) -> tuple[str, dict[str, Any]]:
    """Compare the rates and the quality of ways to decode. Return the table and the numbers."""

    def do_all(function: Peer) -> None:
        for content in pictures:
            function(content)

    implementations = peers()
    seconds = medians({name: partial(do_all, function) for name, function in implementations.items()})
    rates = {name: len(pictures) / value for name, value in seconds.items()}
    quality = {name: mean_psnr(function, pictures) for name, function in implementations.items()}
    plain = next(iter(rates.values()))
    rows: list[tuple[str, ...]] = [("what", "images a second", "of the plain loop", "PSNR, dB")]
    for name, rate in rates.items():
        rows.append((name, f"{rate:,.0f}", f"{rate / plain:.2f} x", f"{quality[name]:.1f}"))
    title = (
        f"JPEG of 500 x 375 to {SIZE} x {SIZE} on one core (PSNR against resizing in floating point, "
        "antialiased bilinear)"
    )
    return table(title, rows), {"decoding_per_second": rates, "decoding_psnr": quality}


def mean_psnr(function: Peer, pictures: list[bytes]) -> float:
    """Return the PSNR in dB against Pillow's decoder and its BILINEAR filter on float32."""
    found = []
    for content in pictures[:6]:
        with Image.open(io.BytesIO(content)) as picture:
            bands = [np.asarray(band, np.float32) for band in picture.split()]
        small = [Image.fromarray(band).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for band in bands]
        reference = np.stack([np.asarray(band) for band in small], -1)
        found.append(10 * np.log10(255**2 / np.mean((function(content) - reference) ** 2)))
    return float(np.mean(found))


def measure_workers(pictures: list[bytes]) -> tuple[str, dict[str, Any]]:
    """Return the images per second from image files to .hkl files, once all workers run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train_hkl").mkdir()
        found = []
        for number, content in enumerate(pictures):
            (folder / f"{number}.jpg").write_bytes(content)
            found.append(SourceImage(f"{number}.jpg", 0, str(folder / f"{number}.jpg")))
        chosen = tuple(found[number % N_PICTURES] for number in range(PER_TASK))
        batch = ImageBatch(chosen, (), Geometry(SIZE), "stop")
        tasks = [Task("train", number, batch) for number in range(N_TASKS)]
        work = partial(make_files, target=Target(folder, SIZE, PER_TASK, "b01c", 1))
        rates = {n_workers: rate_of(work, tasks, n_workers) for n_workers in (1, 2, 1, 2)}
    ratio = rates[2] / rates[1]
    rows: list[tuple[str, ...]] = [("workers", "images a second", "of one")]
    rows += [("1", f"{rates[1]:,.0f}", "1.00 x"), ("2", f"{rates[2]:,.0f}", f"{ratio:.2f} x")]
    title = "Files of images to .hkl files: decode, resize, sums, write to the disk (fsync), checksum"
    return table(title, rows), {"preprocessing_per_second": {str(key): value for key, value in rates.items()}}


def rate_of(work: Callable[[Task], Any], tasks: list[Task], n_workers: int) -> float:
    """Return the images per second between the fifth finished task and the last."""
    moments = [time.perf_counter() for _ in in_parallel(work, tasks, n_workers)]
    return (len(tasks) - 5) * PER_TASK / (moments[-1] - moments[4])


def measure_layouts() -> tuple[str, dict[str, Any]]:
    """Compare ways to turn planes of a file into images. Return the table and the numbers."""
    images = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 256), dtype=np.uint8)
    out = np.empty((256, SIZE, SIZE, 3), np.uint8)
    planes = images.reshape(3, -1, 256)

    def read(channel: int, pixel: int, part: np.ndarray) -> None:
        part[...] = planes[channel, pixel : pixel + len(part)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "0000.hkl"
        hkl.write_hickle2(path, images)
        file = hkl.as_c01b(hkl.inspect(path))
        seconds = medians(
            {
                "NumPy: out[...] = images.transpose(3, 1, 2, 0)": lambda: np.copyto(
                    out, images.transpose(3, 1, 2, 0)
                ),
                "Lockstep, from memory": lambda: c01b.read_images(read, images.shape, 0, out),
                "Lockstep, from a file in the page cache": lambda: hkl.read_rows(file, 0, out),
                "... 128 of its images": lambda: hkl.read_rows(file, 0, out[:128]),
            }
        )
    naive = next(iter(seconds.values()))
    rows: list[tuple[str, ...]] = [("what", "ms", "times as fast")]
    rows += [(name, f"{value * 1e3:.1f}", f"{naive / value:.1f} x") for name, value in seconds.items()]
    title = "theano_alexnet's (3, 256, 256, 256) to (256, 256, 256, 3), one thread"
    return table(title, rows), {"layout_seconds": seconds}
