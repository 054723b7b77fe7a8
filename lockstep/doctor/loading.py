"""The images per second that loaders can deliver: the lowest of the measured rates on their way."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep.backends.devices import on_gpus
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor import storage
from lockstep.doctor.report import TRY_SECONDS, Finding, Report
from lockstep.doctor.storage import Sample
from lockstep.launch.ranks import try_ranks

SIZE, CROP, BATCH = 256, 227, 128
IMAGE_BYTES = SIZE * SIZE * 3
_ROUNDS = 3

Rates = tuple[float, float]  # of one alone, and the sum of all at once
Work = tuple[float, float]  # images per second: reading, and reading with preparing


def examine(
    report: Report, batches: Path | None, scratch: Path, devices: tuple[str, ...], copies: Rates | None
) -> None:
    """Measure and show what limits loading, for one loader and for one per device.

    Args:
        report: Gets the results.
        batches: A folder of .hkl files, or None.
        scratch: A folder in which a temporary file may be written.
        devices: The devices of the run.
        copies: GB/s to the devices; None for CPUs, or if unknown.
    """
    with storage.open_sample(batches, scratch) as sample:
        disk, cached, lines = storage.measure(sample)
        for line in lines:
            report.show(line)
        outcomes = try_ranks(_load, len(devices), cached, seconds=TRY_SECONDS)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    if problems:
        report.show(Finding("loaders", f"can't be tried: {problems[0]}", wrong=True))
        return
    (read, prepare), _ = outcomes[0].value
    all_read, all_prepare = (sum(outcome.value[1][i] for outcome in outcomes) for i in (0, 1))
    rates = {"page cache": (read, all_read)}
    if not on_gpus(devices):  # GPUs prepare images in the trainer
        rates["read, crop, mirror, mean"] = prepare, all_prepare
    if copies:
        rates["copy to the GPU"] = _images(copies[0]), _images(copies[1])
    from_disk = {} if disk is None else {"disk": (_images(disk),) * 2}
    _show(report, len(devices), from_disk, rates)


def _show(report: Report, n_loaders: int, disk: dict[str, Rates], rates: dict[str, Rates]) -> None:
    report.title(f"Loading: images of {SIZE} x {SIZE} x 3 bytes a second")
    report.show(Finding("", f"{'1 loader':>12}{f'all {n_loaders}':>12}"))
    for name, (single, combined) in {**disk, **rates}.items():
        report.show(Finding(name, f"{single:12,.0f}{combined:12,.0f}"))
    if disk:
        report.show(Finding("from the disk, then", _least({**disk, **rates}, n_loaders)))
    report.show(Finding("from the page cache, then", _least(rates, n_loaders)))
    report.show(
        Finding("not measured", "the network's speed, and what it leaves of the cores: train.py shows both")
    )


def _least(rates: dict[str, Rates], n_loaders: int) -> str:
    single, combined = (min(rates, key=lambda name: rates[name][i]) for i in (0, 1))
    return (
        f"at most {rates[single][0]:,.0f} with 1 loader ({single}), "
        f"{rates[combined][1]:,.0f} with {n_loaders} ({combined})"
    )


def _load(rank: int, pipes: dict[int, Pipe], sample: Sample) -> tuple[Work | None, Work]:
    """Measure in each loader process: the first one separately, then all at once."""
    import torch  # imported late: the doctor also works if torch is broken

    torch.set_num_threads(1)
    group, work = Group.on_one_host(rank, pipes), _make_work(sample)
    single = work() if rank == 0 else None
    group.barrier("the first one has measured")
    return single, work()


def _make_work(sample: Sample) -> Callable[[], Work]:
    from lockstep.data.augment import Augmenter

    images = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    buffer = images.reshape(-1).data
    random = np.random.default_rng(0)
    crops = random.integers(0, (SIZE - CROP, SIZE - CROP, 2), (BATCH, 3), dtype=np.int32)
    out = np.empty((BATCH, CROP, CROP, 3), np.float32)
    augmenter = Augmenter(np.full((SIZE, SIZE, 3), 120, np.float32), (CROP, CROP))

    def read() -> None:
        for _ in sample.read(buffer):
            pass

    def read_and_prepare() -> None:
        for n_bytes in sample.read(buffer):
            n_images = n_bytes // IMAGE_BYTES
            augmenter.apply(images[:n_images], crops[:n_images], out[:n_images])

    return lambda: (_rate(read, sample), _rate(read_and_prepare, sample))


def _rate(work: Callable[[], None], sample: Sample) -> float:
    """Return the median images per second after a warm-up."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sample.n_bytes / IMAGE_BYTES / statistics.median(seconds[1:])


def _images(gb_per_second: float) -> float:
    return gb_per_second * 1e9 / IMAGE_BYTES
