"""The report of real runs: complete, self-contained, and made of whatever a run has got to."""

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Program, wait_until
from dataset_folders import write_manifest
from limits import limit
from PIL import Image
from safetensors.numpy import load_file, save_file

from lockstep.files import checksum
from lockstep.report import charts, page, sections
from lockstep.report.__main__ import main
from lockstep.report.diagnosis import explain, split_time
from lockstep.report.drawing import WIDE
from lockstep.report.examples import try_examples
from lockstep.report.filters import draw_filters
from lockstep.report.runlog import Point, RunLog, Validation, read_run
from lockstep.report.summary import duration, tiles
from lockstep.runs.stragglers import PHASES

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The checked properties of a page: its tags are balanced, and it loads nothing."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.words = ""
        self.open: list[str] = []
        self.images: list[str] = []
        self.ids: list[str] = []
        self.n_svg = 0
        self.feed(self.text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        assert all(link.startswith("#") for link in re.findall(r"url\(['\"]?(.)", self.text))
        assert "http" not in self.text and "@import" not in self.text

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.n_svg += tag == "svg"
        for name, value in attributes:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "data", "srcset"):
                assert value and value.startswith(("data:", "#")), (tag, name, value)
            if tag == "img" and name == "src":
                self.images.append(value or "")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += f"{data} "


