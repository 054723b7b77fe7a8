"""Folders as theano_alexnet made them: they are read as they are, rewritten, and can be made."""

import json
import os
from pathlib import Path

import imagenet
import numpy as np
import pytest
from conftest import Program, make_config
from dataset_folders import read_all
from imagenet import WNIDS

from lockstep.data import hkl
from lockstep.data import old_folders as theano_alexnet
from lockstep.data.dataset import open_dataset
from lockstep.data.manifest import read_manifest
from lockstep.errors import UserError
from preprocessing import convert, inspect_data, make_hkl

SIZE, BATCH = 36, 8
N = {"train": 45, "val": 20}  # 5 and 2 whole batches, and images that were never written


def numbered(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Random images (batch, row, column, channel) and labels, all of them."""
    random = np.random.default_rng(N[split])
    images = random.integers(0, 256, (N[split], SIZE, SIZE, 3), dtype=np.uint8)
    return images, random.integers(0, 7, N[split])


def write_old(root: Path, parts: int, write=hkl.write_hickle2) -> None:
    """Write what its make_hkl.py and make_labels.py write for num_sub_batch 1, 2 and 4."""
    (root / "labels").mkdir(parents=True, exist_ok=True)
    (root / "misc").mkdir(exist_ok=True)
    width = BATCH // parts
    suffixes = {1: [""], 2: ["_0", "_1"], 4: ["_00", "_10", "_01", "_11"]}[parts]
    for split in ("train", "val"):
        images, labels = numbered(split)
        folder = root / f"{split}_hkl_b{BATCH}_b_{width}"
        folder.mkdir()
        n_batches = len(images) // BATCH
        for number in range(n_batches):
            batch = images[number * BATCH : (number + 1) * BATCH].transpose(3, 1, 2, 0)
            for part, suffix in enumerate(suffixes):
                stored = np.ascontiguousarray(batch[..., part * width : (part + 1) * width])
                write(folder / f"{number:04d}{suffix}.hkl", stored)
        np.save(root / "labels" / f"{split}_labels.npy", labels)
        for part, suffix in enumerate(suffixes if parts > 1 else []):
            part_labels = labels[: n_batches * BATCH].reshape(-1, width)[part::parts].reshape(-1)
            np.save(root / "labels" / f"{split}_labels{suffix}.npy", part_labels)
    mean = numbered("train")[0][: N["train"] // BATCH * BATCH].mean(0).transpose(2, 0, 1)
    np.save(root / "misc" / "img_mean.npy", mean)


def assert_as_numbered(folder: Path, **keys: object) -> None:
    dataset = open_dataset(make_config(data_folder=str(folder), n_classes=None, **keys))
    assert dataset.n_classes == 7 and dataset.image_shape == (SIZE, SIZE, 3)
    for name, split in (("train", dataset.train), ("val", dataset.val)):
        images, labels = numbered(name)
        whole = len(images) // BATCH * BATCH
        assert split.labels.tolist() == labels[:whole].tolist()
        first = 0
        for file in split.files:
            out = np.empty(file.shape, np.uint8)
            hkl.read_rows(file, 0, out)
            assert (out == images[first : first + len(out)]).all()
            first += len(out)
        assert first == whole
    expected = numbered("train")[0][: N["train"] // BATCH * BATCH].mean(0)
    assert np.allclose(dataset.mean, expected, atol=1e-4)


@pytest.mark.parametrize("write", [hkl.write_hickle2, hkl.write], ids=["hickle2", "hickle5"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_whole_batches_halves_and_quarters_are_read_in_order(tmp_path: Path, parts: int, write) -> None:
    write_old(tmp_path, parts, write)
    assert_as_numbered(tmp_path)
    if parts > 1:  # their labels alone will do
        for split in ("train", "val"):
            (tmp_path / "labels" / f"{split}_labels.npy").unlink()
        assert_as_numbered(tmp_path)


def test_files_come_in_the_order_of_their_numbers() -> None:
    names = [
        f"{number:04d}{part}.hkl" for number in (0, 9, 9999, 10000) for part in ("_00", "_10", "_01", "_11")
    ]
    assert sorted(map(Path, reversed(names)), key=theano_alexnet.place) == list(map(Path, names))
    assert sorted(map(Path, ["b.hkl", "a2.hkl", "a10.hkl"]), key=theano_alexnet.place)[0] == Path("a10.hkl")


def test_with_both_the_whole_batches_are_taken(tmp_path: Path) -> None:
    write_old(tmp_path, 2)
    write_old(tmp_path, 1)
    dataset = open_dataset(make_config(data_folder=str(tmp_path)))
    assert dataset.train.file_rows == (BATCH,) * 5
    assert_as_numbered(tmp_path, train_folder=f"{tmp_path}/train_hkl_b{BATCH}_b_{BATCH // 2}/")


def test_with_the_keys_of_an_old_configuration(tmp_path: Path) -> None:
    write_old(tmp_path, 2)
    half = f"hkl_b{BATCH}_b_{BATCH // 2}/"
    keys = {
        "train_folder": f"{tmp_path}/train_{half}",
        "val_folder": f"{tmp_path}/val_{half}",
        "label_folder": f"{tmp_path}/labels/",
        "mean_file": f"{tmp_path}/misc/img_mean.npy",
    }
    assert_as_numbered(tmp_path / "there_is_no_such_folder", **keys)


def test_labels_of_halves_that_do_not_fit_are_named(tmp_path: Path) -> None:
    write_old(tmp_path, 2)
    (tmp_path / "labels" / "train_labels.npy").unlink()
    np.save(tmp_path / "labels" / "train_labels_1.npy", np.zeros(19, int))
    with pytest.raises(UserError, match=r"train_labels_0\.npy: this and the other parts do not hold"):
        open_dataset(make_config(data_folder=str(tmp_path)))
    np.save(tmp_path / "labels" / "train_labels.npy", np.zeros(39, int))
    with pytest.raises(UserError, match=r"train_labels\.npy: holds 39 labels for the 40 images"):
        open_dataset(make_config(data_folder=str(tmp_path)))


def test_an_old_folder_that_is_broken_is_named(tmp_path: Path) -> None:
    write_old(tmp_path, 1)
    path = tmp_path / f"train_hkl_b{BATCH}_b_{BATCH}" / "0002.hkl"
    file = hkl.as_c01b(hkl.inspect(path))
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(UserError, match=r"0002\.hkl"):
        open_dataset(make_config(data_folder=str(tmp_path)))
    with pytest.raises(UserError, match=r"0002\.hkl: can't be read: it was changed"):
        hkl.read_rows(file, 0, np.empty(file.shape, np.uint8))


@pytest.mark.slow
def test_it_trains_as_it_is_and_the_same_after_conversion(tmp_path: Path) -> None:
    write_old(tmp_path / "old", 2)
    assert (
        convert.main([str(tmp_path / "old"), str(tmp_path / "new"), "--batch", "16", "--workers", "1"]) == 0
    )
    assert_as_numbered(tmp_path / "new")
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert [entry["n_images"] for entry in manifest["train"]] == [16, 16, 8]
    assert (tmp_path / "new/misc/train_order.txt").read_text().startswith("0000_0.hkl:0 ")
    weights = []
    for name in ("old", "new"):
        running = Program(tmp_path / name, tmp_path / name).run("n_epochs=1", "shuffle=none", devices="[cpu]")
        weights.append((running.run_folder / "checkpoints" / "epoch_0001.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_it_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_old(tmp_path, 2)
    assert inspect_data.main([str(tmp_path)]) == 0
    assert "40 training images of 36 x 36 in 10 files, c01b" in (said := capsys.readouterr().out)
    assert "14 good, 0 bad" in said and (tmp_path / "inspect" / "contact_sheet.png").exists()
    path = tmp_path / f"val_hkl_b{BATCH}_b_{BATCH // 2}" / "0001_1.hkl"
    path.write_bytes(path.read_bytes()[:-9])
    assert inspect_data.main([str(tmp_path)]) == 2
    assert "0001_1.hkl" in capsys.readouterr().err


def test_conversion_keeps_what_a_manifest_says(tmp_path: Path) -> None:
    made = imagenet.build(tmp_path / "imagenet")
    words = ["--size", "16", "--batch", "4", "--workers", "1", "--layout", "c01b", "--resize", "crop"]
    assert make_hkl.main([str(made.folders), str(tmp_path / "old"), *words]) == 0
    assert convert.main([str(tmp_path / "old"), str(tmp_path / "new"), "--workers", "1"]) == 0
    old, new = (read_manifest(tmp_path / name) for name in ("old", "new"))
    assert old and new and (new.resize, new.orientation) == (old.resize, old.orientation) == ("crop", "apply")
    assert new.class_names == old.class_names != new.classes


def test_conversion_goes_on_and_takes_names_along(tmp_path: Path, monkeypatch) -> None:
    made = imagenet.build(tmp_path / "imagenet")
    words = ["--size", "16", "--batch", "4", "--workers", "1"]
    old = ["--layout", "c01b", "--split", "2"]
    assert make_hkl.main([str(made.folders), str(tmp_path / "old"), *words, *old]) == 0
    (tmp_path / "old" / "manifest.json").unlink()
    (tmp_path / "old" / "misc" / "train_order.txt").unlink()
    again = [str(tmp_path / "old"), str(tmp_path / "new"), "--batch", "4", "--workers", "1"]
    again += ["--meta_clsloc_mat", str(made.folders / "ILSVRC2012_devkit_t12/data/meta.mat")]
    with monkeypatch.context() as patch:
        left, load = [3], convert.StoredBatch.load

        def interrupt(batch: convert.StoredBatch):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return load(batch)

        patch.setattr(convert.StoredBatch, "load", interrupt)
        assert convert.main(again) == 130
    assert convert.main(again) == 0
    assert make_hkl.main([str(made.folders), str(tmp_path / "direct"), *words]) == 0
    converted, direct = read_all(tmp_path / "new"), read_all(tmp_path / "direct")
    for name, content in direct.items():  # but for the last images of training, which do not fill a batch
        if name.endswith(".hkl") and name != "train_hkl/0011.hkl":
            assert converted[name] == content, name
    for name in ("misc/train_order.txt", "misc/val.txt"):
        assert direct[name].startswith(converted[name])
    manifest = json.loads(converted["manifest.json"])
    assert manifest["classes"] == WNIDS and manifest["class_names"] == imagenet.WORDS


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_folder_for_theano_alexnets_own_code(tmp_path: Path, parts: int) -> None:
    """Read as its trainers do: each takes the files and labels that end in its own digits."""
    made = imagenet.build(tmp_path / "imagenet")
    words = ["--size", "16", "--batch", "8", "--workers", "1", "--layout", "c01b", "--split", str(parts)]
    folder = tmp_path / "set"
    assert make_hkl.main([str(made.tars), str(folder), *words]) == 0
    n_rows = 8 // parts
    for split, n_batches in (("train", 5), ("val", 2)):
        for suffix in theano_alexnet.SUFFIXES[parts]:
            files = sorted((folder / f"{split}_hkl_b8_b_{n_rows}").glob(f"*{suffix}.hkl"))
            labels = np.load(folder / "labels" / f"{split}_labels{suffix}.npy")
            assert len(files) == n_batches and len(labels) == n_batches * n_rows
            for number, path in enumerate(files):
                images = hkl.read(path)
                assert images.shape == (3, 16, 16, n_rows)
                expected = [imagenet.label_of(image) for image in images.transpose(3, 1, 2, 0)]
                assert labels[number * n_rows : (number + 1) * n_rows].tolist() == expected
    mean = np.load(folder / "misc" / "img_mean.npy")
    assert mean.shape == (3, 16, 16) and mean.dtype == np.float64
    names = np.load(folder / "misc" / "shuffled_train_filenames.npy", allow_pickle=False)
    labels = np.load(folder / "labels" / "train_labels.npy")
    assert [WNIDS.index(name.decode().split("/")[0]) for name in names] == labels.tolist()
    dataset = open_dataset(make_config(data_folder=str(folder), n_classes=None))
    assert dataset.n_classes == 5 and len(dataset.train) == 40


def test_layouts_that_can_not_be_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--split", "2"],
        ["--layout", "c01b", "--split", "3"],
        ["--layout", "c01b", "--batch", "7", "--split", "2"],
    ):
        assert make_hkl.main([str(tmp_path), str(tmp_path / "set"), *words]) == 2
        assert "--split" in capsys.readouterr().err


def test_subtracting_one_mean_a_channel(shared_folder: Path) -> None:
    image = open_dataset(make_config(data_folder=str(shared_folder))).mean
    channel = open_dataset(make_config(data_folder=str(shared_folder), subtract_mean="channel")).mean
    assert channel.shape == image.shape and channel.dtype == np.float32
    assert np.allclose(channel, image.mean((0, 1)), atol=1e-4) and len(np.unique(channel)) == 3
