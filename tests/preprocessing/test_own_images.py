"""A user's own folder of images, from the files to the set that a run trains on."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import hickle
import numpy as np
import pytest
from conftest import ROOT, make_config, processes_of_session, wait_until
from dataset_folders import read_all
from held_files import HeldFile
from limits import limit
from own_folders import COLOURS, images_below, write_classes, write_image, write_mixed

from lockstep.data.dataset import Dataset, open_dataset
from lockstep.errors import UserError
from lockstep.launch.checks import with_converted_images
from lockstep.signals import Interrupts
from preprocessing import bars, converting, make_hkl, own_images, tasks
from preprocessing.build import unfinished
from preprocessing.cache import candidates
from preprocessing.caffe_lists import read_list, read_names
from preprocessing.journal import Journal
from preprocessing.listing import Listing, SourceImage
from preprocessing.summary import class_lines

MADE = "source.json"


def convert(source: Path, **keys: object) -> Path:
    return own_images.convert(make_config(data_folder=str(source), n_classes=None, **keys))


def opened(folder: Path) -> Dataset:
    return open_dataset(make_config(data_folder=str(folder), n_classes=None))


def assert_colours(folder: Path) -> None:
    """Each image has its class's colour, or is grey."""
    dataset = opened(folder)
    colours = np.array([COLOURS[name] for name in dataset.class_names])
    for split in (dataset.train, dataset.val):
        images = np.concatenate([hickle.load(file.path) for file in split.files])
        means = images.mean((1, 2))
        is_grey = np.ptp(means, axis=1) < 2
        assert is_grey.mean() < 0.2
        assert np.abs(means - colours[split.labels])[~is_grey].max() < 25


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_classes(tmp_path / "mine", {"cat": 30, "dog": 20, "emu": 6})


