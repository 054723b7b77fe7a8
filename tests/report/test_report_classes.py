"""The report's section on classes: a row for each, and a heat map of all or of the worst."""

import json
import re
from pathlib import Path

import numpy as np

from lockstep.report.classes import classes
from lockstep.report.runlog import RunLog, read_run
from lockstep.runs.metrics import AnswerCounts


def section_of(n_classes: int, labels: np.ndarray, answers: np.ndarray, folder: Path) -> str:
    counts = AnswerCounts.of(n_classes, labels, answers)
    return classes(RunLog(folder, "run", answers=counts))


def test_it_has_a_row_per_class_and_a_field_per_confusion(tmp_path: Path) -> None:
    labels, answers = np.array([0, 0, 0, 1, 2]), np.array([0, 0, 1, 1, 0])
    html = section_of(3, labels, answers, tmp_path)
    assert len(re.findall(r"<tr><td>class \d</td>", html)) == 3
    assert '<td>class 0</td><td class="number">3</td><td class="number">0.6667</td>' in html
    fields = re.findall(r'<rect x="(\d)" y="(\d)"', html)
    assert sorted(fields) == [("0", "0"), ("0", "2"), ("1", "0"), ("1", "1")]
    assert "class 2 taken for class 0: 1 images, 100.0%" in html and "sortable" in html


def test_the_grid_of_few_classes_is_no_wider_than_420_pixels(tmp_path: Path) -> None:
    html = section_of(2, np.array([0, 1]), np.array([0, 1]), tmp_path)
    assert 'style="max-width: 420px"' in html  # a width would be overridden by the page's style of svg


def test_of_many_classes_it_shows_the_worst_30(tmp_path: Path) -> None:
    labels = np.arange(101).repeat(2)
    answers = np.where(labels < 35, (labels + 1) % 35, labels)
    html = section_of(101, labels, answers, tmp_path)
    assert 'viewBox="0 0 30 30"' in html and "The 30 classes with the least F1" in html
    assert len(re.findall(r"<tr><td>class \d+</td>", html)) == 101


def test_a_log_without_metrics_or_with_damaged_ones_has_no_section(tmp_path: Path) -> None:
    event = {"event": "validated", "epoch": 1, "loss": 1.0, "error_top1": 0.5, "error_top5": None, "time": 1}
    support = {"classes": {"support": [1, 1]}}
    logs = [
        event,
        {**event, **support, "confusion": [[0, 2, 1]]},
        {**event, **support, "confusion": [[0, 1]]},
    ]
    for log in logs:
        (tmp_path / "log.jsonl").write_text(json.dumps(log) + "\n")
        assert classes(read_run(tmp_path)) == ""
    (tmp_path / "log.jsonl").write_text(json.dumps({**event, **support, "confusion": [[0, 1, 2]]}) + "\n")
    assert "class 0 taken for class 1: 2 images" in classes(read_run(tmp_path))


def test_classes_of_a_validation_that_a_resumed_run_took_back_are_not_shown(tmp_path: Path) -> None:
    """They stood under the epoch before, until the epoch was validated again."""
    first, second = (
        {
            "event": "validated",
            "epoch": epoch,
            "error_top1": 0.5,
            "classes": {"support": [1, 1]},
            "confusion": [[0, 1, count]],
        }
        for epoch, count in ((1, 11), (2, 22))
    )
    progress = {"event": "progress", "epoch": 2, "step": 1, "n_steps": 4, "loss": 1.0}
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in (first, second)))
    html = classes(read_run(tmp_path))
    assert "Validation of epoch 2:" in html and "class 0 taken for class 1: 22 images" in html
    log.write_text("".join(json.dumps(event) + "\n" for event in (first, second, progress)))
    html = classes(read_run(tmp_path))
    assert "Validation of epoch 1:" in html and "class 0 taken for class 1: 11 images" in html