@pytest.fixture(scope="module")
def runs(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two complete runs."""
    program = Program(shared_folder, tmp_path_factory.mktemp("reported"))
    started = [
        program.start("n_epochs=3", "snapshot_freq=1", "lr_step=[1]", name="one"),
        program.start("n_epochs=2", "learning_rate=0.003", devices="[cpu]", name="two"),
    ]
    assert [running.wait() for running in started] == [0, 0], started[0].output() + started[1].output()
    return [running.run_folder for running in started]


@pytest.fixture
def run(runs: list[Path], tmp_path: Path) -> Path:
    """A copy of a complete run, to be broken."""
    return Path(shutil.copytree(runs[0], tmp_path / "one"))


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def write_lines(run: Path, events: list[dict], end: str = "\n") -> None:
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, events)) + end)


def report(*runs: Path, options: tuple[str, ...] = ("--no-examples",)) -> Page:
    assert main([*map(str, runs), *options]) == 0
    return Page(runs[0] / "report.html")


@pytest.mark.slow
def test_the_page_says_which_way_each_part_was_computed(run: Path) -> None:
    """The page has the implementations before the first step, with later changes."""
    events = lines_of(run)
    place, event = next((n, event) for n, event in enumerate(events) if event["event"] == "implementations")
    assert event["implementations"]["average"] == "shared host memory, rule: weights"
    event["implementations"]["cuda_graph"] = "to be captured"
    events[place + 1 : place + 1] = [
        {"event": "warning", "time": event["time"], "text": text}
        for text in ("cuda_graph: captured at last", "elsewhere: nothing of this kind")
    ]
    write_lines(run, events)
    words = report(run).words
    for expected in ("Which way each part was computed", "torch, on CPUs", "captured at last"):
        assert expected in words
    assert "to be captured" not in words and "nothing of this kind" not in words
    del events[place]["implementations"]
    write_lines(run, events)
    assert "Which way" not in report(run).words


def test_a_run_gets_a_page_that_needs_nothing_else(run: Path) -> None:
    page = report(run, options=())
    titles = ("Learning", "Classes", "Where the time goes", "First-layer filters", "Most confused classes")
    for words in (*titles, "Augmentation", "Confusion matrix", "balanced accuracy"):
        assert words in page.words
    last = [event for event in lines_of(run) if event["event"] == "validated"][-1]
    assert f"{last['error_top1'] * 100:.3g}%" in page.words and "3 of 3" in page.words
    assert "2 x cpu" in page.words and "torch" in page.words and "complete" in page.words
    pictures = {path.name: Image.open(path).size for path in (run / "report").glob("*.png")}
    names = {"loss", "error", "learning_rate", "images_per_second", "time", "filters"}
    assert set(pictures) == {f"{name}.png" for name in (*names, "augmented")}
    assert all(width > 300 for width, _ in pictures.values())
    assert page.n_svg == 2 * (len(names) - 1) + 1 and len(page.images) > 1


def test_the_network_is_tried_as_in_validation(run: Path) -> None:
    """All 33 validation images are tried, so the report's count of mistakes is that of the trainers."""
    last = [event for event in lines_of(run) if event["event"] == "validated"][-1]
    page = report(run, options=("--images", "33"))
    assert f"tried on all 33 validation images: {round(33 * last['error_top1'])} wrong" in page.words
    assert re.search(r"class \d taken for class \d", page.words)
    few = report(run, options=("--images", "8"))
    assert re.search(r"tried on \d of 33 validation images", few.words)


def test_several_runs_lie_over_each_other(runs: list[Path], tmp_path: Path) -> None:
    copies = [Path(shutil.copytree(run, tmp_path / run.name)) for run in runs]
    report(copies[0])
    before = (copies[0] / "report.html").read_bytes()
    assert main([*map(str, copies), "--no-examples"]) == 0
    page = Page(tmp_path / "comparison" / "report.html")
    assert (copies[0] / "report.html").read_bytes() == before  # each run's own page stays
    assert not (copies[1] / "report.html").exists()
    top = page.words.partition("Learning")[0]
    assert "learning_rate: 0.02" in top and "learning_rate: 0.003" in top and "seed" not in top
    assert page.words.count("one") > 5 and page.words.count("two") > 5
    assert re.search(r"learning_rate\s+0.02\s+0.003", page.words)
    curve = page.text.partition("<h3>Loss</h3>")[2].partition("</svg>")[0]
    assert "var(--run0)" in curve and "var(--run1)" in curve
    everything = sorted(map(str, tmp_path.iterdir()))  # as runs/* names it: the comparison, too
    assert len(everything) == 3 and main([*everything, "--no-examples"]) == 0


def test_runs_of_one_name_are_told_apart_by_their_folders(runs: list[Path], tmp_path: Path) -> None:
    twins = [
        shutil.copytree(run, tmp_path / place / "runs/base") for run, place in zip(runs, "ab", strict=True)
    ]
    assert main([*map(str, twins), "--no-examples", "--out", str(tmp_path / "out")]) == 0
    words = Page(tmp_path / "out/report.html").words
    assert "a/runs/base, b/runs/base" in words and "Who waits for whom: a/runs/base" in words
    assert f"{tmp_path.name}/a/runs" not in words


def test_many_runs_go_where_out_says(run: Path, tmp_path: Path) -> None:
    many = [Path(shutil.copytree(run, tmp_path / f"run-{number}")) for number in range(9)]
    out = tmp_path / "new" / "folder"
    assert main([*map(str, many), "--no-examples", "--out", str(out)]) == 0
    page = Page(out / "report.html")
    assert (out / "report" / "loss.png").exists() and not (many[0] / "report.html").exists()
    curve = page.text.partition("<h3>Loss</h3>")[2].partition("</svg>")[0]
    assert all(f"run-{number}" in curve for number in range(9)) and "stroke-dasharray" in curve
    assert all(page.words.count(f"run-{number} ") >= 2 for number in range(9))


@pytest.mark.filterwarnings("error")
def test_a_run_of_one_line_of_progress_is_drawn_without_warnings(run: Path) -> None:
    events = lines_of(run)
    first = next(event for event in events if event["event"] == "progress")
    write_lines(run, [event for event in events if event["event"] != "progress" or event is first])
    assert "Time by phase" in report(run).words


def test_only_what_config_yaml_does_not_have_is_marked(run: Path) -> None:
    saved = yaml.safe_load((ROOT / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**saved, "lr_update": "auto", "momentum": 0.8}))
    marked = re.findall(r'<div class="changed"><dt>(\w+)', report(run).text)
    assert marked == ["momentum"]


@pytest.mark.parametrize("key", ["data", "train_folder"])
def test_the_data_that_replace_the_folder_are_named_instead_of_it(run: Path, key: str) -> None:
    saved = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**saved, key: "somewhere:else"}))
    assert "smallnet on somewhere:else: complete" in report(run).words


