"""The layouts of a user's own folder: which are read, how they are split, and which are refused."""

import errno
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from own_folders import COLOURS, write_classes
from PIL import Image

from lockstep.errors import UserError
from preprocessing.inputs import list_source
from preprocessing.layouts import UNDERSTOOD, in_validation
from preprocessing.listing import LeftOut, SourceImage


def names(images: list[SourceImage]) -> list[str]:
    return [image.name for image in images]


@pytest.mark.parametrize("val", ["val", "valid", "validation", "test", "Val"])
def test_train_with_a_validation_folder_of_any_usual_name(val: str, tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"cat": 4, "dog": 3})
    write_classes(tmp_path / val, {"cat": 2, "dog": 1})
    listing = list_source(tmp_path, 0.1)
    assert listing.classes == ["cat", "dog"]
    assert names(listing.train) == [f"cat/00{n}.png" for n in range(4)] + [f"dog/00{n}.png" for n in range(3)]
    assert names(listing.val) == ["cat/000.png", "cat/001.png", "dog/000.png"]
    assert {Path(image.path).parts[-3] for image in listing.val} == {val}


def test_val_comes_before_test_and_the_rest_is_left_out(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_classes(tmp_path / split, {"cat": 2, "dog": 2})
    (tmp_path / "README").write_text("read me")
    listing = list_source(tmp_path, 0.1)
    assert {Path(image.path).parts[-3] for image in listing.val} == {"val"}
    assert [(Path(each.place).name, each.reason) for each in listing.left_out] == [
        ("README", "not in train or val"),
        ("test", "not in train or val"),
    ]


def test_train_alone_is_split(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"cat": 30, "dog": 30})
    listing = list_source(tmp_path, 0.2)
    assert len(listing.train) + len(listing.val) == 60
    assert all(in_validation(name, 0.2) for name in names(listing.val))


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    write_classes(tmp_path, {"cat": 30, "dog": 30})
    (tmp_path / "cat").rename(tmp_path / "train")
    assert list_source(tmp_path, 0.2).classes == ["dog", "train"]


@pytest.mark.parametrize(
    "halves",
    [
        ("training", "validation"),
        ("Training", "Testing"),
        ("train_set", "test_set"),
        ("TrainSet", "ValSet"),
        ("train2017", "val2017"),
        ("flowers_train", "flowers_test"),
        ("dev", "test"),
        ("training",),
        ("training", "more"),
        ("train", "dev"),
        ("Train", "validation_images"),
    ],
)
def test_halves_with_other_names_are_no_classes(halves: tuple[str, ...], tmp_path: Path) -> None:
    for half in halves:
        write_classes(tmp_path / half, {"cat": 20, "dog": 20})
    with pytest.raises(UserError, match=r"Rename (such folders to train and|it to) val\b") as refused:
        list_source(tmp_path, 0.2)
    assert UNDERSTOOD in str(refused.value)


def test_classes_that_could_be_halves_are_refused_and_a_table_can_name_them(tmp_path: Path) -> None:
    write_classes(tmp_path, {"cat": 20, "dog": 20, "emu": 20})
    (tmp_path / "cat").rename(tmp_path / "test_tube")
    assert list_source(tmp_path, 0.2).classes == ["dog", "emu", "test_tube"]
    (tmp_path / "dog").rename(tmp_path / "test")
    assert list_source(tmp_path, 0.2).classes == ["emu", "test", "test_tube"]
    (tmp_path / "emu").rename(tmp_path / "Training")
    with pytest.raises(UserError, match=r"Training/ and test/ would be classes.*or write labels\.csv"):
        list_source(tmp_path, 0.2)
    paths = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("*/*"))
    rows = "".join(f"{path},{path.parent}\n" for path in paths)
    (tmp_path / "labels.csv").write_text(f"path,label\n{rows}")
    assert list_source(tmp_path, 0.2).classes == ["Training", "test", "test_tube"]