def test_every_kind_of_file_is_converted_but_two_bad_ones(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, bad = write_mixed(tmp_path / "mine")
    assert len(list(images_below(source))) == 600
    folder = convert(source)
    dataset = opened(folder)
    assert len(dataset.train) + len(dataset.val) == 598
    assert dataset.class_names == ("cat", "dog", "emu")
    assert_colours(folder)
    said = capfd.readouterr().out
    assert "left out 1, unusable: is no image that Pillow reads: " in said
    for path in bad:
        assert said.count("bad_pictures.txt") == 1 and f": {path}\n" in said
        assert str(path) in (folder / "misc" / "bad_pictures.txt").read_text()
    hidden = [source / ".ipynb_checkpoints", source / "cat" / ".thumbnails"]
    assert f"left out 2, hidden: {hidden[1]}, {hidden[0]}\n" in said
    assert f"{folder}/misc/bad_pictures.txt and {folder}/misc/left_out.txt" in said
    assert "images by class: cat 20" in said
    assert "converted 598 images in " in said
    assert "smallest image: 20 x 30 (" in said or "smallest image: 30 x 20 (" in said


@pytest.mark.slow
def test_convert_reads_the_same_folder_alike(source: Path, tmp_path: Path) -> None:
    ours = read_all(convert(source))
    assert make_hkl.main([str(source), str(tmp_path / "set"), "--size", "36", "--resize", "crop"]) == 0
    theirs = read_all(tmp_path / "set")
    same = [name for name in theirs if not name.startswith("manifest")]
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert ours.keys() - theirs.keys() == {MADE}


def test_a_set_is_found_again(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = convert(source)
    assert folder == source.with_name("mine.lockstep") / "36x36"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capfd.readouterr()
    assert convert(source) == folder
    said = capfd.readouterr().out
    assert "converted before, in " in said and "images by class: cat 30, dog 20, emu 6" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_network_of_another_size_gets_its_own_set(source: Path) -> None:
    first = convert(source)
    second = convert(source, input_size=24)
    assert (first.name, second.name) == ("36x36", "28x28")
    assert opened(second).image_shape == (28, 28, 3)
    assert opened(first).image_shape == (36, 36, 3)


def test_each_val_split_has_its_own_set(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run keeps its validation images while another run validates on more of the folder."""
    first = convert(source)
    before = read_all(first)
    second = convert(source, val_split=0.5)
    assert (first.name, second.name) == ("36x36", "36x36_val_split_0.5")
    assert len(opened(second).val) > len(opened(first).val) and read_all(first) == before
    capfd.readouterr()
    assert convert(source, val_split=0.5) == second and convert(source) == first
    assert capfd.readouterr().out.count("converted before") == 2


def change(source: Path) -> None:
    """Add, change and remove images, and add a class."""
    random = np.random.default_rng(9)
    for number in range(100, 120):
        write_image(source / "cat" / f"{number}.png", COLOURS["cat"], (30, 30), random)
    write_image(source / "dog" / "003.png", COLOURS["dog"], (99, 99), random)
    (source / "dog" / "004.png").unlink()
    (source / "emu").rename(source / "bee")


def test_bringing_up_to_date_gives_the_bytes_of_a_new_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = convert(source)
    (folder / "train_hkl" / "stray").touch()  # not in the new set
    change(source)
    decoded: list[str] = []
    read = tasks.read_source_image
    monkeypatch.setattr(tasks, "read_source_image", lambda s, g: decoded.append(s.name) or read(s, g))
    assert convert(source) == folder
    new = [f"cat/{number}.png" for number in range(100, 120)]
    assert sorted(decoded) == sorted([*new, "dog/003.png", *(f"bee/{n:03d}.png" for n in range(6))])
    assert opened(folder).class_names == ("bee", "cat", "dog")
    updated = read_all(folder)
    shutil.rmtree(folder.parent)
    monkeypatch.undo()
    assert convert(source) == folder
    fresh = read_all(folder)
    assert updated.keys() == fresh.keys()
    assert [name for name in fresh if fresh[name] != updated[name]] == [MADE]  # it has the seconds


def test_adding_images_moves_none(source: Path) -> None:
    folder = convert(source)
    before = {split: set((folder / "misc" / name).read_text().splitlines()) for split, name in LISTS.items()}
    random = np.random.default_rng(3)
    for number in range(200, 260):
        write_image(source / "dog" / f"{number}.png", COLOURS["dog"], (20, 20), random)
    convert(source)
    for split, name in LISTS.items():
        assert set((folder / "misc" / name).read_text().splitlines()) >= before[split]


LISTS = {"train": "train_order.txt", "val": "val.txt"}


def test_a_damaged_earlier_set_gives_no_rows(source: Path) -> None:
    folder = convert(source)
    path = folder / "train_hkl" / "0000.hkl"
    content = bytearray(path.read_bytes())
    content[-1000:] = bytes(1000)
    path.write_bytes(content)
    change(source)
    (source / "bee").rename(source / "emu")
    assert_colours(convert(source))


def test_an_interrupted_conversion_resumes(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = read_all(convert(source))
    shutil.rmtree(source.with_name("mine.lockstep"))
    original, n_done = Journal.add, 0

    def add(journal: Journal, *words: object) -> None:
        nonlocal n_done
        n_done += 1
        original(journal, *words)
        if n_done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", add)
    with pytest.raises(KeyboardInterrupt):
        convert(source)
    folder = source.with_name("mine.lockstep") / "36x36"
    assert not folder.exists() and unfinished(folder).exists()
    monkeypatch.setattr(Journal, "add", original)
    capfd.readouterr()
    assert convert(source) == folder
    assert "going on: 1 of 2 batches are done" in capfd.readouterr().out
    assert {name for name in read_all(folder) if read_all(folder)[name] != expected[name]} <= {MADE}


def test_an_interrupted_conversion_of_other_images_is_begun_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(converting.cache, "make_record", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source)
    random = np.random.default_rng(3)
    write_image(source / "emu" / "000.png", COLOURS["cat"], (20, 20), random)  # the same name
    folder = convert(source)
    dataset = opened(folder)
    images = np.concatenate(
        [hickle.load(f.path) for half in (dataset.train, dataset.val) for f in half.files]
    )
    labels = np.concatenate([dataset.train.labels, dataset.val.labels])
    reds = images[labels == 2].mean((1, 2))[:, 0]
    assert (reds > 150).sum() == 1


def test_an_image_that_could_not_be_read_is_tried_again(
    source: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, read = source / "cat" / "003.png", SourceImage.read

    def failing(image: SourceImage) -> bytes:
        if image.path == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(image)

    monkeypatch.setattr(SourceImage, "read", failing)
    folder = convert(source)
    assert f"left out 1, unusable: Input/output error: {path}\n" in capfd.readouterr().out
    monkeypatch.undo()
    assert convert(source) == folder
    assert "up to date: 1 new or changed images" in capfd.readouterr().out
    assert not (folder / "misc" / "bad_pictures.txt").exists()
    assert convert(source) == folder
    assert "converted before" in capfd.readouterr().out


def test_an_unusable_image_with_a_tab_in_its_name_is_named(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (source / "dog" / "a\tb.png").touch()
    convert(source)
    assert rf"left out 1, unusable: is empty: {source}/dog/a\tb.png" in capfd.readouterr().out


def test_a_folder_that_changes_meanwhile_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = converting.build

    def build_slowly(*words: object) -> object:
        done = build(*words)
        write_image(source / "dog" / "new.png", COLOURS["dog"], (20, 20), np.random.default_rng(1))
        return done

    monkeypatch.setattr(converting, "build", build_slowly)
    with pytest.raises(
        UserError, match=r"mine: changed while it was converted: dog/new.png. The same command"
    ):
        convert(source)
    monkeypatch.undo()
    folder = convert(source)
    assert "dog/new.png" in (folder / "misc" / "train_order.txt").read_text()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "5",
        '{"version": 1}',
        '{"version": 9}',
        '{"version": 1, "train": [[1, 2, 3]]}',
        "[" * 9999,
    ],
)
def test_a_record_of_another_form_is_ignored(source: Path, content: str) -> None:
    folder = convert(source)
    expected = read_all(folder)
    (folder / MADE).write_text(content)
    assert convert(source) == folder
    assert {name for name, value in read_all(folder).items() if expected[name] != value} == {MADE}


def test_a_replacement_that_was_interrupted_is_undone(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = convert(source)
    folder.rename(folder.with_name(".36x36.replaced"))  # killed here, before the new set got its name
    capfd.readouterr()
    assert convert(source) == folder
    assert "converted before" in capfd.readouterr().out
    shutil.copytree(folder, folder.with_name(".36x36.replaced"))  # killed before the old set was removed
    convert(source)
    assert [path.name for path in folder.parent.iterdir()] == ["36x36"]


def test_one_class_only_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "mine", {"cat": 30})
    with pytest.raises(UserError, match="has one class only, cat; a classifier needs two"):
        convert(tmp_path / "mine")
    assert not (tmp_path / "mine.lockstep").exists()


def test_a_place_that_cannot_be_written_is_replaced_and_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source.with_name("mine.lockstep").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = convert(source)
    assert folder.parent.parent == tmp_path / "cache" / "lockstep"
    assert f"mine.lockstep: can't be written: File exists; the converted set goes to {folder.parent}" in (
        capfd.readouterr().out
    )
    assert convert(source) == folder
    assert "converted before" in capfd.readouterr().out
    blocked = tmp_path / "blocked"
    blocked.write_text("not a folder")
    with pytest.raises(
        UserError, match=r"blocked/mine-.*: can't be written: Not a directory. Set cache_folder"
    ):
        convert(source, cache_folder=str(blocked))


def test_a_home_that_is_missing_or_closed_is_not_needed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def denied(path: Path, *args: object, **keys: object) -> bool:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return os.path.exists(path)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    assert candidates(source, None) == [source.with_name("mine.lockstep")]
    monkeypatch.setenv("XDG_CACHE_HOME", "/closed")
    monkeypatch.setattr(Path, "exists", denied)
    assert convert(source).parent == source.with_name("mine.lockstep")


def test_cache_folder_holds_the_sets_of_several_sources(source: Path, tmp_path: Path) -> None:
    other = write_classes(tmp_path / "other" / "mine", {"cat": 30, "dog": 30})
    folders = {convert(each, cache_folder=str(tmp_path / "cache")) for each in (source, other)}
    assert len(folders) == 2
    assert all(folder.parent.parent == tmp_path / "cache" for folder in folders)
    assert not source.with_name("mine.lockstep").exists()


def test_a_set_and_its_source_may_move(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    convert(source)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in (source, source.with_name("mine.lockstep")):
        path.rename(moved / path.name)
    capfd.readouterr()
    assert convert(moved / "mine").parent.parent == moved
    assert "converted before" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("n_cats", "said"), [(2, "cat 2, dog 1; the largest has 2.0 times"), (1, "cat 1, dog 1")]
)
def test_the_summary_compares_classes_only_if_they_differ(n_cats: int, said: str) -> None:
    images = [SourceImage(f"{number}.jpg", min(number, 1), f"{number}.jpg") for number in (1, *[0] * n_cats)]
    (_, line, *_) = class_lines(Listing(["cat", "dog"], ["cat", "dog"], images, []))
    assert line.startswith(f"images by class: {said}")
    assert ("times" in line) == (n_cats > 1)


def train(*words: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    small = ("n_epochs=1", "devices=[cpu]", "batch_size=16", f"weights_dir={cwd}/runs")
    command = [sys.executable, str(ROOT / "train.py"), *map(str, words), *small]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=limit(100))


@pytest.mark.slow
def test_train_py_converts_and_trains(source: Path, tmp_path: Path) -> None:
    done = train("data_folder=mine", "run_name=one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "images by class: cat 30, dog 20, emu 6; the largest has 5.0 times" in done.stdout
    assert "done: validation error" in done.stdout
    assert f"data_folder: {tmp_path}/mine.lockstep/36x36\n" in (tmp_path / "runs/one/config.yaml").read_text()
    done = train("data_folder=mine/cat", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"lockstep: {tmp_path}/mine/cat: holds no folders of classes"
    )


@pytest.mark.slow
def test_a_set_that_a_run_uses_is_not_replaced(source: Path, tmp_path: Path) -> None:
    convert(source)
    small = (
        "devices=[cpu]",
        "batch_size=16",
        f"weights_dir={tmp_path}/runs",
        "run_name=long",
        "n_epochs=9999",
    )
    command = [sys.executable, str(ROOT / "train.py"), f"data_folder={source}", *small]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "runs/long/config.yaml").exists, "the run to start")
        assert convert(source)  # it is current
        change(source)
        with pytest.raises(UserError, match="36x36: a run trains on it, and the images have changed since"):
            convert(source)
    finally:
        running.terminate()
        running.wait()
    assert_colours_of_three(convert(source))


def assert_colours_of_three(folder: Path) -> None:
    assert opened(folder).class_names == ("bee", "cat", "dog")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_conversion_that_is_killed_or_stopped_leaves_no_process(
    source: Path, tmp_path: Path, number: int
) -> None:
    held = HeldFile(next(source.glob("cat/*.png")))
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        f"data_folder={source}",
        f"weights_dir={tmp_path}/runs",
    ]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, start_new_session=True, **pipes)
    unfinished_set = unfinished(source.with_name("mine.lockstep") / "36x36")
    wait_until(unfinished_set.exists, "the conversion to begin")
    converting_pid = max(processes_of_session(running.pid))  # the template process is older
    os.kill(converting_pid if number == signal.SIGKILL else running.pid, number)
    _, error = running.communicate(timeout=limit(30))
    last = error.splitlines()[-1]
    if number == signal.SIGKILL:
        assert "the process that converts images was killed by signal 9; the same command resumes" in last
    else:
        assert last == "lockstep: stopped as asked, while images were converted; the same command resumes"
    assert running.returncode == (1 if number == signal.SIGKILL else 130)
    wait_until(lambda: processes_of_session(running.pid) == [], "all processes to end", 10)
    assert not (unfinished_set.parent / "36x36").exists()
    held.release()
    assert opened(convert(source)).n_classes == 3


@pytest.mark.parametrize("output", ["a reader that leaves", "closed"])
@pytest.mark.slow
def test_a_conversion_needs_neither_output_nor_the_working_directory(
    source: Path, tmp_path: Path, output: str
) -> None:
    """The working directory has a package of the user's that has the name of one of the program's."""
    (tmp_path / "preprocessing").mkdir()
    (tmp_path / "preprocessing" / "__init__.py").touch()
    redirection = {"a reader that leaves": "2>&1 | true", "closed": ">&- 2>&-"}[output]
    words = f"data_folder={source} weights_dir={tmp_path}/runs n_epochs=1 devices=[cpu] run_name=r"
    command = f"set -o pipefail; {sys.executable} {ROOT}/train.py {words} {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=limit(60))
    assert done.returncode == 0
    assert (tmp_path / "runs" / "r" / "checkpoints" / "epoch_0001.json").exists()


def test_a_full_disk_is_named_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=10**6))
    with pytest.raises(UserError, match=r"mine.lockstep: has 0.00 GB free, 0.07 GB are needed"):
        convert(source)
    assert list(source.with_name("mine.lockstep").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_an_unreadable_folder_is_named(source: Path) -> None:
    (source / "dog").chmod(0)
    with pytest.raises(UserError, match=r"dog: can't be listed: Permission denied"):
        convert(source)
    (source / "dog").chmod(0o700)


def test_several_hosts_need_a_dataset_folder(source: Path) -> None:
    config = make_config(
        data_folder=str(source), run_name="r", n_hosts=2, host_rank=0, rendezvous="127.0.0.1:9"
    )
    with pytest.raises(UserError, match="a run on several hosts needs a dataset folder"):
        with_converted_images(config, Interrupts())


@pytest.mark.parametrize("name", ["a\nb.png", "a\u2028b.png", "a\x85b.png"])
@pytest.mark.slow
def test_a_line_break_in_a_name_moves_no_line_of_a_list(name: str, source: Path, tmp_path: Path) -> None:
    write_image(source / "cat" / name, COLOURS["cat"], (20, 24), np.random.default_rng(0))
    (source / "cat" / f"{name}.txt").write_text("")
    (source / "dog" / name).write_text("")
    assert make_hkl.main([str(source), str(tmp_path / "made"), "--size", "36"]) == 0
    dataset, misc = opened(tmp_path / "made"), tmp_path / "made" / "misc"
    for file, split in (("train_order.txt", dataset.train), ("val.txt", dataset.val)):
        assert [label for _, label in read_list(misc / file)] == list(split.labels)
    assert len(read_names(misc / "left_out.txt")) == len(read_names(misc / "bad_pictures.txt")) == 2


@pytest.mark.slow
def test_a_log_of_a_conversion_has_no_bar(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "_RARELY", 3600)  # a slow machine takes more than a minute
    (source / "dog" / "bad.png").write_text("")
    assert make_hkl.main([str(source), str(tmp_path / "made"), "--size", "36"]) == 0
    output = capfd.readouterr()
    assert output.err == "" and output.out.count("bad image: ") == 1
