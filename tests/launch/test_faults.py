"""Each operation on files of a run and of preprocessing fails: nothing is lost, the next start resumes."""

import errno
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import make_folder
from faulty import LASTING, Ended, Fault, Runner, each_once, named_again
from PIL import Image
from safetensors.numpy import load_file
from saved import assert_same

from lockstep.data.manifest import differing
from lockstep.files import checksum
from lockstep.runs.checkpoint_files import verify_checksum

ERRORS = ("ENOSPC", "EIO", "EROFS", "EDQUOT", "EINTR")
OF_READS = ("EIO", "EINTR", "short")
# What the launcher writes when it learns that training has begun, which the trainer does not wait for.
OF_LAUNCHER = {"log.jsonl", "dataset_mean.npy", "dataset.json", "smallnet.py", "config.yaml"}
LAST = 0  # stands for the number of the last one
END = "run/checkpoints/epoch_0002.safetensors"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("faults"))
    yield runner
    runner.close()


@dataclass
class Training:
    """A run of two epochs, and where it stood after the first.

    operations: of its second start, on its own files. reads: how many there were then, by file, of all files.
    needed: how many of each kind, by file, there were before its last checkpoint was whole.
    """

    runner: Runner
    data: Path
    begun: Path
    end: dict[str, np.ndarray]
    operations: list[tuple[str, str]]
    reads: Counter[str]
    needed: Counter[tuple[str, str]]

    def is_skipped(self, fault: Fault) -> bool:
        """Return whether it hits the search for checkpoints to remove, which skips unreadable records."""
        key = fault.kind, fault.name
        is_record = fault.name.startswith("run/checkpoints/epoch_") and fault.name.endswith(".json")
        return is_record and fault.kind in ("open", "read") and fault.nth > self.needed[key]

    def start(
        self, folder: Path, n_epochs: int = 2, fault: Fault | None = None, below: Path | None = None
    ) -> Ended:
        """below: which folder has the fault, `folder` or the dataset's."""
        keys = {"data_folder": self.data, "weights_dir": folder, "run_name": "run", "n_epochs": n_epochs}
        keys |= {"devices": "[cpu]", "n_classes": 7, "batch_size": 8, "shuffle_block": 4, "print_freq": 3}
        keys |= {"cpu_threads": 1, "para_load": "false", "snapshot_freq": 1, "resume_train": "auto"}
        words = [f"{key}={value}" for key, value in keys.items()]
        return self.runner.run("train.py", words, below or folder, fault)