def test_what_lockstep_writes_into_a_folder_of_images_is_no_class(tmp_path: Path) -> None:
    """After `lockstep train .` and `lockstep convert . mine` there, a report and an inspection."""
    write_classes(tmp_path, {"cat": 30, "dog": 30, "emu": 30})
    (tmp_path / "emu").rename(tmp_path / "runs")
    assert list_source(tmp_path, 0.2).classes == ["cat", "dog", "runs"]
    (tmp_path / "runs").rename(tmp_path / "emu")
    for folder, marks in (("runs/try1", ("log.jsonl",)), ("sets/mine", ("manifest.json", "train_hkl/0.hkl"))):
        for mark in marks:
            (tmp_path / folder / mark).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / mark).touch()
        (tmp_path / folder / "report").mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / folder / "report" / "loss.png")
    listing = list_source(tmp_path, 0.2)
    assert listing.classes == ["cat", "dog", "emu"]
    assert [(Path(each.place).name, each.reason) for each in listing.left_out] == [
        ("mine", "a dataset folder"),
        ("runs", "a folder of runs"),
        ("sets", "a folder without images"),
    ]


def test_a_folder_without_images_is_no_class(tmp_path: Path) -> None:
    write_classes(tmp_path, {"cat": 30, "emu": 30})
    (tmp_path / "dog").mkdir()
    listing = list_source(tmp_path, 0.2)
    assert listing.classes == ["cat", "emu"]
    assert {image.label for image in listing.train} == {0, 1}
    assert [each.reason for each in listing.left_out] == ["a folder without images"]


@given(st.sets(st.text(min_size=1), min_size=1, max_size=50), st.text(min_size=1), st.floats(0.01, 0.5))
def test_added_images_move_no_others(before: set[str], added: str, share: float) -> None:
    halves = {name: in_validation(name, share) for name in before}
    assert {name: in_validation(name, share) for name in before | {added}}.items() >= halves.items()
    larger = {name for name in before if in_validation(name, share + 0.3)}
    assert larger >= {name for name in before if halves[name]}  # a larger share keeps the old images


def test_every_class_gives_about_the_same_share() -> None:
    for name in COLOURS:
        n_val = sum(in_validation(f"{name}/{number}.jpg", 0.1) for number in range(4000))
        assert abs(n_val / 4000 - 0.1) < 5 * (0.1 * 0.9 / 4000) ** 0.5, name


