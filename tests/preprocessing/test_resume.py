"""Preprocessing that is killed or stopped, or meets bad images: it resumes to the unbroken result."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import imagenet
import numpy as np
import pytest
from conftest import ROOT, make_config, processes_of_session, wait_until
from dataset_folders import read_all
from held_files import HeldFile
from imagenet import WNIDS
from limits import limit

from lockstep.data import hkl
from lockstep.data.dataset import check_content, open_dataset
from lockstep.data.randomness import Purpose, generator
from lockstep.errors import UserError
from preprocessing import build, make_hkl, tasks, workers
from preprocessing.journal import Journal
from preprocessing.listing import SourceImage
from preprocessing.sums import PixelSums

WORDS = ("--size", "64", "--batch", "4")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return imagenet.build(tmp_path_factory.mktemp("imagenet")).folders


@pytest.fixture(scope="module")
def unbroken(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("made") / "set"
    assert make(pictures, folder) == 0
    return read_all(folder)


def make(*words: object, n_workers: int = 1) -> int:
    return make_hkl.main([*map(str, words), *WORDS, "--workers", str(n_workers)])


def start(*words: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "preprocessing" / "make_hkl.py"), *map(str, words), *WORDS]
    command += ["--workers", "2"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


class Held:
    """The same images; one of the fourth batch and one of the fifth keep their readers waiting."""

    def __init__(self, pictures: Path, folder: Path) -> None:
        shutil.copytree(pictures, folder)
        self.folder = folder
        paths = sorted(folder.glob("train/*/*"))
        order = generator(0, 0, Purpose.ORDER).permutation(len(paths))
        self._files = [HeldFile(paths[place]) for place in order[[12, 16]]]

    def await_workers(self, running: "subprocess.Popen[str]") -> None:
        def are_read() -> bool:
            return all(file.has_reader() for file in self._files)

        wait_until(lambda: are_read() or running.poll() is not None, "the workers to read both")
        assert running.poll() is None, running.communicate()

    def let_go(self) -> None:
        """Let workers that are still there read their images."""
        for file in self._files:
            file.release()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_killed_or_stopped_it_goes_on_to_the_same_bytes(
    pictures: Path, unbroken: dict[str, bytes], tmp_path: Path, number: int
) -> None:
    held = Held(pictures, tmp_path / "images")
    running = start(held.folder, tmp_path / "set")
    held.await_workers(running)
    os.killpg(running.pid, number) if number == signal.SIGINT else os.kill(running.pid, number)
    held.let_go()
    _, error = running.communicate(timeout=limit(60))
    assert running.returncode == (130 if number == signal.SIGINT else -number), error
    assert "resource_tracker" not in error
    wait_until(lambda: processes_of_session(running.pid) == [], "workers to be gone", 10)
    assert not (tmp_path / "set").exists()
    unfinished = build.unfinished(tmp_path / "set")
    assert 3 <= len(list(unfinished.glob("train_hkl/[0-9]*.hkl"))) < 12
    if number == signal.SIGINT:
        assert "the same command resumes" in error
        assert not list(unfinished.glob("*/.*"))  # nothing half-written
    for path in unfinished.glob("train_hkl/[0-9]*.hkl"):
        hkl.read(path)  # whole, every one
    kept = {path.name: path.stat().st_ino for path in unfinished.glob("train_hkl/0*.hkl")}
    assert make(held.folder, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == unbroken
    now = {path.name: path.stat().st_ino for path in (tmp_path / "set").glob("train_hkl/0*.hkl")}
    # Those that the journal had were not made again; it is written now and then, the first time at once.
    assert any(now[name] == inode for name, inode in kept.items())
    assert not build.unfinished(tmp_path / "set").exists()


@pytest.mark.parametrize(
    "sigterm",
    [
        pytest.param(signal.SIG_DFL, id="alone"),
        pytest.param(signal.SIG_IGN, id="inside train.py", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_ends_it_with_a_message(
    pictures: Path, tmp_path: Path, sigterm: signal.Handlers
) -> None:
    """A conversion that train.py starts ignores SIGTERM, and so do its workers."""
    held = Held(pictures, tmp_path / "images")
    before = signal.signal(signal.SIGTERM, sigterm)
    try:
        running = start(held.folder, tmp_path / "set")
    finally:
        signal.signal(signal.SIGTERM, before)
    held.await_workers(running)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    is_worker = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(is_worker[-1]), signal.SIGKILL)
    _, error = running.communicate(timeout=limit(60))
    assert running.returncode == 2 and "a worker process was killed" in error.splitlines()[-1]
    held.let_go()
    assert make(held.folder, tmp_path / "set") == 0


def stop_after(pictures: Path, folder: Path, n_batches: int, monkeypatch, *words: str) -> None:
    with monkeypatch.context() as patch:
        left = [n_batches]

        def interrupt(task, target):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return tasks.make_files(task, target)

        patch.setattr(build, "make_files", interrupt)
        assert make(pictures, folder, *words) == 130


def test_a_finished_batch_that_was_damaged_is_made_again(
    pictures: Path, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch
) -> None:
    stop_after(pictures, tmp_path / "set", 6, monkeypatch)
    unfinished = build.unfinished(tmp_path / "set")
    os.truncate(unfinished / "train_hkl" / "0001.hkl", 100)
    (unfinished / "train_hkl" / "0003.hkl").unlink()
    (unfinished / "train_hkl" / ".0009.hkl.x").write_bytes(b"left by a killed worker")
    assert make(pictures, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == unbroken


@pytest.mark.parametrize("n_batches", [0, 1, 5, 8])
def test_wherever_it_stops_the_result_is_the_same(
    pictures: Path, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch, n_batches: int
) -> None:
    """Stopped twice, the second time with a journal that is behind."""
    stop_after(pictures, tmp_path / "set", n_batches, monkeypatch)
    monkeypatch.setattr(Journal, "write", lambda self: None)
    stop_after(pictures, tmp_path / "set", n_batches, monkeypatch)
    monkeypatch.undo()
    assert make(pictures, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == unbroken


def test_an_interrupt_between_sums_and_record_counts_no_image_twice(
    pictures: Path, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch
) -> None:
    merge, n_merged = PixelSums.merge, 0

    def interrupted(sums: PixelSums, other: PixelSums) -> None:
        nonlocal n_merged
        n_merged += 1
        merge(sums, other)
        if n_merged == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(PixelSums, "merge", interrupted)
        assert make(pictures, tmp_path / "set") == 130
    assert make(pictures, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == unbroken


def test_a_folder_with_images_of_the_same_names_does_not_go_on(
    pictures: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(pictures, tmp_path / "other"))
    stop_after(pictures, tmp_path / "set", 3, monkeypatch)
    assert make(other, tmp_path / "set") == 2
    error = capsys.readouterr().err
    assert f"was started with images in {pictures}/train/" in error and f", not {other}/train/" in error
    (tmp_path / "link").symlink_to(pictures)
    assert make(tmp_path / "link", tmp_path / "set") == 0


def test_a_folder_that_appears_meanwhile_is_not_replaced(
    pictures: Path, unbroken: dict[str, bytes], tmp_path: Path, monkeypatch
) -> None:
    def meanwhile(task, target):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / "mine").touch()
        return tasks.make_files(task, target)

    with monkeypatch.context() as patch:
        patch.setattr(build, "make_files", meanwhile)
        assert make(pictures, tmp_path / "set") == 2
    (tmp_path / "set" / "mine").unlink()
    (tmp_path / "set").rmdir()
    monkeypatch.setattr(build, "make_files", lambda *words: pytest.fail("all was done"))
    assert make(pictures, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == unbroken


def test_other_settings_or_pictures_do_not_go_on(
    pictures: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "images"
    shutil.copytree(pictures, source)
    stop_after(source, tmp_path / "set", 3, monkeypatch)
    assert make(source, tmp_path / "set", "--resize", "crop") == 2
    assert "was started with resize squash, not crop" in capsys.readouterr().err
    next((source / "train" / WNIDS[0]).iterdir()).unlink()
    assert make(source, tmp_path / "set") == 2
    assert "was started with other images" in capsys.readouterr().err
    (build.unfinished(tmp_path / "set") / ".journal.npz").write_bytes(b"PK and so on")
    assert make(source, tmp_path / "set") == 2
    assert "can't be read" in capsys.readouterr().err


@pytest.fixture
def with_bad_ones(pictures: Path, tmp_path: Path) -> Path:
    source = tmp_path / "images"
    shutil.copytree(pictures, source)
    (source / "train" / WNIDS[1] / f"{WNIDS[1]}_3.JPEG").write_bytes(b"not an image")
    good = (source / "train" / WNIDS[3] / f"{WNIDS[3]}_8.JPEG").read_bytes()
    (source / "train" / WNIDS[3] / f"{WNIDS[3]}_8.JPEG").write_bytes(good[: len(good) // 2])
    (source / "val" / "ILSVRC2012_val_00000004.JPEG").write_bytes(b"")
    return source


def assert_labels_match(folder: Path, n_train: int, n_val: int) -> None:
    dataset = open_dataset(make_config(data_folder=str(folder), n_classes=None))
    assert (len(dataset.train), len(dataset.val)) == (n_train, n_val)
    for split in (dataset.train, dataset.val):
        images = np.concatenate([hkl.read(file.path) for file in split.files])
        assert [imagenet.label_of(image) for image in images] == split.labels.tolist()
    check_content(dataset)


def test_bad_pictures_are_skipped_and_listed(
    with_bad_ones: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    assert make(with_bad_ones, folder) == 2
    said = capsys.readouterr().err
    assert ".JPEG: can't be used: " in said and "with --layout c01b, replace only" in said
    assert make(with_bad_ones, folder, "--on-error", "skip") == 0  # resumes
    assert_labels_match(folder, 43, 19)
    report = (folder / "misc" / "bad_pictures.txt").read_text().splitlines()
    assert len(report) == 4 and all(line.endswith("\tleft out") for line in report[1:])
    assert (
        f"{with_bad_ones}/train/{WNIDS[1]}/{WNIDS[1]}_3.JPEG\tis no image that Pillow reads"
        in report[1] + report[2]
    )
    stop_after(with_bad_ones, tmp_path / "again", 12, monkeypatch, "--on-error", "skip")
    assert make(with_bad_ones, tmp_path / "again", "--on-error", "skip") == 0
    assert read_all(tmp_path / "again") == read_all(folder)


def test_bad_pictures_are_replaced_by_the_next_of_their_class(with_bad_ones: Path, tmp_path: Path) -> None:
    assert make(with_bad_ones, tmp_path / "set", "--on-error", "replace") == 0
    assert_labels_match(tmp_path / "set", 45, 20)
    names = (tmp_path / "set" / "misc" / "train_order.txt").read_text().split()
    assert names.count(f"{WNIDS[1]}/{WNIDS[1]}_4.JPEG") == 2 and f"{WNIDS[1]}/{WNIDS[1]}_3.JPEG" not in names
    assert names.count(f"{WNIDS[3]}/{WNIDS[3]}_0.JPEG") == 2  # the first follows the last


def test_too_many_bad_pictures_end_it(
    with_bad_ones: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (with_bad_ones, tmp_path / "set", "--on-error", "skip", "--max-errors")
    assert make(*words, 2) == 2
    assert "that makes 3 bad images, more than --max-errors 2" in capsys.readouterr().err
    assert make(*words, 2) == 2
    assert make(*words, 3) == 0
    assert_labels_match(tmp_path / "set", 43, 19)


def test_files_that_could_not_be_read_are_tried_again(
    pictures: Path,
    unbroken: dict[str, bytes],
    tmp_path: Path,
    monkeypatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A network disk may have been away for a while."""
    read, n_read = SourceImage.read, 0

    def failing(image: SourceImage) -> bytes:
        nonlocal n_read
        n_read += 1
        if 15 <= n_read < 20:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(image)

    with monkeypatch.context() as patch:
        patch.setattr(SourceImage, "read", failing)
        assert make(pictures, tmp_path / "set", "--on-error", "skip", "--max-errors", "4") == 2
    assert "Stale file handle; that makes 5 bad images" in capsys.readouterr().err
    assert make(pictures, tmp_path / "set", "--on-error", "skip", "--max-errors", "4") == 0
    assert "going on: 3 of 17 batches are done" in capsys.readouterr().out
    found = read_all(tmp_path / "set")
    assert {name for name in found if found[name] != unbroken[name]} == {"manifest.json"}  # it has on_error
    assert found.keys() == unbroken.keys()


