"""Reading a batch of 256 images (50 MB) from the page cache, beside h5py, hickle and memcpy."""

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.measure import medians, table
from lockstep.data import hkl


def run() -> tuple[str, dict[str, Any]]:
    """Return the table and the numbers."""
    import hickle  # comes with setup-test; the other benchmarks run without it

    images = np.random.default_rng(0).integers(0, 256, (256, 256, 256, 3), dtype=np.uint8)
    buffer = np.empty_like(images)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.hkl"
        hkl.write(path, images)

        def h5py_read_direct() -> None:
            with h5py.File(path, "r") as file:
                file["data"].read_direct(buffer)

        def h5py_slice() -> None:
            with h5py.File(path, "r") as file:
                file["data"][...]

        array = hkl.inspect(path)
        seconds = medians(
            {
                "memcpy into a kept buffer: the limit": lambda: np.copyto(buffer, images),
                "Lockstep's reader into a kept buffer": lambda: hkl.read_rows(array, 0, buffer),
                "h5py read_direct into a kept buffer": h5py_read_direct,
                "h5py [...]": h5py_slice,
                "hickle.load": lambda: hickle.load(path),
            },
            rounds=15,
        )
    limit = min(seconds.values())
    rows: list[tuple[str, ...]] = [("what", "ms", "GB/s", "of memcpy")]
    for name, value in seconds.items():
        rate = f"{images.nbytes / value / 1e9:.1f}"
        rows.append((name, f"{value * 1e3:.2f}", rate, f"{limit / value:.0%}"))
    title = "Reading 256 images of 256 x 256 (50 MB) from the page cache, one thread"
    return table(title, rows), {"reading_seconds": seconds}
