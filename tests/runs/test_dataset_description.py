"""The dataset's description in a run's folder: until which checkpoint each one is kept, and damaged files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_config

from lockstep.data.description import Description
from lockstep.errors import UserError
from lockstep.runs.dataset_description import check_same_classes, read_description, write_description
from lockstep.runs.folder import open_run


def test_a_kept_description_ends_with_the_checkpoints_that_it_is_for(tmp_path: Path) -> None:
    """The newest checkpoints may be damaged, so that a run resumes from an older one, or from scratch."""

    def begin(mean: int, start: str) -> None:
        image = np.full((2, 2, 3), mean, np.float32)
        write_description(tmp_path, Description(("a",), image, "squash", "ignore"), start)

    def means(*names: str) -> list[int]:
        found = [read_description(tmp_path, name) for name in names]
        return [int(each.mean[0, 0, 0]) for each in found if each]

    begin(1, "")
    begin(2, "epoch_0002_at_64")
    begin(3, "epoch_0010")
    assert means("epoch_0001", "epoch_0002_at_64", "epoch_0002", "epoch_0010") == [1, 1, 2, 2]
    assert means("epoch_0011", "") == [3, 3]
    begin(4, "epoch_0010")  # the one before had not made a checkpoint
    assert means("epoch_0001", "epoch_0010", "epoch_0011", "") == [1, 2, 4, 4]
    begin(5, "epoch_0001")
    assert means("epoch_0001", "epoch_0002", "epoch_0010") == [1, 5, 5]
    begin(6, "")
    assert means("epoch_0001", "epoch_0002") == [6, 6]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Path.mkdir, "is not a regular file"),
        (lambda path: path.write_bytes(b"mean"), "it does not begin as one. numpy.save writes such files"),
        (lambda path: None, "there is no such file"),
    ],
)
def test_a_runs_mean_that_cant_be_read_is_named(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    write_description(tmp_path, Description(("a",), np.zeros((8, 8, 3), np.float32), "squash", "apply"))
    mean = tmp_path / "dataset_mean.npy"
    mean.unlink()
    make(mean)
    with pytest.raises(UserError) as raised:
        read_description(tmp_path)
    assert str(raised.value).startswith(f"{mean}: ")
    assert f"{reason}. Remove dataset.json to read the dataset itself." in str(raised.value)


def test_folders_with_other_numbers_as_names_are_other_classes(tmp_path: Path) -> None:
    """Classes 0, 1, 2 of a run may be the folders 0, 1, 2; those of folders 1, 2, 3 would be shifted."""
    known = Description(("0", "1", "2"), np.zeros((1, 1, 3), np.float32), "squash", "ignore")
    check_same_classes(("0", "b", "2"), "data", known, tmp_path)
    with pytest.raises(UserError, match="data: class 1 is '2', and '1' in the training data of"):
        check_same_classes(("0", "2", "3"), "data", known, tmp_path)


def test_names_of_classes_outlast_data_without_names(tmp_path: Path) -> None:
    """Otherwise classes in another order would be accepted after such data."""
    for names, start in (("ab", ""), ("01", "epoch_0001"), ("01", "epoch_0002")):
        image = np.zeros((2, 2, 3), np.float32)
        write_description(tmp_path, Description(tuple(names), image, "squash", "ignore"), start)
        known = read_description(tmp_path)
        assert known and known.class_names == ("a", "b")
    with pytest.raises(UserError, match="data: class 0 is 'b', and 'a' in the training data of"):
        check_same_classes(("b", "a"), "data", known, tmp_path)


def test_a_run_that_takes_weights_for_classes_of_other_names_says_so(tmp_path: Path) -> None:
    """Continuing a training with them (`pretrained_part: whole`) is refused, as resuming is."""
    origin = tmp_path / "origin"
    checkpoint = origin / "checkpoints" / "epoch_0001.safetensors"
    checkpoint.parent.mkdir(parents=True)
    write_description(origin, Description(("a", "b"), np.zeros((2, 2, 3), np.float32), "squash", "ignore"))

    def notes(*names: str, **keys: Any) -> list[str]:
        run = open_run(make_config(weights_dir=str(tmp_path), **keys), 8, class_names=names)
        run.lock.close()
        return run.notes

    for weights in (str(origin), str(checkpoint)):
        (note,) = notes("b", "c", pretrained=weights)
        assert "class 0 is 'b', and 'a' in the training data of" in note and "new_head: true" in note
        assert notes("a", "b", pretrained=weights, pretrained_part="whole") == []
        with pytest.raises(UserError, match="class 0 is 'b', and 'a' in the training data of"):
            notes("b", "c", pretrained=weights, pretrained_part="whole", run_name="whole")
    assert not (tmp_path / "whole").exists()
    assert notes("b", "c", pretrained=str(origin), new_head=True) == []
    assert notes("b", "c", pretrained=str(tmp_path / "net.pth")) == []