def test_the_charts_follow_the_theme(run: Path) -> None:
    page = report(run)
    for chart in re.findall(r"<svg.*?</svg>", page.text, re.DOTALL):
        drawn = re.findall(r"(?:fill|stroke): ([^;\"]+)", chart)
        assert drawn and all(value == "none" or value.startswith("var(--") for value in drawn), set(drawn)
    assert "prefers-color-scheme: dark" in page.text and "max-width" in page.text


def test_it_works_while_the_run_goes_on(run: Path) -> None:
    events = lines_of(run)
    shutil.rmtree(run / "checkpoints")
    first = next(number for number, event in enumerate(events) if event["event"] == "progress")
    write_lines(run, events[: first + 2], end='\n{"event": "progress", "ti')
    page = report(run)
    assert "not ended; its last line is" in page.words and "0 of 3" in page.words
    assert "could not be read" not in page.words and "Most confused" not in page.words
    write_lines(run, events[:first])
    assert "No line of progress yet." in report(run).words


def test_what_a_resumed_run_does_again_replaces_what_was_there(run: Path) -> None:
    events = lines_of(run)
    started = next(event for event in events if event["event"] == "started")
    kept = [event for event in events if event["event"] != "ended"]
    again = [event for event in kept if event.get("epoch") == 2 and event["event"] == "progress"]
    later = started["time"] + 1000
    resumed = [{"event": "resumed", "time": later, "checkpoint": "x"}, {**started, "time": later + 1}]
    resumed += [{**event, "time": later + 3, "loss": 9.0} for event in again]
    write_lines(run, kept + resumed)
    shutil.rmtree(run / "checkpoints")
    read = read_run(run)
    assert [point.loss for point in read.points if point.epochs > 1] == [9.0, 9.0, 9.0]
    assert [entry.epoch for entry in read.validations] == [1] and read.n_starts == 2
    first_start = kept[-1]["time"] - started["time"]
    assert read.seconds == pytest.approx(first_start + 2, abs=0.01)


def test_a_branch_knows_its_first_epochs_from_its_checkpoint(run: Path) -> None:
    events = [event for event in lines_of(run) if event.get("epoch") not in (1, 2)]
    write_lines(run, events)
    assert [entry.epoch for entry in read_run(run).validations] == [1, 2, 3]


def test_a_run_of_an_older_version_shows_what_it_has(run: Path) -> None:
    """Keys that it did not write are missing; an unknown one, or another value, does not hurt the charts."""
    events = []
    for event in lines_of(run):
        dropped = {"versions", "machine", "seconds", "error", "error_top5", "seconds_per_20", "n_images"}
        events.append({key: value for key, value in event.items() if key not in dropped})
    write_lines(run, events)
    (run / "config.yaml").write_text("model: smallnet\nsome_old_key: 3\nlr_policy: [1]\n")
    page = report(run)
    assert "some_old_key" in page.words and "Where the time goes" in page.words
    assert not (run / "report" / "time.png").exists() and (run / "report" / "loss.png").exists()


@pytest.mark.parametrize(
    ("keys", "title", "value", "details"),
    [
        ("{}", "Best validation error", "10%", "epoch 1"),
        ("monitor: macro_f1", "Best epoch's validation error", "20%", "epoch 2, by macro_f1"),
        ("monitor: loss", "Best epoch's validation error", "30%", "epoch 3, by loss"),
        ("monitor: balanced_accuracy", "Best validation error", "10%", "epoch 1"),  # not measured
        ("{task: [1], monitor: [2]}", "Best validation error", "10%", "epoch 1"),
    ],
)
def test_the_best_epoch_is_that_of_the_key_monitor(
    tmp_path: Path, keys: str, title: str, value: str, details: str
) -> None:
    measured = [(0.1, 3.0, 0.5), (0.2, 2.0, 0.9), (0.3, 1.0, 0.7)]
    kind = {"event": "validated", "error_top5": None, "time": 1}
    events = [
        {**kind, "epoch": n, "error_top1": error, "loss": loss, "means": {"macro_f1": f1}}
        for n, (error, loss, f1) in enumerate(measured, 1)
    ]
    write_lines(tmp_path, events)
    (tmp_path / "config.yaml").write_text(keys)
    assert tiles(read_run(tmp_path))[0] == (title, value, details)


