"""Is loading hidden? The step on images that a loader process reads, against the step on a resident batch;
where the kernel that crops and mirrors should run, in the trainer or in the loader; and who should copy."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.lone import LoneTrainer
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.turns import Turn, device_turns, take_turns, try_out
from lockstep.data import hkl
from lockstep.data.hkl import HklArray

PRECISION = "bf16"  # the fastest step is the hardest to feed
# All but `augment_on: loader`, whose step can't be captured, run as a captured step: `cuda_graph` is auto.
_CASES: dict[str, dict[str, Any]] = {
    "upload: loader, read_threads: 1": {"upload": "loader", "read_threads": 1},
    "augment_on: loader, read_threads: 1": {"augment_on": "loader", "read_threads": 1},
    "upload: trainer, read_threads: 1": {"upload": "trainer", "read_threads": 1},
    "upload: loader, read_threads: 4": {"upload": "loader", "read_threads": 4},
    "upload: trainer, read_threads: 4": {"upload": "trainer", "read_threads": 4},
}
_PEER = "DataLoader, 12 workers, pin_memory"
_PEER_WORKERS = 12
_PEER_PREFETCHED = 2  # minibatches of each worker


def run(setting: Setting, work: Path, record: Record) -> None:
    folder = dataset_folder(setting, work)
    trainers: dict[str, LoneTrainer] = {}
    for name, keys in _CASES.items():
        with record.attempt(name):
            trainer = LoneTrainer(setting, folder, precision=PRECISION, shuffle_block=32, **keys)
            try_out(trainer.turn(trainer.loaded), trainer.synchronize)
            trainers[name] = trainer
    with record.attempt(_PEER):
        record.keep("peer", {_PEER: _peer(setting, folder), "DALI": "not measured: it is not installed"})
    with record.attempt("reader"):
        record.keep("reader", _read_in_threads(setting, folder))
    if not trainers:
        return
    first = next(iter(trainers.values()))
    with record.attempt("copies to the device"):
        record.keep("copies", _copies(first, setting))
    turns = {}
    for name, trainer in trainers.items():
        turns[f"{name}: resident"] = trainer.turn(trainer.resident)
        turns[f"{name}: loaded"] = trainer.turn(trainer.loaded)
        turns[f"{name}: loader alone"] = _single_loader(trainer)

    def keep(so_far: dict[str, dict[str, float]]) -> None:
        record.keep("cases", {name: _rates(name, so_far, setting) for name in trainers})

    timed = take_turns(turns, first.synchronize, setting, keep)
    cases = {name: _rates(name, timed, setting) for name in trainers}
    for name, trainer in trainers.items():
        with record.attempt(f"phases of {name}"):
            cases[name] |= _phases(trainer, setting.phase_steps)
            record.keep("cases", cases)
    rates = {name: cases[name]["loaded_images_per_second"] for name in cases}
    if len(rates) > 1:
        record.keep("faster", max(rates, key=lambda name: rates[name]))
    with record.attempt("closing"):
        for trainer in trainers.values():
            trainer.close()


def _rates(name: str, timed: dict[str, dict[str, float]], setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {
        kind: timed[f"{name}: {kind}"] for kind in ("resident", "loaded", "loader alone")
    }
    for kind, figures in list(found.items()):
        found[f"{kind.split()[0]}_images_per_second"] = setting.batch_size / figures["ms"] * 1e3
    return {**found, "share_of_resident": found["resident"]["ms"] / found["loaded"]["ms"]}


def _phases(trainer: LoneTrainer, n_steps: int) -> dict[str, Any]:
    phases = trainer.phases(trainer.loaded, n_steps)
    return {"phases_ms": phases, "load_wait_share": phases["load-wait"] / sum(phases.values())}


def _single_loader(trainer: LoneTrainer) -> Turn:
    """Minibatches as fast as they come, with nothing done but what makes them ready: the loader's limit."""

    def take() -> None:
        trainer.loaded.next()
        trainer.loaded.batch()
        trainer.loaded.release()

    return Turn(trainer.turn(trainer.loaded).prepare, take)