def write_table(folder: Path, header: str = "path,label", n_images: int = 40) -> Path:
    (folder / "all").mkdir(parents=True)
    lines = [header]
    for number in range(n_images):
        Image.new("RGB", (9, 9)).save(folder / "all" / f"{number} x.png")
        lines.append(f'"all/{number} x.png",{number % 2 + 9}')
    (folder / "labels.csv").write_text("\ufeff" + "\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_table_gives_paths_and_labels(tmp_path: Path) -> None:
    write_table(tmp_path)
    Image.new("RGB", (9, 9)).save(tmp_path / "all" / "loose.png")
    listing = list_source(tmp_path, 0.3)
    assert listing.classes == ["9", "10"]  # whole numbers are sorted as numbers
    images = {image.name: image.label for image in (*listing.train, *listing.val)}
    assert images == {f"all/{number} x.png": number % 2 for number in range(40)}
    assert listing.val
    assert [(Path(e.place).name, e.reason) for e in listing.left_out] == [("loose.png", "not in labels.csv")]


def test_absolute_paths_in_a_table_name_the_same_files(tmp_path: Path) -> None:
    write_classes(tmp_path / "images", {"cat": 30, "dog": 30})
    paths = sorted(tmp_path.glob("images/*/*"))
    table = tmp_path / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    assert list_source(tmp_path, 0.2).left_out == ()
    table.write_text(f"{table.read_text()}images/dog/003.png,cat\n")
    with pytest.raises(UserError, match=r"line 62 names images/dog/003\.png again, after line 35"):
        list_source(tmp_path, 0.2)


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    write_table(tmp_path)
    lines = (tmp_path / "labels.csv").read_text(encoding="utf-8-sig").splitlines()
    table = [
        f"{lines[0]},split",
        *(f"{line},train," for line in lines[1:]),
    ]  # no loss: an empty field too many
    (tmp_path / "labels.csv").write_text("\n".join(table))
    listing = list_source(tmp_path, 0.3)
    assert len(listing.train) + len(listing.val) == 40
    assert listing.left_out == (LeftOut(f"{tmp_path}/labels.csv: split", "a column that is not read"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,class\na.png,1\n", "has no column path and no column label.* it has: file, class"),
        ("path,label\nb.png,1\n", "line 2 names b.png, which is no file"),
        ("path,label\na.png,1\n./a.png,2\n", "line 3 names ./a.png again, after line 2"),
        (
            "path,label\na.png,\n",
            "lacks a path or a label. Complete or remove it. With task=multilabel its image",
        ),
        ("path,label\n,1\n", "line 2 lacks a path or a label. Complete or remove it.$"),
        ("path,label\na.png\n", "line 2 has 1 columns"),
        ("path,label\na.png,red,spotted\n", "line 2 has 3 columns, the first line names 2. Put text with a"),
        ("path,label\n", "has no rows"),
        ("path;label\na.png;1\n", "it has: path;label. Separate columns by commas.$"),
        (f"path,label\n{'b' * 300},1\n", "line 2 names bbb.*, which is no file"),
        ("", "has no column path"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(text: str, message: str, tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        list_source(tmp_path, 0.1)


def test_a_parquet_table_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labels.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"neither pyarrow nor pandas is installed.*labels.csv"):
        list_source(tmp_path, 0.1)


def test_a_parquet_table_is_read_like_the_other(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(tmp_path)
    expected = list_source(tmp_path, 0.3)
    (tmp_path / "labels.csv").unlink()
    columns = {"path": [f"all/{n} x.png" for n in range(40)], "label": [n % 2 + 9 for n in range(40)]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "labels.parquet")
    listing = list_source(tmp_path, 0.3)
    assert (listing.classes, listing.train, listing.val) == (expected.classes, expected.train, expected.val)
    (tmp_path / "labels.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="is not a whole Parquet file"):
        list_source(tmp_path, 0.3)


def flat(folder: Path) -> None:
    for number in range(7):
        Image.new("RGB", (9, 9)).save(folder / f"{number}.png")


def val_is_flat(folder: Path) -> None:
    write_classes(folder / "train", {"cat": 2, "dog": 2})
    (folder / "val").mkdir()
    flat(folder / "val")


def only_halves(folder: Path) -> None:
    write_classes(folder / "val", {"cat": 2})
    write_classes(folder / "test", {"cat": 2})


def without_images(folder: Path) -> None:
    (folder / "cat").mkdir()
    (folder / "cat" / "note.txt").write_text("no image")


@pytest.mark.parametrize(
    ("write", "problem", "found"),
    [
        (lambda folder: None, "holds no folders of classes", "Found: nothing."),
        (flat, "holds no folders of classes", "Found: 7 files .0.png, 1.png, 2.png, 3.png, 4.png, ...."),
        (val_is_flat, "val: holds no class folders", r"Found: 2 folders .train/, val/.\."),
        (only_halves, "has no train/", r"Found: 2 folders .test/, val/.\."),
        (without_images, "holds no images", r"Found: 1 folders .cat/.\."),
    ],
)
def test_a_refused_layout_names_the_understood_ones(write, problem: str, found: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=problem) as refused:
        list_source(tmp_path, 0.1)
    assert UNDERSTOOD in str(refused.value)
    assert refused.match(found)


def test_a_share_that_leaves_nothing_to_validate_on_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path, {"cat": 1, "dog": 1})
    assert not any(in_validation(f"{name}/000.png", 0.01) for name in ("cat", "dog"))
    with pytest.raises(UserError, match=r"val_split 0.01 leaves no validation images of 2"):
        list_source(tmp_path, 0.01)


def test_the_hash_of_a_name_is_fixed() -> None:
    """A new version must not move images from one half to the other. The numbers are sha256sum's."""
    chosen = [number for number in range(60) if in_validation(f"cat/{number}.jpg", 0.1)]
    assert chosen == [3, 13, 30, 36, 38, 44, 53, 58]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "can't be read: it is not a regular file"),
        (lambda path: path.symlink_to(path), f"can't be read: {os.strerror(errno.ELOOP)}"),
    ],
    ids=["a named pipe", "a link to itself"],
)
@pytest.mark.parametrize("folder", ["cat", "."])
def test_what_cannot_be_read_is_left_out(
    make: Callable[[Path], None], reason: str, folder: str, tmp_path: Path
) -> None:
    write_classes(tmp_path, {"cat": 4, "dog": 4})
    make(tmp_path / folder / "odd.png")
    listing = list_source(tmp_path, 0.25)
    assert [(Path(each.place).name, each.reason) for each in listing.left_out] == [("odd.png", reason)]
    assert len(listing.train) + len(listing.val) == 8