@pytest.mark.parametrize(
    "keys, value, details",
    [
        ("devices: [cpu, cpu]", "2 x cpu", "8 cores"),
        ("{devices: [cpu, cpu], n_hosts: 2}", "4 x cpu", "on 2 hosts, 8 cores"),
        ("devices: [cuda:0, cpu, cuda:1]", "2 x cuda, 1 x cpu", "8 cores"),
        ("{devices: [], n_hosts: [2]}", "-", "8 cores"),
    ],
)
def test_the_devices_are_counted_by_kind_on_all_hosts(
    tmp_path: Path, keys: str, value: str, details: str
) -> None:
    write_lines(tmp_path, [{"event": "started", "time": 1, "machine": {"cores": 8}}])
    (tmp_path / "config.yaml").write_text(keys)
    assert tiles(read_run(tmp_path))[-1] == ("Devices", value, details)


@pytest.mark.parametrize("n_broken", [1, 3])
def test_a_broken_checkpoint_is_named(run: Path, n_broken: int, capsys: pytest.CaptureFixture) -> None:
    for tensors in sorted((run / "checkpoints").glob("*.safetensors"))[-n_broken:]:
        tensors.write_bytes(tensors.read_bytes()[:-4] + b"oops")
    page = report(run)
    expected = "epoch_0003.safetensors: is damaged or half written"
    assert expected in page.words and expected in capsys.readouterr().err
    assert ("First-layer filters" in page.words) == (n_broken == 1)


def test_an_older_run_without_costs_has_its_errors_shown(run: Path) -> None:
    dropped = {"loss", "seconds", "images_per_second", "learning_rate"}
    write_lines(
        run, [{key: value for key, value in event.items() if key not in dropped} for event in lines_of(run)]
    )
    shutil.rmtree(run / "checkpoints")
    (run / "config.yaml").write_text("devices: 2\n")
    page = report(run)
    assert (run / "report" / "error.png").exists() and not (run / "report" / "loss.png").exists()
    assert "config.yaml: devices must be a list, not 2" in page.words


def test_a_run_whose_log_is_gone_has_its_checkpoint_shown(run: Path) -> None:
    (run / "log.jsonl").unlink()
    page = report(run)
    assert "log.jsonl: is not there; what is shown is the newest checkpoint's" in page.words
    assert "First-layer filters" in page.words and "3 of 3" in page.words


def test_the_folder_of_a_later_host_has_a_report_of_that_hosts_log(run: Path) -> None:
    def text() -> str:
        return re.sub(r"[-:\d ]+ by", "by", report(run).words)  # the minute in which it is written

    whole = text()
    (run / "log.jsonl").rename(run / "host1.jsonl")
    assert text() == whole


