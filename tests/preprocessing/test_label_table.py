"""Tables of labels with any number of classes for each image, and the sets that are made of them."""

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import make_config
from multilabel_folders import NAMES, labels_of, write_multilabel
from own_folders import write_classes

from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.manifest import read_manifest
from lockstep.errors import UserError
from lockstep.runs.dataset_description import read_description, write_description
from preprocessing import inspect_data, make_hkl, own_images
from preprocessing.caffe_lists import read_names
from preprocessing.finish import IMAGE_LISTS
from preprocessing.label_table import list_table

MULTILABEL = {"n_classes": None, "task": "multilabel"}


def convert(source: Path, **keys: object) -> Path:
    return own_images.convert(make_config(data_folder=str(source), **{**MULTILABEL, **keys}))


def opened(folder: Path, **keys: object) -> Dataset:
    return open_dataset(make_config(data_folder=str(folder), **{**MULTILABEL, **keys}))


def assert_labels(folder: Path) -> None:
    """Each image of a set of `write_multilabel` has its classes."""
    dataset, expected = opened(folder), labels_of(120)
    assert dataset.class_names == NAMES and len(dataset.train) + len(dataset.val) == 120
    for split, half in (("train", dataset.train), ("val", dataset.val)):
        assert half.labels.dtype == np.uint8 and half.labels.shape == (len(half), len(NAMES))
        for name, row in zip(read_names(folder / IMAGE_LISTS[split]), half.labels, strict=True):
            assert tuple(np.flatnonzero(row)) == expected[int(Path(name).stem)]


@pytest.mark.parametrize("columns", [False, True], ids=["names", "columns"])
def test_both_forms_of_a_table_make_the_same_set(tmp_path: Path, columns: bool) -> None:
    source = write_multilabel(tmp_path / "mine", columns=columns)
    assert () in labels_of(120), "some images have no class"
    assert_labels(convert(source))
    target = tmp_path / "set"
    words = ["--task", "multilabel", "--size", "24", "--workers", "1"]
    assert make_hkl.main([str(source), str(target), *words]) == 0
    assert_labels(target)


def test_a_set_with_several_classes_can_be_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = convert(write_multilabel(tmp_path / "mine"))
    assert inspect_data.main([str(target), "--images", "4"]) == 0
    words = [str(target), "--augmented", "--out", str(tmp_path / "sheet"), "crop=padded", "mixup=0.2"]
    assert inspect_data.main(words) == 0 and (tmp_path / "sheet" / "augmented.png").exists()
    counts = opened(target).val.labels.sum(0)
    assert f"{counts.min()} to {counts.max()} of each of 4 classes" in capsys.readouterr().out


def test_changed_labels_and_new_classes_make_the_set_again(tmp_path: Path) -> None:
    source = write_multilabel(tmp_path / "mine", columns=True)
    first = opened(convert(source))
    table = source / "labels.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0] + ",owl", *(f"{line},0" for line in lines[1:])]))
    second = opened(convert(source))
    assert second.class_names == (*NAMES, "owl") and second.digest != first.digest
    table.write_text("\n".join([lines[0], lines[1].split(",")[0] + ",1,1,1,1", *lines[2:]]))
    third = opened(convert(source))
    assert third.digest != first.digest and third.class_names == NAMES


def test_a_set_of_one_task_is_refused_for_the_other(tmp_path: Path) -> None:
    several = convert(write_multilabel(tmp_path / "several"))
    with pytest.raises(UserError, match="was made with task: multilabel, the configuration says task: c"):
        opened(several, task="classify")
    one = convert(write_classes(tmp_path / "one", {"cat": 9, "dog": 9}), task="classify")
    with pytest.raises(UserError, match="was made with task: classify, the configuration says task: m"):
        opened(one)
    (several / "manifest.json").unlink()
    with pytest.raises(UserError, match="which are of task: multilabel"):
        opened(several, task="classify", n_classes=4)
    path = several / "labels" / "train_labels.npy"
    np.save(path, 2 * np.load(path))
    with pytest.raises(UserError, match=r"train_labels.npy: label 2 of image \d+, class \d, is not 0 or 1"):
        opened(several, n_classes=4)


