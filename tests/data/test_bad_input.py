"""Data, checkpoints and models that can't be used: found, named, exit code 2, and nothing good is damaged."""

import json
import multiprocessing
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SIZE, Program, make_config
from own_folders import write_classes

from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.launch.status import StatusBoard
from lockstep.runs import checkpoint
from lockstep.runs.checkpoint_files import find_checkpoint, verify_checksum
from lockstep.runs.plan import RunPlan
from lockstep.runs.state import State
from train_funcs import Trainer


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def replace(name: str, array: np.ndarray):
    def change(folder: Path) -> None:
        path = folder / name
        (hkl.write if name.endswith(".hkl") else np.save)(path, array)

    return change


def truncate(name: str, n_bytes: int):
    return lambda folder: os.truncate(folder / name, n_bytes)


def hold_images(folder: Path) -> None:
    shutil.rmtree(folder)
    write_classes(folder, {"cat": 1, "dog": 1})


def replace_by_device(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/null")

    return change


def set_manifest(text: str):
    return lambda folder: (folder / "manifest.json").write_text(text)


HKL, LABELS, MEAN = "train_hkl/0001.hkl", "labels/train_labels.npy", "misc/img_mean.npy"
IMAGES = np.zeros((32, SIZE, SIZE, 3), np.uint8)
ENTRY = {"file": "train_hkl/0000.hkl", "labels": [0]}
MANIFEST = {"version": 1, "classes": ["a"], "train": [ENTRY], "val": [ENTRY]}


@pytest.mark.parametrize(
    ("change", "named", "message"),
    [
        (lambda folder: shutil.rmtree(folder / "val_hkl"), "val_hkl", "there is no such folder"),
        (shutil.rmtree, "set", "there is no such dataset folder. Set data_folder to a folder of images"),
        (hold_images, "train_hkl", "If data_folder holds images, convert them (lockstep convert IMAGES"),
        (truncate(HKL, 5000), HKL, "is not a whole .hkl"),
        (truncate(HKL, 0), HKL, "is not a whole .hkl"),
        (replace(HKL, IMAGES[:31]), LABELS, "holds 90 labels for the 89 images"),
        (replace(HKL, IMAGES[:, :20]), HKL, "images are (20, 36, 3), not (36, 36, 3)"),
        (replace(HKL, IMAGES.astype(np.float32)), HKL, "holds float32"),
        (replace(HKL, IMAGES.transpose(3, 1, 2, 0)), HKL, "looks like theano_alexnet's"),
        (replace(HKL, IMAGES[:0]), HKL, "holds uint8 of shape (0, 36, 36, 3)"),
        (remove(LABELS), LABELS, "there is no such file"),
        (truncate(LABELS, 200), LABELS, "is not a whole .npy file"),
        (replace(LABELS, np.zeros(91, int)), LABELS, "holds 91 labels for the 90 images"),
        (replace(LABELS, np.full(90, 7)), LABELS, "label 7 of image 0 is not in 0 to 6"),
        (replace(LABELS, np.full(90, -1)), LABELS, "label -1 of image 0"),
        (replace(LABELS, np.zeros(90)), LABELS, "not one integer per image"),
        (replace(LABELS, np.array([{}] * 90)), LABELS, "is not a whole .npy file of numbers"),
        (remove(MEAN), MEAN, "there is no such file"),
        (
            lambda folder: (folder / MEAN).write_text("root:x:0:0\n"),
            MEAN,
            "is not a whole .npy file of numbers or names: it does not begin as one. numpy.save writes",
        ),
        (
            replace(MEAN, np.zeros((3, SIZE, 30))),
            MEAN,
            "the mean image is (3, 36, 30), the images are (36, 36, 3)",
        ),
        (replace(MEAN, np.full((SIZE, SIZE, 3), np.nan)), MEAN, "holds values outside of 0 to 255"),
        (set_manifest("{"), "manifest.json", "can't be read"),
        (set_manifest("[]"), "manifest.json", "is not a manifest"),
        (set_manifest('{"version": 1, "classes": 5, "train": [], "val": []}'), "manifest.json", "is not"),
        (
            set_manifest('{"version": 1, "classes": ["a"], "train": [null], "val": []}'),
            "manifest.json",
            "is not",
        ),
        (
            set_manifest('{"version": 1, "classes": ["a"], "train": [{}], "val": []}'),
            "manifest.json",
            "is not",
        ),
        (set_manifest("[" * 100_000), "manifest.json", "can't be read"),
        (
            lambda folder: (folder / LABELS).write_bytes(b"PK\3\4 and so on"),
            LABELS,
            "is not a whole .npy file",
        ),
        (replace(MEAN, np.full((SIZE, SIZE, 3), 1e300)), MEAN, "holds values outside of 0 to 255"),
        (replace_by_device(MEAN), MEAN, "is not a regular file"),
        (replace_by_device(LABELS), LABELS, "is not a regular file"),
        (replace_by_device(HKL), HKL, "is not a regular file"),
        (set_manifest("{}"), "manifest.json", "is not a manifest"),
        (
            set_manifest(json.dumps({**MANIFEST, "resize": "stretch"})),
            "manifest.json",
            "resize must be one of squash, crop, pad, not 'stretch'",
        ),
        (set_manifest(json.dumps({**MANIFEST, "resize": ["crop"]})), "manifest.json", "not ['crop']"),
        (
            set_manifest(json.dumps({**MANIFEST, "orientation": 6})),
            "manifest.json",
            "orientation must be one of apply, ignore, not 6",
        ),
    ],
)
def test_a_broken_dataset_folder_names_the_file(folder: Path, change, named: str, message: str) -> None:
    change(folder)
    with pytest.raises(UserError) as caught:
        open_dataset(make_config(data_folder=str(folder)))
    assert named in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("key", ["train_folder", "val_folder"])
def test_a_missing_folder_of_batches_names_the_key_that_gave_it(folder: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: /nowhere: there is no such folder"):
        open_dataset(make_config(data_folder=str(folder), **{key: "/nowhere"}))


def test_classes_must_be_known(folder: Path) -> None:
    with pytest.raises(UserError, match="set n_classes"):
        open_dataset(make_config(data_folder=str(folder), n_classes=None))


def test_a_manifest_that_disagrees_names_the_file(folder: Path) -> None:
    labels = {
        split: np.load(folder / "labels" / f"{split}_labels.npy").tolist() for split in ("train", "val")
    }
    manifest = {"version": 1, "classes": list("abcdefg")}
    for split, own in labels.items():
        manifest[split] = [
            {"file": f"{split}_hkl/{number:04d}.hkl", "labels": own[first : first + 32]}
            for number, first in enumerate(range(0, len(own), 32))
        ]
    set_manifest(json.dumps(manifest))(folder)
    assert open_dataset(make_config(data_folder=str(folder), n_classes=None)).n_classes == 7
    wrong = json.loads(json.dumps(manifest))
    wrong["train"][1]["labels"][3] ^= 1
    set_manifest(json.dumps(wrong))(folder)
    with pytest.raises(UserError, match=r"0001\.hkl: its labels are not those of the manifest"):
        open_dataset(make_config(data_folder=str(folder)))
    del manifest["train"][2]
    set_manifest(json.dumps(manifest))(folder)
    with pytest.raises(UserError, match="holds 3 files, the manifest has 2"):
        open_dataset(make_config(data_folder=str(folder)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=nonet"], "there is no models/nonet.py (there are: alexnet, "),
        (["model=../train"], "there is no models/../train.py"),
        (
            ["model=no_such_package:Net"],
            "the Python package no_such_package, which is not installed. Install it, or",
        ),
        (["model=alexnet"], "model alexnet takes 227 x 227 images"),
        (
            ["model_args={depth: 3}"],
            "model smallnet: can't be made for 7 classes with model_args {'depth': 3}",
        ),
        (["devices=[cuda:99]"], "devices: cuda:99 "),
        (["devices=[tpu]"], "'tpu' is not a device"),
        (["resume_train=true"], "there is no such run to resume"),
        (["load_epoch=3"], "load_epoch=3 selects a checkpoint to resume from: it needs resume_train=True"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml: can't be read"),
        (["learning_rate=1e30"], "lower learning_rate"),
    ],
)
def test_the_program_refuses_with_code_2_and_no_traceback(
    program: Program, words: list[str], message: str
) -> None:
    running = program.run(*words, code=2, devices="[cpu]")
    assert message in running.last_line() and "Traceback" not in running.output()
    running.assert_nothing_left()


def test_a_file_that_breaks_while_training_is_named_by_its_loader(folder: Path, program: Program) -> None:
    program.data = folder
    running = program.start("n_epochs=100000")
    running.wait_for_text("step 2/6")
    os.truncate(folder / "train_hkl" / "0001.hkl", 7000)
    assert running.wait(20) == 2
    assert "loader" in running.last_line()
    assert "0001.hkl: can't be read: it was changed after the start of the run" in running.last_line()


@pytest.mark.parametrize(
    ("model", "name", "advice"),
    [("smallnet", "weights/fc5.bias", "$"), ("resnet20", "buffers/bn1.running_mean", ".*-1e9 .*-inf$")],
)
def test_numbers_that_are_not_finite_are_named_and_not_saved(
    model: str, name: str, advice: str, shared_folder: Path, tmp_path: Path
) -> None:
    control, _keep_open = multiprocessing.Pipe()
    plan = RunPlan(make_config(data_folder=str(shared_folder), para_load=False, model=model), tmp_path, None)
    trainer = Trainer(plan, Group.on_one_host(0, {}), Pipe(control, "the launcher", 5), StatusBoard.create())
    trainer.program.arena.tensors[name][0] = float("-inf")
    trainer.save()
    message = rf"^{name} is not finite in the checkpoint of epoch 1 .*: lower learning_rate{advice}"
    with pytest.raises(UserError, match=message):
        trainer.saver.finish()
    assert list(tmp_path.iterdir()) == []


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-100, 2)
        file.write(b"damaged!")


@pytest.mark.slow
def test_half_written_and_damaged_checkpoints_are_passed_over_or_refused(program: Program) -> None:
    running = program.run("n_epochs=3", "snapshot_freq=1")
    checkpoints = running.run_folder / "checkpoints"
    damage(checkpoints / "epoch_0003.safetensors")
    (checkpoints / "epoch_0002.json").write_text('{"epoch": 2')
    (checkpoints / "epoch_0002_backup.json").write_text("someone's own file")
    found, notices = find_checkpoint(running.run_folder, "latest")
    assert found.state.epoch == 1
    assert "epoch_0003.safetensors: is damaged" in notices[0] and "epoch_0002.json" in notices[1]
    refused = program.run("n_epochs=3", "resume_train=true", "load_epoch=3", code=2)
    assert "epoch_0003.safetensors: is damaged or half written" in refused.last_line()
    refused = program.run("n_epochs=3", "resume_train=true", "load_epoch=7", code=2)
    assert "has no checkpoint of epoch 7" in refused.last_line()
    (checkpoints / "epoch_0001.safetensors").unlink()
    with pytest.raises(UserError, match="has no whole checkpoint; passing over"):
        find_checkpoint(running.run_folder, "latest")


def test_a_folder_that_is_no_runs_is_not_said_to_lack_a_checkpoint(folder: Path) -> None:
    with pytest.raises(UserError, match="is not a run's folder: it has no folder checkpoints"):
        find_checkpoint(folder, "latest")
    (folder / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no whole checkpoint"):
        find_checkpoint(folder, "latest")


def test_a_folder_of_checkpoints_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.glob() finds nothing there, as if the run had saved nothing."""
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests' user may be root
    with pytest.raises(UserError, match="checkpoints: can't be read: Permission denied"):
        find_checkpoint(tmp_path, "latest")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", "x"),
        ("epoch", 1.5),
        ("position", None),
        ("position", -5),
        ("val_record", 5),
        ("val_record", [None]),
        ("config", []),
        ("learning_rate", "x"),
    ],
)
def test_an_edited_record_is_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "checkpoints").mkdir()
    state = State(1, 90, 90, 0.1, [{"error_top1": 0.5}], 2, {}, {})
    checkpoint.save(tmp_path, {"weights/a": torch.zeros(3)}, state)
    record = tmp_path / "checkpoints" / "epoch_0001.json"
    assert verify_checksum(record).state.epoch == 1
    record.write_text(json.dumps({**json.loads(record.read_text()), key: value}))
    with pytest.raises(UserError, match=r"epoch_0001\.json: is not a checkpoint record"):
        verify_checksum(record)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_number_of_classes(program: Program, folder: Path) -> None:
    program.run("n_epochs=1", devices="[cpu]")
    refused = program.run("n_epochs=2", "resume_train=true", "n_classes=9", code=2, devices="[cpu]")
    assert "has 9 classes (n_classes=9), and the training data of" in refused.last_line()


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    state = State(1, 90, 90, 0.1, [{"error_top1": 0.5}], 2, {}, {})
    checkpoint.save(tmp_path, {"weights/a": torch.zeros(100_000)}, state)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, unlimited[1])
    )  # as a full disk: writing fails half-way
    try:
        with pytest.raises(UserError, match=r"epoch_0001\.safetensors: the checkpoint can't be written"):
            checkpoint.save(tmp_path, {"weights/a": torch.ones(100_000)}, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before
    assert find_checkpoint(tmp_path, "latest")[0].state.sha256