@pytest.mark.parametrize("first, second", [("log", "host1"), ("host1", "log"), ("host2", "host1")])
def test_the_starts_of_a_host_that_had_two_numbers_are_shown_together(
    run: Path, first: str, second: str
) -> None:
    events = lines_of(run)
    started = next(event for event in events if event["event"] == "started")
    cut = 1 + max(n for n, event in enumerate(events) if event.get("epoch") == 2)
    later = [{"event": "resumed", "time": events[-1]["time"] + 100, "checkpoint": "x"}]
    later += [{**event, "time": event["time"] + 101} for event in [started, *events[cut:]]]
    write_lines(run, events[:cut] + later)
    whole = read_run(run)
    (run / "log.jsonl").unlink()
    for log, part in ((first, events[:cut]), (second, later)):
        (run / f"{log}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in part))
    assert whole.n_starts == 2 and repr(read_run(run)) == repr(whole)


def test_of_a_start_that_several_hosts_of_one_folder_logged_the_log_of_host_0_counts(run: Path) -> None:
    whole = read_run(run)
    write = "".join(json.dumps({**event, "time": event["time"] + 0.1}) + "\n" for event in lines_of(run))
    (run / "host1.jsonl").write_text(write)
    assert repr(read_run(run)) == repr(whole)


@pytest.mark.slow
def test_a_log_that_can_not_be_read_is_named_beside_what_is_shown(run: Path) -> None:
    whole = report(run).words
    (run / "host1.jsonl").mkdir()
    words = report(run).words
    assert f"{run}/host1.jsonl: can't be read: Is a directory" in words
    assert "3 of 3" in words and "Who waits for whom" in words and len(words) > len(whole)


def test_a_record_of_another_version_is_named(run: Path) -> None:
    record = run / "checkpoints" / "epoch_0003.json"
    state = json.loads(record.read_text())
    del state["n_samples"]
    record.write_text(json.dumps({**state, "flavour": 1}))
    expected = (
        "epoch_0003.json: is not a checkpoint record of this version: it lacks n_samples and has flavour"
    )
    assert expected in report(run).words


def test_weights_that_are_no_numbers_are_said_to_be_none(run: Path) -> None:
    path = run / "checkpoints" / "epoch_0003.safetensors"
    broken = {name: np.full_like(tensor, np.nan) for name, tensor in load_file(path).items()}
    save_file(broken, path)
    record = path.with_suffix(".json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "sha256": checksum(path)}))
    page = report(run, options=("--images", "8"))
    assert "conv1.weight holds values that are not finite" in page.words
    assert (
        "no examples of confused classes" in page.words
        and "its network returns values that are not finite" in page.words
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"event": "started", "time": 1}], "epoch_0003.safetensors: is damaged or half written"),
        ([], "log.jsonl: holds no line of a run"),
        (None, "log.jsonl: is not there"),
    ],
)
def test_where_nothing_can_be_shown_it_ends_with_2(
    run: Path, lines: list[dict] | None, message: str, capsys: pytest.CaptureFixture
) -> None:
    for tensors in (run / "checkpoints").glob("*.safetensors"):
        tensors.write_bytes(b"oops")
    write_lines(run, lines or [])
    if lines is None:
        (run / "log.jsonl").unlink()
    assert main([str(run)]) == 2
    error = capsys.readouterr().err
    assert "one: nothing of this run can be shown" in error and message in error
    assert not (run / "report.html").exists()


def test_a_log_without_any_line_of_training_is_no_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.rmtree(run / "checkpoints")
    write_lines(run, [{"event": "ended", "time": 1}])
    assert main([str(run)]) == 2
    assert "log.jsonl: tells of no start, progress or validation" in capsys.readouterr().err


def test_examples_need_the_dataset_and_the_page_does_not(run: Path, tmp_path: Path) -> None:
    for record in (run / "checkpoints").glob("*.json"):
        state = json.loads(record.read_text())
        state["config"]["data_folder"] = str(tmp_path / "gone")
        record.write_text(json.dumps(state))
    page = report(run, options=())
    assert "no examples of confused classes" in page.words and "there is no such dataset folder" in page.words


def test_examples_of_another_dataset_have_the_runs_mean_and_a_note(
    run: Path, shared_folder: Path, tmp_path: Path
) -> None:
    """The dataset was replaced by one with the same images, another mean image and another digest."""
    other = tmp_path / "other"
    shutil.copytree(shared_folder, other)
    np.save(other / "misc" / "img_mean.npy", np.zeros((36, 36, 3)))
    write_manifest(other)
    before = probabilities(run)
    record = run / "checkpoints" / "epoch_0003.json"
    state = json.loads(record.read_text())
    state["config"]["data_folder"] = str(other)
    record.write_text(json.dumps({**state, "dataset": "0123"}))
    assert probabilities(run) == before
    words = report(run, options=("--images", "33")).words
    assert f"{other}: holds another dataset than the one of the checkpoint" in words


def probabilities(run: Path) -> list[float]:
    """Return the probabilities of the wrong answers that the report shows."""
    checkpoint = read_run(run).checkpoint
    assert checkpoint
    confusions = try_examples(checkpoint, 33).confusions
    return [probability for confusion in confusions for _, probability in confusion.images]