def test_class_folders_have_one_class_for_each_image(tmp_path: Path) -> None:
    source = write_classes(tmp_path / "mine", {"cat": 9, "dog": 9})
    with pytest.raises(UserError, match=r"has no labels.csv or labels.parquet, which task: multilabel needs"):
        convert(source)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("path,a,b\n000.png,1,2", "line 2 has '2' in the column b. Write 0 or 1."),
        ("path,a,b\n000.png,1", "line 2 has 2 columns. Complete it."),
        ("path,a,a\n000.png,1,1", "no column of its own for each class"),
        ("path\n000.png", "has no column label, and no column of its own for each class"),
        ("path,label\n000.png,\n001.png,;", "no image has a class"),
        ("file,label\n000.png,a", "has no column path"),
    ],
)
def test_wrong_tables_are_refused(tmp_path: Path, content: str, message: str) -> None:
    source = write_multilabel(tmp_path / "mine", n_images=3)
    (source / "labels.csv").write_text(content)
    with pytest.raises(UserError) as caught:
        list_table(source / "labels.csv", [], "multilabel")
    assert str(caught.value).startswith(f"{source / 'labels.csv'}: ") and message in str(caught.value)


def test_names_may_repeat_and_have_spaces(tmp_path: Path) -> None:
    source = write_multilabel(tmp_path / "mine", n_images=3)
    (source / "labels.csv").write_text("path,label\n000.png,red ; blue;red\n001.png,\n002.png,10;9")
    classes, images = list_table(source / "labels.csv", [], "multilabel")
    assert classes == ["10", "9", "blue", "red"]
    assert [image.label for image in images] == [(2, 3), (), (0, 1)]


def test_parquet_has_numbers_or_lists_of_names(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    source = write_multilabel(tmp_path / "mine", n_images=2)
    paths = ["000.png", "001.png"]
    for columns in ({"a": [1, 0], "b": [True, False]}, {"label": [["a", "b"], []]}):
        parquet.write_table(pyarrow.table({"path": paths, **columns}), source / "labels.parquet")
        classes, images = list_table(source / "labels.parquet", [], "multilabel")
        assert classes == ["a", "b"] and [image.label for image in images] == [(0, 1), ()]


def test_class_names_that_are_not_utf8_are_stored_with_escapes(tmp_path: Path) -> None:
    table = write_multilabel(tmp_path / "table") / "labels.csv"
    table.write_bytes(table.read_bytes().replace(NAMES[0].encode(), b"caf\xe9"))
    folders = write_classes(tmp_path / "folders", {"cat": 9, "dog": 9})
    os.rename(folders / "cat", os.path.join(os.fsencode(folders), b"caf\xe9"))
    for source, keys in ((table.parent, {}), (folders, {"task": "classify"})):
        dataset = opened(convert(source, **keys), **keys)
        assert "caf\\udce9" in dataset.class_names
        write_description(tmp_path, dataset.description)
        found = read_description(tmp_path)
        assert found and found.class_names == dataset.class_names


def test_line_breaks_in_class_names_become_escapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Lists on the screen, and the classes of `predict`, have a line for each class."""
    folders = write_classes(tmp_path / "folders", {"cat": 9, "dog": 9})
    os.rename(folders / "cat", folders / "c\nat")
    dataset = opened(convert(folders, task="classify"), task="classify")
    assert dataset.class_names == ("c\\nat", "dog")
    shown = capfd.readouterr().out
    assert "images by class: c\\nat 9, dog 9\n" in shown and "c\nat" not in shown
    manifest = dataset.manifest.path
    manifest.write_text(manifest.read_text().replace("c\\\\nat", "c\\nat"))  # of an earlier version
    assert read_manifest(manifest.parent).class_names == ("c\nat", "dog")
    assert opened(manifest.parent, task="classify").class_names == ("c\\nat", "dog")


def test_class_names_of_an_earlier_version_are_shown_with_escapes(tmp_path: Path) -> None:
    folder = convert(write_classes(tmp_path / "mine", {"cat": 9, "dog": 9}), task="classify")
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"cat"', '"caf\\udce9"'))
    assert opened(folder, task="classify").class_names == ("caf\\udce9", "dog")
    (tmp_path / "run").mkdir()
    write_description(tmp_path / "run", opened(folder, task="classify").description)
    path = tmp_path / "run" / "dataset.json"
    path.write_text(path.read_text().replace("\\\\", "\\"))
    assert r'"caf\udce9"' in path.read_text()
    found = read_description(tmp_path / "run")
    assert found and found.class_names == ("caf\\udce9", "dog")
