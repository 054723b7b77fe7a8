"""Runs with any number of classes per image: exactness, resuming, the log, validate and predict."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Program
from forked_programs import forked
from limits import limit
from multilabel_folders import NAMES, make_multilabel_set, write_multilabel
from training_runs import assert_same, newest, relative_difference, train

SEVERAL = {"task": "multilabel", "n_classes": 4, "model": "small_networks:TwoHeads", "n_epochs": 2}
SEVERAL |= {"learning_rate": 0.01, "snapshot_freq": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 training images in steps of 8: the last step has 5, which 3 trainers share unevenly."""
    return make_multilabel_set(tmp_path_factory.mktemp("data") / "set")


def record_of(place: Path) -> list[dict[str, float]]:
    record: list[dict[str, float]] = json.loads(newest(place).with_suffix(".json").read_text())["val_record"]
    return record


@pytest.mark.parametrize(
    "values",
    [
        {"rule": "weights", "label_smoothing": 0.1},
        {"rule": "gradients", "optimizer": "adamw", "class_weights": "balanced"},
        {"rule": "gradients", "mixup": 0.4, "cutmix": 1.0, "class_weights": [1.0, 2.0, 0.5, 3.0]},
    ],
    ids=["weights", "balanced", "mixed"],
)
def test_any_number_of_trainers_computes_the_same(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    keys = {**SEVERAL, **values}
    one, three = (train(n, data, tmp_path / str(n), **keys) for n in (1, 3))
    assert relative_difference(three, one) <= 1e-12
    for ours, theirs in zip(record_of(tmp_path / "3"), record_of(tmp_path / "1"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_labels_decide_what_is_learnt(data: Path, tmp_path: Path) -> None:
    """The negative control of the test above."""
    keys = {**SEVERAL, "n_epochs": 1}
    plain, weighted = (
        train(1, data, tmp_path / str(weights), class_weights=weights, **keys)
        for weights in (None, [1.0, 2.0, 0.5, 3.0])
    )
    assert relative_difference(plain, weighted) > 1e-6


def test_logical_ranks_have_the_same_bits(data: Path, tmp_path: Path) -> None:
    keys = {**SEVERAL, "logical_ranks": 4, "double": False, "mixup": 0.4}
    one, two, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2, 4))
    assert_same(two, one)
    assert_same(four, one)
    assert record_of(tmp_path / "1") == record_of(tmp_path / "2") == record_of(tmp_path / "4")
    assert record_of(tmp_path / "1")[0].keys() == {
        "epoch",
        "loss",
        "mean_average_precision",
        "macro_f1",
        "micro_f1",
    }


def test_a_resumed_run_has_the_same_bits(data: Path, tmp_path: Path) -> None:
    whole = train(2, data, tmp_path / "whole", **SEVERAL)
    train(2, data, tmp_path / "broken", stopped=True, **SEVERAL)
    assert_same(train(2, data, tmp_path / "broken", start=newest(tmp_path / "broken"), **SEVERAL), whole)
    assert record_of(tmp_path / "broken") == record_of(tmp_path / "whole")


def lockstep(*words: str, place: Path) -> "subprocess.CompletedProcess[str]":
    command = forked([sys.executable, "-m", "lockstep.cli", *words])
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=limit(120))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on a folder of images with a table."""
    place = tmp_path_factory.mktemp("run")
    write_multilabel(place / "mine")
    keys = ["task=multilabel", "n_epochs=2", "batch_size=8", "print_freq=2", "devices=[cpu, cpu]"]
    done = lockstep("train", "mine", *keys, "report=true", "run_name=run", "monitor=macro_f1", place=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation mAP " in done.stdout and ", label error " in done.stdout
    assert "top-" not in done.stdout
    return place / "runs" / "run"


@pytest.mark.slow
def test_the_log_has_what_is_measured_and_no_top_1(trained: Path) -> None:
    events = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    (first, last) = [event for event in events if event["event"] == "validated"]
    assert not first.keys() & {"error_top1", "error_top5", "confusion"}
    assert last["means"].keys() >= {"mean_average_precision", "macro_f1", "micro_f1", "label_error"}
    assert list(last["classes"]) == ["support", "precision", "recall", "f1", "average_precision"]
    assert last["means"]["mean_average_precision"] == pytest.approx(
        np.mean(last["classes"]["average_precision"])
    )


@pytest.mark.slow
def test_the_report_shows_precision_and_no_confusions(trained: Path) -> None:
    page = (trained / "report.html").read_text()
    assert "Mean average precision" in page and "<th>Class</th>" in page
    assert "Best epoch&#x27;s mAP" in page and ", by macro_f1" in page
    assert "Label error" in page and "Confusion matrix" not in page and "op-1" not in page


@pytest.mark.slow
def test_validate_agrees_with_the_run(trained: Path, tmp_path: Path) -> None:
    files = str(tmp_path / "out.json"), str(tmp_path / "out.csv")
    done = lockstep("validate", str(trained), "--json", files[0], "--csv", files[1], place=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean average precision " in done.stdout and "top-1" not in done.stdout
    result = json.loads(Path(files[0]).read_text())
    events = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "validated"][-1]
    for name, value in last["means"].items():
        assert result[name] == pytest.approx(value), name
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-5)
    with open(files[1], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list(NAMES)
    assert [float(row["average_precision"]) for row in rows] == last["classes"]["average_precision"]


@pytest.mark.slow
def test_predict_gives_all_classes_above_the_threshold(trained: Path, tmp_path: Path) -> None:
    image = str(trained.parents[1] / "mine" / "000.png")
    shown = {}
    for threshold in (None, 0.0, 1.0):
        words = [] if threshold is None else ["--threshold", str(threshold)]
        done = lockstep("predict", image, "--run", str(trained), "--json", *words, place=tmp_path)
        assert done.returncode == 0, done.stderr
        shown[threshold] = json.loads(done.stdout.splitlines()[-1])["answers"]
    assert sorted(each["class"] for each in shown[0.0]) == list(NAMES) and shown[1.0] == []
    assert shown[None] == [each for each in shown[0.0] if each["probability"] >= 0.5]
    folder = str(trained.parents[1] / "mine")
    done = lockstep("predict", folder, "--run", str(trained), "--out", "all.csv", place=tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 121 and {len(row) for row in rows} == {len(rows[0])}
    refused = lockstep("predict", image, "--run", str(trained), "--threshold", "2", place=tmp_path)
    assert refused.returncode == 2 and "--threshold: 2 is not from 0 to 1" in refused.stderr


@pytest.mark.slow
def test_a_threshold_is_refused_for_one_class_per_image(program: Program) -> None:
    running = program.run("n_epochs=1", "devices=[cpu]")
    image = next((ROOT / "docs").glob("*.png"))
    refused = lockstep(
        "predict", str(image), "--run", str(running.run_folder), "--threshold", "0.5", place=program.place
    )
    assert refused.returncode == 2 and "--threshold: is for task: multilabel" in refused.stderr
    changed = program.run("resume_train=true", "n_epochs=2", "task=multilabel", code=2)
    assert "task" in changed.last_line()


@pytest.mark.slow
def test_a_key_of_its_task_alone_can_be_changed_when_it_resumes(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    keys = [f"weights_dir={tmp_path}", "run_name=run", "resume_train=true", "n_epochs=3", "threshold=0.3"]
    command = forked([sys.executable, str(ROOT / "train.py"), *keys])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit(60))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "threshold is 0.3 now, was 0.5 before" in done.stdout