def test_lines_that_are_no_runs_are_counted(run: Path) -> None:
    with open(run / "log.jsonl", "ab") as log:
        log.write(b'[]\n{"event": "progress"}\n\xff\xfe\n{"event": "validated", "epoch": NaN}\n')
    (run / "config.yaml").write_text("a: [")
    page = report(run)
    assert "2 of " in page.words and "lines are not a run's" in page.words
    assert "2 lines of progress or validation lack" in page.words
    assert "config.yaml: is not valid YAML" in page.words


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.jsonl").touch()
    for name, message in (
        ("gone", "there is no such run folder"),
        ("x" * 300, "can't be used: File name too long"),
        ("other", "is not a run's folder: it has no log.jsonl"),
        ("empty", "holds no line of a run"),
    ):
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert name[:9] in error and message in error
    assert main([str(tmp_path / str(number)) for number in range(25)]) == 2
    assert "one chart can show at most 24" in capsys.readouterr().err


def test_text_of_a_run_is_no_html(run: Path) -> None:
    renamed = run.rename(run.with_name("<b>$a$&"))
    (renamed / "config.yaml").write_text("model: <script>alert(1)</script>\n")
    page = report(renamed)
    assert "<b>$a$&" in page.words and "<script>alert" not in page.text
    assert "b" not in page.open


def point(**seconds: float) -> Point:
    times = {phase: seconds.get(phase.replace("-", "_"), 0.0) for phase in PHASES}
    return Point(1.0, 0.1, 1.0, 0.5, 100.0, 0.05, times)


@pytest.mark.parametrize(
    ("seconds", "config", "limit", "knob"),
    [
        ({"compute": 9.5, "barrier": 0.5}, {"devices": ["cpu"]}, "Computing", "more cores"),
        ({"compute": 9.5, "barrier": 0.5}, {"devices": ["cuda:0"], "precision": "fp32"}, "Computing", "bf16"),
        ({"compute": 5, "load_wait": 5}, {"n_slots": 3}, "Loading: 50%", "n_slots (3 now)"),
        ({"compute": 5, "load_wait": 5}, {"para_load": False}, "Loading", "para_load: true"),
        ({"compute": 7, "barrier": 2, "exchange": 1}, {}, "Uneven steps: 20%", "cpu_threads"),
        ({"compute": 6, "exchange": 4}, {"batch_size": 32}, "Averaging: 40%", "A larger batch_size (32 now)"),
        (
            {"compute": 6, "exchange": 4},
            {"batch_size": 8, "global_batch_size": 32},
            "Averaging",
            "A larger global_batch_size (32 now)",
        ),
        (
            {"compute": 9},
            {"devices": ["cuda:0"], "global_batch_size": 32},
            "Computing",
            "larger global_batch",
        ),
        ({"compute": 6, "exchange": 4}, {"devices": ["cuda:0"], "exchange": "staged"}, "Averaging", "p2p"),
    ],
)
def test_it_says_what_limits_a_run(seconds: dict, config: dict, limit: str, knob: str) -> None:
    run = RunLog(Path("x"), "x", points=[point(compute=1), point(**seconds)])
    split = split_time(run)
    assert split
    sentence, advice = explain(split, config)
    assert sentence.startswith(limit) and knob in advice


def test_no_time_is_known_of_a_run_without_progress() -> None:
    assert split_time(RunLog(Path("x"), "x", points=[point()])) is None


def test_filters_are_scaled_each_by_its_own() -> None:
    weights = np.zeros((18, 11, 11, 3), np.float32)
    weights[0, 0, 0], weights[1, 0, 0], weights[2, 0, 0] = 1e-3, -5.0, 0.0
    sheet = np.asarray(draw_filters(weights))
    assert sheet.shape == (2 * 44 + 4, 16 * 48 - 4, 4)
    assert sheet[0, 0].tolist() == [255] * 4 and sheet[0, 48].tolist() == [0, 0, 0, 255]
    assert sheet[0, 96].tolist() == [128, 128, 128, 255] and sheet[0, 45].tolist() == [0] * 4


