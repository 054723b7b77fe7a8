"""How many pictures a second loaders can bring: the least of all the rates on the way, each measured now."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep.backends.devices import on_gpus
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.doctor import storage
from lockstep.doctor.report import Line, Report
from lockstep.doctor.storage import Sample
from lockstep.launch.ranks import try_ranks

SIZE, CROP, BATCH = 256, 227, 128
PICTURE_BYTES = SIZE * SIZE * 3
_ROUNDS = 3
_SECONDS = 120.0  # torch is imported from a cold disk, perhaps

Rates = tuple[float, float]  # of one alone, and of all at once together
Work = tuple[float, float]  # pictures a second: reading, and reading and preparing


def examine(
    report: Report, batches: Path | None, scratch: Path, devices: tuple[str, ...], copies: Rates | None
) -> None:
    """Measures, and shows what bounds loading, for one loader and for one beside each device.

    batches: a folder of .hkl files, or None. scratch: where a file may be written. copies: GB/s to the
    devices; None where they are CPUs, or it is not known.
    """
    with storage.open_sample(batches, scratch) as sample:
        speeds, cached, lines = storage.measure(sample)
        for line in lines:
            report.show(line)
        outcomes = try_ranks(_load, len(devices), cached, seconds=_SECONDS)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    if problems:
        report.show(Line("loaders", f"can't be tried: {problems[0]}", wrong=True))
        return
    (read, prepare), _ = outcomes[0].value
    all_read, all_prepare = (sum(outcome.value[1][i] for outcome in outcomes) for i in (0, 1))
    rates = {"page cache": (read, all_read)}
    if not on_gpus(devices):  # GPUs prepare pictures themselves
        rates["read, crop, mirror, mean"] = prepare, all_prepare
    if copies:
        rates["copy to the GPU"] = _pictures(copies[0]), _pictures(copies[1])
    disk = {} if speeds.disk is None else {"disk": (_pictures(speeds.disk),) * 2}
    _show(report, len(devices), disk, rates)


def _show(report: Report, n_loaders: int, disk: dict[str, Rates], rates: dict[str, Rates]) -> None:
    report.title(f"Loading: pictures of {SIZE} x {SIZE} x 3 bytes a second")
    report.show(Line("", f"{'1 loader':>12}{f'all {n_loaders}':>12}"))
    for name, (alone, together) in {**disk, **rates}.items():
        report.show(Line(name, f"{alone:12,.0f}{together:12,.0f}"))
    if disk:
        report.show(Line("from the disk, then", _least({**disk, **rates}, n_loaders)))
    report.show(Line("from the page cache, then", _least(rates, n_loaders)))
    report.show(
        Line("not measured", "the network's speed, and what it leaves of the cores: train.py shows both")
    )


def _least(rates: dict[str, Rates], n_loaders: int) -> str:
    alone, together = (min(rates, key=lambda name: rates[name][i]) for i in (0, 1))
    return (
        f"at most {rates[alone][0]:,.0f} with 1 loader ({alone}), "
        f"{rates[together][1]:,.0f} with {n_loaders} ({together})"
    )


def _load(rank: int, pipes: dict[int, Pipe], sample: Sample) -> tuple[Work | None, Work]:
    """Runs in each loader: what the first one does alone, and what each does beside the others."""
    import torch  # not at the top: the doctor also speaks where torch is broken

    torch.set_num_threads(1)
    group, work = Group.on_one_host(rank, pipes), _make_work(sample)
    alone = work() if rank == 0 else None
    group.barrier("the first one has measured")
    return alone, work()


def _make_work(sample: Sample) -> Callable[[], Work]:
    from lockstep.data.augment import Augmenter

    images = np.empty((BATCH, SIZE, SIZE, 3), np.uint8)
    buffer = images.reshape(-1).data
    random = np.random.default_rng(0)
    crops = random.integers(0, (SIZE - CROP, SIZE - CROP, 2), (BATCH, 3), dtype=np.int32)
    out = np.empty((BATCH, CROP, CROP, 3), np.float32)
    augmenter = Augmenter(np.full((SIZE, SIZE, 3), 120, np.float32), CROP)

    def read() -> None:
        for _ in sample.read(buffer):
            pass

    def read_and_prepare() -> None:
        for n_bytes in sample.read(buffer):
            n_images = n_bytes // PICTURE_BYTES
            augmenter.apply(images[:n_images], crops[:n_images], out[:n_images])

    return lambda: (_rate(read, sample), _rate(read_and_prepare, sample))


def _rate(work: Callable[[], None], sample: Sample) -> float:
    """Pictures a second, of bytes that are as many: the median, after a warm-up."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return sample.n_bytes / PICTURE_BYTES / statistics.median(seconds[1:])


def _pictures(gb_per_second: float) -> float:
    return gb_per_second * 1e9 / PICTURE_BYTES