def _read_in_threads(setting: Setting, folder: Path) -> dict[str, float]:
    """Images a second from the page cache by 1, 2 and 4 threads, each with its part of every minibatch."""
    files = [hkl.inspect(path) for path in sorted((folder / "train_hkl").glob("*.hkl"))][: setting.n_files]
    out = np.zeros((setting.batch_size, *files[0].row_shape), np.uint8)
    found = {}
    for n_threads in (1, 2, 4):
        bounds = [setting.batch_size * part // n_threads for part in range(n_threads + 1)]
        spans = list(pairwise(bounds))
        rates = []
        with ThreadPoolExecutor(n_threads) as pool:
            for _ in range(setting.n_rounds):
                begin = time.perf_counter()
                for file in files:
                    list(pool.map(lambda span: hkl.read_rows(file, span[0], out[slice(*span)]), spans))  # noqa: B023
                rates.append(len(files) * setting.batch_size / (time.perf_counter() - begin))
        found[f"{n_threads} threads, images/s"] = median(rates)
    return found


class _Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The same files as arrays that are mapped, one image an item, with a crop and a mirror at random."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._paths = sorted((folder / "train_hkl").glob("*.hkl"))
        self._rows, self._margin = setting.batch_size, setting.picture // 8
        self._size = setting.picture - self._margin
        self._files: dict[int, HklArray] = {}

    def __len__(self) -> int:
        return len(self._paths) * self._rows

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        file, row = divmod(number, self._rows)
        if file not in self._files:
            self._files[file] = hkl.inspect(self._paths[file])
        picture = np.empty((1, *self._files[file].row_shape), np.uint8)
        hkl.read_rows(self._files[file], row, picture)
        top, left, mirror = torch.randint(0, self._margin, (3,)).tolist()
        crop = torch.from_numpy(picture[0, top : top + self._size, left : left + self._size])
        crop = crop.permute(2, 0, 1)
        return (crop.flip(2) if mirror % 2 else crop).contiguous(), 0


def _peer(setting: Setting, folder: Path) -> float:
    """Images/s of a DataLoader with workers and pin_memory, with the copy to the device and nothing else.

    The clock starts behind the minibatches that workers have ready by the time the first one arrives.
    """
    on_gpu = torch.cuda.is_available()
    n_workers = 2 if setting.rehearsal else _PEER_WORKERS
    loader = torch.utils.data.DataLoader(
        _Pictures(setting, folder),
        setting.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=n_workers,
        prefetch_factor=_PEER_PREFETCHED,
        pin_memory=on_gpu,
        multiprocessing_context="spawn",  # this process has CUDA
    )
    n_ready, n_timed, begin = n_workers * _PEER_PREFETCHED, 0, 0.0
    for number, (images, _) in enumerate(loader):
        images.to("cuda:0" if on_gpu else "cpu", non_blocking=True)
        n_timed = number - n_ready
        if not n_timed:
            begin = time.perf_counter()
    if on_gpu:
        torch.cuda.synchronize()
    return n_timed * setting.batch_size / (time.perf_counter() - begin)


def _copies(first: LoneTrainer, setting: Setting) -> dict[str, float]:
    """Measure copies from page-locked memory: no loader can be faster."""
    memory, size = first.memory, setting.copy_bytes // 4
    pinned, block = memory.pinned(size), memory.allocate(size, "copies from the host")
    pinned[:] = 1
    copy = partial(first.driver.memcpy_htod_async, block.pointer, pinned, first.stream)
    seconds = device_turns({"copy": copy}, first.driver, first.stream, 10, setting.n_rounds)["copy"]
    block.close()
    picture_bytes = setting.picture**2 * 3
    return {"gb_per_second": size / seconds / 1e9, "images_per_second": size / seconds / picture_bytes}