@pytest.mark.parametrize("shape", [(3, 7), (7, 3)])
def test_filters_with_other_rows_than_columns_are_drawn(shape: tuple[int, int]) -> None:
    sheet = np.asarray(draw_filters(np.ones((2, *shape, 3), np.float32)))
    assert sheet.shape == (42, 2 * 42 + 4, 4)
    assert (sheet[:, :, 3] > 0).sum() == 2 * 36 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("mode", "n_pixels", "form"),
    [("RGB", 96, "jpeg"), ("L", 96, "jpeg"), ("RGB", 48, "png"), ("LA", 96, "png"), ("RGBA", 96, "png")],
)
def test_images_of_any_number_of_channels_are_embedded(mode: str, n_pixels: int, form: str) -> None:
    html = page.image(Image.new(mode, (n_pixels, 9)), "an image")
    header, _, data = html.partition('src="')[2].partition('"')[0].partition(",")
    assert header == f"data:image/{form};base64"
    opened = Image.open(io.BytesIO(base64.b64decode(data)))
    assert opened.mode == mode and opened.size == (n_pixels, 9)


def test_a_top_5_error_of_zero_is_drawn() -> None:
    validations = [Validation(epoch, 1.0, 0.5, top5) for epoch, top5 in ((1, 0.1), (2, 0.0))]
    figure = charts.error([RunLog(Path("x"), "x", validations=validations)], WIDE)
    assert "top-5 0%" in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("seconds", "text"), [(23.4, "23 s"), (250, "4 min 10 s"), (7500, "2 h 05 min"), (3e5, "3 d 11 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.slow
def test_the_command_and_train_write_it(program: Program, tmp_path: Path) -> None:
    running = program.run("n_epochs=1", "report=true", devices="[cpu]")
    page = running.run_folder / "report.html"
    assert running.last_line() == f"report: {page}" and "done: validation error" in running.output()
    Page(page)
    command = [sys.executable, "-m", "lockstep.report", str(tmp_path / "nowhere")]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert refused.returncode == 2 and "there is no such run folder" in refused.stderr


@pytest.mark.slow
def test_a_run_is_good_without_its_report(program: Program, tmp_path: Path) -> None:
    """matplotlib can't be imported here."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "matplotlib.py").write_text("raise ImportError('broken')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "broken"), *sys.path])}
    running = program.run("n_epochs=1", "report=true", devices="[cpu]", environment=environment)
    assert "note: the report was not written (exit code 1); to try again:" in running.last_line()
    assert "done: validation error" in running.output()


def test_bytes_are_shown_beside_the_time_that_they_take() -> None:
    met = Point(1.0, 0.1, 1.0, 0.5, 100.0, 0.05, {"exchange": 1.0}, 3.5e6)
    run = RunLog(Path("x"), "x", points=[met])
    split = split_time(run)
    assert split and split.bytes_per_step == 3.5e6
    assert "per step for 3.5 MB" in sections._verdict(run, split, False)


@pytest.mark.slow
def test_a_live_report_reloads_itself_and_the_last_one_does_not(program: Program) -> None:
    running = program.start("n_epochs=500", "report=live", devices="[cpu]")
    page = running.run_folder / "report.html"
    wait_until(lambda: page.exists() and "validation" in page.read_text(), "the page", 100)
    assert '<meta http-equiv="refresh" content="5">' in page.read_text()
    running.wait_for_text(f"report: {page} reloads itself during the run")
    former = page.stat().st_ino
    wait_until(lambda: page.stat().st_ino != former, "the page to be written again", 100)
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130
    running.assert_nothing_left()
    done = program.run("n_epochs=1", "report=live", devices="[cpu]", name="short")
    done.assert_nothing_left()
    assert "refresh" not in (done.run_folder / "report.html").read_text()


def test_a_live_report_of_a_folder_that_is_no_run_s_does_not_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--live"]) == 2
    assert f"{tmp_path}: is not a run's folder: it has no log.jsonl" in capsys.readouterr().err


def test_a_live_report_that_can_not_be_written_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.jsonl").write_text('{"event": "started", "time": 1.0}\n')
    n_rounds = 0

    def count(seconds: float) -> None:
        nonlocal n_rounds
        n_rounds += 1
        if n_rounds == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.report.__main__.time.sleep", count)
    assert main([str(tmp_path), "--live", "--out", str(tmp_path / "log.jsonl" / "out")]) == 130
    assert capsys.readouterr().err.count("out: the report can't be written: [Errno 20] Not a directory") == 1