@pytest.fixture(scope="module")
def training(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Training:
    place = tmp_path_factory.mktemp("training")
    training = Training(
        runner, make_folder(place / "set", 24, 8), place / "begun", {}, [], Counter(), Counter()
    )
    first = training.start(training.begun, n_epochs=1)
    assert first.code == 0, first.output
    for name, below in (("again", training.data), ("unbroken", None)):
        shutil.copytree(training.begun, place / name)
        unbroken = training.start(place / name, below=below)
        assert unbroken.code == 0, unbroken.output
        training.reads.update(name for kind, name in unbroken.operations if kind == "read")
    saved = unbroken.operations.index(("rename", "run/checkpoints/epoch_0002.json"))
    training.needed.update(unbroken.operations[:saved])
    training.end, training.operations = load_file(place / "unbroken" / END), unbroken.operations
    return training


def assert_named(ended: Ended, fault: Fault, start: str) -> None:
    """Exit code and last line are right for a fault that came to be."""
    assert ended.fired, f"{fault} did not come to be: {ended.output}"
    assert "Traceback" not in ended.output, f"{fault}: {ended.output}"
    if fault.error == "kill":
        assert ended.code in (1, -9), f"{fault}: {ended.code}, {ended.output}"
        assert ended.code == -9 or "was killed by SIGKILL" in ended.last_line()
        return
    if fault.error in ("EINTR", "short") and ended.code == 0:  # it was done again, or to its end
        return
    if fault.kind == "mkdir" and ended.code == 0:  # of a folder that exists
        return
    looks_for_another_run = (fault.kind, fault.nth, Path(fault.name).name) == ("open", 1, ".lock")
    if looks_for_another_run and fault.error not in LASTING and ended.code == 0:  # to wait for its end
        return
    assert ended.code in (1, 2), f"{fault}: {ended.code}, {ended.output}"
    line, name = ended.last_line(), Path(fault.name).name
    name = name.removesuffix(".tmp").strip(".*")
    assert line.startswith(start), f"{fault}: {line}"
    names = {name, *OF_LAUNCHER} if fault.error in LASTING else {name}  # the launcher may write first
    assert any(each in line for each in names), f"{fault}: {line}"
    opened_by_safetensors = fault.kind == "open" and "No such file" in line  # whatever it is
    assert opened_by_safetensors or os.strerror(getattr(errno, fault.error)) in line, f"{fault}: {line}"


def check_training(training: Training, fault: Fault, folder: Path) -> None:
    """Check one fault in a run's second start."""
    shutil.copytree(training.begun, folder)
    ended = training.start(folder, fault=fault)
    if not training.is_skipped(fault):
        assert_named(ended, fault, "lockstep: ")
    elif ended.code:  # by the next write, if the disk stays full
        assert_named(ended, replace(fault, name="run/log.jsonl"), "lockstep: ")
    records = sorted((folder / "run/checkpoints").glob("*.json"))
    assert [verify_checksum(record).state.epoch for record in records] in ([1], [1, 2]), str(fault)
    again = training.start(folder)
    whole = "epochs are done" in again.last_line()
    assert again.code == 0 or whole, f"after {fault}: {again.output}"
    assert_same(load_file(folder / END), training.end)
    assert whole or not list((folder / "run/checkpoints").glob(".*")), f"{fault} left a temporary file"
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("write", "run/log.jsonl", 2, "ENOSPC"),
        Fault("write", "run/checkpoints/.epoch_0002.safetensors.tmp", 1, "EIO"),
        Fault("write", "run/checkpoints/.epoch_0002.safetensors.tmp", 2, "kill"),
        Fault("rename", "run/checkpoints/epoch_0002.json", 1, "EROFS"),
    ],
    ids=str,
)
def test_a_run_loses_nothing_by(fault: Fault, training: Training, tmp_path: Path) -> None:
    check_training(training, fault, tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_loses_nothing_by_any_operation_that_fails(training: Training, tmp_path: Path) -> None:
    faults = list(each_once(training.operations, ERRORS))
    assert {fault.kind for fault in faults} >= {"open", "write", "fsync", "rename"}
    for fault in faults:
        check_training(training, fault, tmp_path / "runs")


def check_reading(training: Training, fault: Fault, folder: Path) -> None:
    """Check a read that fails, of a file of the run or of the dataset."""
    shutil.copytree(training.begun, folder)
    below = folder if fault.name.startswith("run/") else training.data
    ended = training.start(folder, fault=fault, below=below)
    assert ended.fired and "Traceback" not in ended.output, f"{fault}: {ended.output}"
    if fault.error == "EIO" and not is_read_again(fault) and not training.is_skipped(fault):
        assert_named(ended, fault, "lockstep: ")
        assert ended.code == 2
        ended = training.start(folder)
    assert ended.code == 0, f"{fault}: {ended.output}"
    assert_same(load_file(folder / END), training.end)
    shutil.rmtree(folder)


def is_read_again(fault: Fault) -> bool:
    """Images are (`read_retries`); headers of their files are read at the start, by HDF5."""
    return fault.name.endswith(".hkl") and fault.nth > 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("read", "run/checkpoints/epoch_0001.safetensors", 1, "EIO"),
        Fault("read", "labels/train_labels.npy", 2, "EIO"),
        Fault("read", "val_hkl/0000.hkl", 1, "EIO"),
        Fault("read", "train_hkl/0000.hkl", LAST, "EIO"),
        Fault("read", "train_hkl/0000.hkl", LAST, "short"),
    ],
    ids=str,
)
def test_a_read_that_fails_is_named_or_done_again(fault: Fault, training: Training, tmp_path: Path) -> None:
    fault = replace(fault, nth=fault.nth or training.reads[fault.name])
    check_reading(training, fault, tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_any_read_that_fails_is_named_or_done_again(training: Training, tmp_path: Path) -> None:
    """The first and the last of each file, with every error."""
    assert {name.split("/")[0] for name in training.reads} == {
        "run",
        "train_hkl",
        "val_hkl",
        "labels",
        "misc",
    }
    for name, n_reads in training.reads.items():
        for error in OF_READS:
            for nth in {1, n_reads}:
                check_reading(training, Fault("read", named_again(name), nth, error), tmp_path / "runs")


@dataclass
class Preprocessing:
    """make_hkl.py on a few images. made: the folder undisturbed. operations: of its making."""

    runner: Runner
    images: Path
    made: Path
    operations: list[tuple[str, str]]

    def start(self, target: Path, fault: Fault | None = None) -> Ended:
        words = [str(self.images), str(target), "--size", "8", "--batch", "2", "--workers", "1"]
        return self.runner.run("preprocessing/make_hkl.py", words, target.parent, fault)


@pytest.fixture(scope="module")
def preprocessing(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Preprocessing:
    place = tmp_path_factory.mktemp("preprocessing")
    dice = np.random.default_rng(1)
    for number in range(6):
        path = place / f"images/{'train' if number < 4 else 'val'}/class{number % 2}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dice.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
    preprocessing = Preprocessing(runner, place / "images", place / "made/set", [])
    preprocessing.made.parent.mkdir()
    unbroken = preprocessing.start(preprocessing.made)
    assert unbroken.code == 0, unbroken.output
    preprocessing.operations = unbroken.operations
    return preprocessing


def check_preprocessing(preprocessing: Preprocessing, fault: Fault, place: Path) -> None:
    place.mkdir()
    ended = preprocessing.start(place / "set", fault)
    assert_named(ended, fault, "make_hkl: ")
    if ended.code:
        assert not (place / "set").exists(), f"{fault} left an unfinished folder with the name of a whole one"
        again = preprocessing.start(place / "set")
        assert again.code == 0, f"after {fault}: {again.output}"
    sums = {name: checksum(preprocessing.made / name) for name in files_below(preprocessing.made)}
    assert files_below(place / "set") == sorted(sums), str(fault)
    assert not list(differing(place / "set", sums)), str(fault)
    shutil.rmtree(place)


def first_of_each(operations: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without those that differ from an earlier one in the number of a batch or in which half it is of."""
    found = {}
    for kind, name in operations:
        alike = re.sub(r"train|val|\d+", "", named_again(name))
        found.setdefault((kind, alike), (kind, name))
    return list(found.values())


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "fault",
    [
        Fault("write", ".set.unfinished/train_hkl/.0001.hkl.*", 1, "ENOSPC"),
        Fault("write", ".set.unfinished/misc/.img_mean.npy.tmp", 1, "kill"),
    ],
    ids=str,
)
def test_preprocessing_loses_nothing_by(fault: Fault, preprocessing: Preprocessing, tmp_path: Path) -> None:
    check_preprocessing(preprocessing, fault, tmp_path / "place")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_preprocessing_loses_nothing_by_any_operation_that_fails(
    preprocessing: Preprocessing, tmp_path: Path
) -> None:
    for fault in each_once(first_of_each(preprocessing.operations), ERRORS):
        check_preprocessing(preprocessing, fault, tmp_path / "place")