def test_a_full_disk_is_seen_before_anything_is_written(
    pictures: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert make(pictures, tmp_path / "set") == 2
    said = capsys.readouterr()
    assert "GB free, 0.07 GB are needed" in said.err and "the images take 0.00 GB" in said.out
    assert list(tmp_path.iterdir()) == []


def test_checksums_on_request(pictures: Path, tmp_path: Path) -> None:
    assert make(pictures, tmp_path / "set") == 0
    path = tmp_path / "set" / "val_hkl" / "0002.hkl"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    config = make_config(data_folder=str(tmp_path / "set"), n_classes=None)
    with pytest.raises(UserError, match=r"val_hkl/0002\.hkl: its checksum is not the manifest's"):
        check_content(open_dataset(config))
    train = [sys.executable, str(ROOT / "train.py"), f"data_folder={tmp_path}/set", "check_sums=true"]
    done = subprocess.run(train, capture_output=True, text=True, timeout=limit(60), cwd=tmp_path)
    assert done.returncode == 2 and "val_hkl/0002.hkl: its checksum" in done.stderr
    path.write_bytes(content + b"x")
    with pytest.raises(UserError, match=r"val_hkl/0002\.hkl: has \d+ bytes, the manifest says"):
        open_dataset(config)


def test_two_at_once_do_not_mix(
    pictures: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []

    def meanwhile(task, target):
        if not codes:
            codes.append(99)
            codes.append(make(pictures, tmp_path / "set"))
        return tasks.make_files(task, target)

    monkeypatch.setattr(build, "make_files", meanwhile)
    assert make(pictures, tmp_path / "set") == 0 and codes == [99, 2]
    assert "another process is working in it" in capsys.readouterr().err


def wait_and_return(item: int) -> int:
    time.sleep(0.2 if item == 0 else 0)
    return item * item


@pytest.mark.slow
def test_results_come_as_they_are_ready() -> None:
    found = list(workers.in_parallel(wait_and_return, range(12), 2))
    assert sorted(found) == [(item, item * item) for item in range(12)]
    assert [item for item, _ in found] != list(range(12))
