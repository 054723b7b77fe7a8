"""validate.py and classify.py: the same numbers for any devices, and what a stranger's image is."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, Program, Running, make_config, make_folder
from dataset_folders import write_manifest
from forked_programs import forked
from limits import limit
from PIL import Image

import classify
import validate
from lockstep.comm.group import World
from lockstep.comm.messages import Predictions
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.data.description import Description
from lockstep.errors import UserError
from lockstep.evaluate.answers import Answer, check_target, write_answers
from lockstep.evaluate.data import open_data
from lockstep.evaluate.evaluation import Evaluation, orders_of
from lockstep.evaluate.files import check_place, write_csv
from lockstep.export.__main__ import describe, load_trained
from lockstep.launch.status import StatusBoard
from lockstep.network.build import build_model
from lockstep.runs.checkpoint_files import find_checkpoint
from lockstep.runs.dataset_description import read_description, write_description
from lockstep.runs.metrics import AnswerCounts
from lockstep.runs.multilabel import LabelMetrics
from lockstep.runs.state import Checkpoint, State
from lockstep.trainer.setup import computing
from preprocessing.images import BadImage


@pytest.fixture(scope="module")
def trained(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    program = Program(shared_folder, tmp_path_factory.mktemp("run"))
    return program.run("n_epochs=2", "snapshot_freq=1", "learning_rate=0.001")


def call(script: str, *words: object, code: int = 0) -> str:
    command = forked([sys.executable, str(ROOT / script), *map(str, words)])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def first_line(text: str) -> tuple[float, float, float]:
    """Errors top-1 and top-5 in percent, and the loss."""
    match = re.search(r"error ([\d.]+)% top-1, ([\d.]+)% top-5, loss ([\d.]+) on 33 images", text)
    assert match, text
    return float(match[1]), float(match[2]), float(match[3])


@pytest.mark.slow
def test_it_repeats_what_training_said_on_any_devices(trained: Running) -> None:
    lines = (trained.run_folder / "log.jsonl").read_text().splitlines()
    received = [event for event in map(json.loads, lines) if event["event"] == "validated"]
    for epoch, devices in ((1, "[cpu, cpu, cpu]"), (2, "[cpu]")):
        words = ("--epoch", epoch, f"devices={devices}", "batch_size=5")
        text = call("validate.py", trained.run_folder, *words)
        top1, top5, loss = first_line(text)
        assert top1 == pytest.approx(100 * received[epoch - 1]["error_top1"], abs=0.006)
        assert top5 == pytest.approx(100 * received[epoch - 1]["error_top5"], abs=0.006)
        assert loss == pytest.approx(received[epoch - 1]["loss"], abs=2e-4)
    assert "classes with the largest error" in text


def test_a_name_with_ends_of_lines_stays_in_its_row(tmp_path: Path) -> None:
    names = ["a\rb.png", "a\nb.png", "a\r\nb.png", 'a,"b.png']
    write_answers(tmp_path / "out.csv", {name: [Answer("cat", 0.75)] for name in names})
    content = (tmp_path / "out.csv").read_bytes().decode()
    assert content.startswith("image,class_1,probability_1\n") and content.endswith("\n")
    rows = list(csv.reader(io.StringIO(content, newline="")))
    assert rows[1:] == [[name, "cat", "0.750000"] for name in names]


def test_results_go_through_links_and_into_pipes_and_not_to_folders(tmp_path: Path) -> None:
    metrics = AnswerCounts.of(2, np.array([0, 1]), np.array([0, 0])).by_class()
    (tmp_path / "link.csv").symlink_to(tmp_path / "target.csv")
    write_csv(tmp_path / "link.csv", metrics, ["cat", "dog"])
    assert (tmp_path / "link.csv").is_symlink()
    text = (tmp_path / "target.csv").read_text()
    assert text.startswith("class,support") and text.count("\n") == 3
    os.mkfifo(tmp_path / "pipe.csv")
    reading = os.open(tmp_path / "pipe.csv", os.O_RDONLY | os.O_NONBLOCK)
    write_csv(tmp_path / "pipe.csv", metrics, ["cat", "dog"])
    assert os.read(reading, 10_000).decode() == text
    os.close(reading)
    assert (tmp_path / "pipe.csv").is_fifo()
    with open(tmp_path / "open.csv", "w+", encoding="utf-8") as file:
        file.write("before\n")
        file.flush()
        write_csv(Path(f"/dev/fd/{file.fileno()}"), metrics, ["cat", "dog"])
    assert (tmp_path / "open.csv").read_text() == f"before\n{text}"


def test_places_that_can_not_be_written_are_named_before_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder. Name a file."):
        check_place(tmp_path)
    (tmp_path / "dangling.csv").symlink_to(tmp_path / "none" / "a.csv")
    with pytest.raises(UserError, match="there is no folder"):
        check_place(tmp_path / "dangling.csv")
    (tmp_path / "circle.csv").symlink_to(tmp_path / "circle.csv")
    with pytest.raises(UserError, match="lead in a circle"):
        check_place(tmp_path / "circle.csv")
    check_place(Path("/dev/null"))
    check_place(tmp_path / "new.csv")


@pytest.mark.slow
def test_files_hold_what_training_measured(trained: Running, tmp_path: Path) -> None:
    lines = (trained.run_folder / "log.jsonl").read_text().splitlines()
    event = [each for each in map(json.loads, lines) if each["event"] == "validated"][-1]
    files = ("--json", tmp_path / "result.json", "--csv", tmp_path / "classes.csv")
    text = call("validate.py", trained.run_folder, *files, "devices=[cpu]")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["confusion"] == event["confusion"] and result["n_images"] == 33
    assert result["macro_f1"] == event["means"]["macro_f1"] and "macro F1" in text
    assert [row["recall"] for row in result["classes"]] == event["classes"]["recall"]
    rows = [line.split(",") for line in (tmp_path / "classes.csv").read_text().splitlines()]
    assert rows[0] == ["class", "support", "precision", "recall", "f1"]
    assert [int(row[1]) for row in rows[1:]] == event["classes"]["support"]


@pytest.mark.slow
def test_ten_crops_are_the_mean_of_ten_views(trained: Running, shared_folder: Path) -> None:
    text = call("validate.py", trained.run_folder, "--ten-crops", "devices=[cpu, cpu]")
    dataset = open_dataset(make_config(data_folder=str(shared_folder)))
    model = build_model(make_config(), 7).eval()
    state = find_checkpoint(trained.run_folder, "latest")[0].path
    tensors = torch.from_numpy(np.concatenate([hkl.read(file.path) for file in dataset.val.files]))
    load_weights(model, state)
    images = tensors.float() - torch.from_numpy(dataset.mean)
    total = torch.zeros(33, 7)
    for row, column in ((2, 2), (0, 0), (0, 4), (4, 0), (4, 4)):
        crop = images[:, row : row + 32, column : column + 32].permute(0, 3, 1, 2)
        for view in (crop, crop.flip(3)):
            total += model(view).softmax(1).detach()
    labels = torch.from_numpy(dataset.val.labels)
    expected = 100 * (total.argmax(1) != labels).float().mean().item()
    loss = -(total / 10)[torch.arange(33), labels].log().mean().item()
    top1, _, found = first_line(text)
    assert top1 == pytest.approx(expected, abs=0.006) and found == pytest.approx(loss, abs=2e-4)
    assert "(10 views of each)" in text


HUNGRY = """
import os
import torch
from models import smallnet

class Net(smallnet.Model):
    def forward(self, images):
        if "HUNGRY" in os.environ and len(images) > 2:  # not when it is tried out
            torch.empty(1 << 60, dtype=torch.uint8)
        if "THREADS_TO" in os.environ:
            print(torch.get_num_threads(), file=open(os.environ["THREADS_TO"], "w"))
        return super().forward(images)
"""


@pytest.mark.slow
def test_threads_are_the_runs_and_too_little_memory_is_said(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    running = program.run("n_epochs=1", "model=hungry:Net", "cpu_threads=3", devices="[cpu]")
    monkeypatch.setenv("THREADS_TO", str(tmp_path / "threads"))
    call("validate.py", running.run_folder, "devices=[cpu, cpu]")
    assert (tmp_path / "threads").read_text() == "3\n"
    monkeypatch.setenv("HUNGRY", "")
    text = call("validate.py", running.run_folder, "devices=[cpu]", code=2)
    assert re.search(r"trainer 0: cpu is out of memory \(.*validating\): .*; lower batch_size", text)
    assert "Traceback" not in text


def test_what_computing_cant_do_is_the_users_to_change() -> None:
    (world,) = World.on_one_host(1)
    board = StatusBoard.create()
    board.say("step 3")
    for error, message in (
        (
            torch.OutOfMemoryError("8 GB"),
            r"out of memory \(step 3\): 8 GB; lower batch_size \(global_batch_size, if it is set\)",
        ),
        (RuntimeError("see use_deterministic_algorithms"), "deterministic: the network has an operation"),
    ):
        with (
            pytest.raises(UserError, match=message),
            computing(make_config(), world, board),
        ):
            raise error
    with (
        pytest.raises(RuntimeError, match=r"^another$"),
        computing(make_config(), world, board),
    ):
        raise RuntimeError("another")


def load_weights(model: torch.nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    state = load_file(path)
    model.load_state_dict(
        {name.partition("/")[2]: state[name] for name in state if name.startswith("weights/")}
    )


def test_shares_of_all_ranks_are_every_image_once() -> None:
    for n_ranks in (1, 2, 3, 5):
        seen = [
            image
            for rank in range(n_ranks)
            for order in orders_of(33, 4, World.on_one_host(n_ranks)[rank], 1)
            for image in range(order.first, order.last)
        ]
        assert sorted(seen) == list(range(33))


def test_the_worst_classes_and_what_they_are_taken_for() -> None:
    evaluation = Evaluation(6)
    evaluation.take(Predictions(3, [2, 2, 0], [1, 1, 0], [True, False, True], [1.0, 2.0, 0.5]))
    evaluation.take(Predictions(0, [0, 0, 2], [0, 1, 2], [True] * 3, [0.5] * 3))
    assert evaluation.summary() == {
        "loss": pytest.approx(5 / 6),
        "error_top1": pytest.approx(0.5),
        "error_top5": pytest.approx(1 / 6),
    }
    worst = [(each.label, each.n_images, each.mistaken_for, each.n_mistaken) for each in evaluation.worst(5)]
    assert worst == [(2, 3, 1, 2), (0, 3, 1, 1)]


@pytest.mark.slow
def test_the_mean_is_the_runs_on_another_dataset(
    trained: Running, shared_folder: Path, tmp_path: Path
) -> None:
    """The other dataset has the same images and another mean image. Its digest is not the checkpoint's."""
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(trained.run_folder, run)
    shutil.copytree(shared_folder, other)
    np.save(other / "misc" / "img_mean.npy", np.zeros((36, 36, 3)))
    write_manifest(other)
    record = run / "checkpoints" / "epoch_0002.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "dataset": "0123"}))
    own = call("validate.py", run, "devices=[cpu]")
    text = call("validate.py", run, "devices=[cpu]", f"data_folder={other}")
    assert first_line(text) == first_line(own)
    assert f"note: {other}: holds another dataset than the one of the checkpoint, by its manifest" in text
    assert "note: " not in own


@pytest.mark.slow
def test_each_checkpoint_keeps_its_mean_if_the_run_is_resumed_with_others(
    shared_folder: Path, tmp_path: Path
) -> None:
    """Folders without a manifest have no digest that could tell them apart."""
    first, other = (Path(shutil.copytree(shared_folder, tmp_path / name)) for name in ("first", "other"))
    np.save(other / "misc" / "img_mean.npy", np.full((36, 36, 3), 50.0))
    np.save(tmp_path / "given.npy", np.full((36, 36, 3), 90.0))
    Image.fromarray(np.full((36, 36, 3), 200, np.uint8)).save(tmp_path / "photo.png")

    def answers(epoch: int) -> tuple[object, str, str]:
        facts, _ = describe(load_trained(run.run_folder, epoch))
        chosen = ("--epoch", epoch)
        text = call("validate.py", run.run_folder, *chosen, "devices=[cpu]", f"data_folder={first}")
        answer = call("classify.py", tmp_path / "photo.png", "--run", run.run_folder, *chosen, "--json")
        return facts["input_mean"], first_line(text), answer

    program = Program(first, tmp_path)
    run = program.run("n_epochs=1", "learning_rate=0.001", "lr_policy=step", "lr_step=[9]", "devices=[cpu]")
    before = [answers(1)]
    resumed = ("resume_train=true", "devices=[cpu]")
    program.data = other
    program.run("n_epochs=2", *resumed)
    before.append(answers(2))
    given = f"mean_file={tmp_path / 'given.npy'}"
    program.run("n_epochs=3", given, *resumed)
    before.append(answers(3))
    program.run("n_epochs=4", "subtract_mean=none", *resumed)
    before.append(answers(4))
    program.run("n_epochs=5", "subtract_mean=null", "crop=padded", *resumed)  # the mean of each channel
    assert [answers(epoch) for epoch in (1, 2, 3, 4)] == before
    assert [each[0] for each in before[1:]] == [[50.0] * 3, [90.0] * 3, [0.0] * 3]
    overridden = call("validate.py", run.run_folder, "--epoch", 1, "devices=[cpu]", given)
    assert first_line(overridden) != before[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("then", "now"), [("scale: null", "scale: 0.01"), ("mixup: 0.0", "mixup: 0.2")])
def test_a_checkpoint_gets_images_as_it_was_trained_on_them(
    trained: Running, tmp_path: Path, then: str, now: str
) -> None:
    """The run was resumed with other keys since, which its config.yaml has. With mixup it makes images."""
    run = Path(shutil.copytree(trained.run_folder, tmp_path / "run"))
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace(then, now))
    assert now in settings.read_text()
    own = call("validate.py", trained.run_folder, "--epoch", 1, "devices=[cpu]")
    assert first_line(call("validate.py", run, "--epoch", 1, "devices=[cpu]")) == first_line(own)
    given = call("validate.py", run, "--epoch", 1, "devices=[cpu]", now.replace(": ", "="))
    assert first_line(given) != first_line(own)


def opened_for(run: Path, folder: Path, **keys: object) -> tuple[np.ndarray, list[str]]:
    """Return the mean that is subtracted from a dataset, and the notes."""
    config = make_config(data_folder=str(folder), **keys)
    dataset, notes = open_data(config, run, "epoch_0001", own_mean="mean_file" in keys)
    return dataset.mean, notes


def test_a_mean_that_the_configuration_gives_or_of_another_shape_is_not_the_runs(
    folder: Path, tmp_path: Path
) -> None:
    own = open_dataset(make_config(data_folder=str(folder))).mean
    means = np.random.default_rng(0).uniform(0, 255, (36, 36, 3)).astype(np.float32)
    described = Description(tuple("0123456"), means, "squash", "ignore")
    assert (opened_for(tmp_path, folder)[0] == own).all()  # a run without a description
    write_description(tmp_path, described)
    assert (opened_for(tmp_path, folder)[0] == means).all()
    channels, _ = opened_for(tmp_path, folder, subtract_mean="channel")
    assert np.allclose(channels, means.mean((0, 1)))
    assert (opened_for(tmp_path, folder, subtract_mean=[1, 2, 3])[0] == [1, 2, 3]).all()
    file = folder / "misc" / "img_mean.npy"
    assert (opened_for(tmp_path, folder, mean_file=str(file))[0] == own).all()
    write_description(tmp_path, dataclasses.replace(described, mean=means[:32]))
    mean, notes = opened_for(tmp_path, folder)
    assert (mean == own).all()
    assert notes == [
        f"{tmp_path}/dataset_mean.npy: is for images of 32 x 36 x 3, and those of {folder} are 36 x 36 x 3: "
        f"a network without a mean of its own gets the mean of {folder}"
    ]


@pytest.mark.parametrize("keys", [{"subtract_mean": "channel"}, {"crop": "padded"}])
def test_a_mean_of_channels_is_the_runs_for_images_of_any_size(
    shared_folder: Path, tmp_path: Path, keys: dict[str, object]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    trained_on = open_dataset(make_config(data_folder=str(shared_folder), **keys))
    write_description(run, trained_on.description)
    other = make_folder(tmp_path / "other", size=40)
    np.save(other / "misc" / "img_mean.npy", np.zeros((40, 40, 3)))
    for given in (keys, {}):  # a run on Python objects has such a mean without these keys
        mean, notes = opened_for(run, other, **given)
        assert mean.shape == (40, 40, 3) and (mean == trained_on.mean[0, 0]).all()
        assert notes == []


@pytest.mark.parametrize("names", ["abcdefg", "0123456", "ab2defg", "abcde"])
def test_a_dataset_of_the_runs_classes_is_opened(folder: Path, tmp_path: Path, names: str) -> None:
    """A class without a name has its number. The network itself refuses another number of classes."""
    write_manifest(folder)
    mean = np.zeros((36, 36, 3), np.float32)
    write_description(tmp_path, Description(tuple(names), mean, "squash", "ignore"))
    assert opened_for(tmp_path, folder)[1] == []


def test_a_dataset_of_other_classes_is_refused(trained: Running, folder: Path, tmp_path: Path) -> None:
    write_manifest(folder)
    run = tmp_path / "run"
    shutil.copytree(trained.run_folder, run)
    description = read_description(run)
    assert description
    write_description(run, dataclasses.replace(description, class_names=tuple("abxcdef")))
    text = call("validate.py", run, f"data_folder={folder}", code=2)
    assert f"{folder}: class 2 is 'c', and 'x' in the training data of {run}. Give the" in text


def test_classes_without_a_name_are_shown_by_their_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The network has nine classes, and the manifest names seven."""
    write_manifest(folder)
    config = make_config(data_folder=str(folder), n_classes=9)
    dataset = open_dataset(config)
    checkpoint = Checkpoint(folder / "epoch_0001.safetensors", State(1, 90, 90, 0.1, [], 1, {}, {}))
    evaluation = Evaluation(33)
    evaluation.take(Predictions(0, [1] * 33, [8] * 33, [True] * 33, [0.5] * 33))
    validate.report(evaluation, checkpoint, config, dataset, 1)
    assert "100.0% of    33  b: 8 (33)" in capsys.readouterr().out
    metrics = LabelMetrics.of(np.ones((2, 9)), np.ones((2, 9), np.uint8), 0.5)
    validate.report_labels(metrics, 0.5, 0.5, checkpoint, dataset, "two images")
    assert "100.0% of     2 images  a: F1 100.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere: is not a run's folder"),
        pytest.param(
            ("RUN", "--epoch", "9"),
            "has no checkpoint of epoch 9 (there are: epoch_0001, epoch_0002)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("RUN", "data_folder=elsewhere"),
            "elsewhere: there is no such dataset folder",
            marks=pytest.mark.slow,
        ),
        (("RUN", "batchsize=3"), "unknown key 'batchsize' (did you mean 'batch_size'?)"),
        pytest.param(("RUN", "n_classes=9", "devices=[cpu]"), "is of another model", marks=pytest.mark.slow),
        pytest.param(("RUN", "devices=[cuda:99]"), "cuda:99", marks=pytest.mark.slow),
    ],
)
def test_what_cant_be_validated_is_named(trained: Running, words: tuple[str, ...], message: str) -> None:
    text = call("validate.py", *(trained.run_folder if word == "RUN" else word for word in words), code=2)
    assert message in text and "Traceback" not in text


def set_orientation(data: Path, value: str | None, place: Path) -> Path:
    """A copy of a dataset folder, with a manifest that says how its images were turned, or says nothing."""
    files = {
        split: [
            {"file": f"{split}_hkl/{path.name}", "labels": labels.tolist()}
            for path, labels in zip(
                sorted((data / f"{split}_hkl").iterdir()),
                np.split(
                    np.load(data / "labels" / f"{split}_labels.npy"), [32, 64] if split == "train" else [32]
                ),
                strict=True,
            )
        ]
        for split in ("train", "val")
    }
    shutil.copytree(data, place)
    manifest = {"version": 1, "classes": list("abcdefg"), **files}
    text = json.dumps(manifest if value is None else {**manifest, "orientation": value})
    (place / "manifest.json").write_text(text)
    return place


@pytest.mark.parametrize("value", ["apply", "ignore", None])
@pytest.mark.slow
def test_pictures_are_turned_as_those_of_the_dataset_were(
    trained: Running, shared_folder: Path, tmp_path: Path, value: str | None
) -> None:
    data = set_orientation(shared_folder, value, tmp_path / "set")
    random = np.random.default_rng(3)
    picture = Image.fromarray(random.integers(0, 256, (36, 36, 3), dtype=np.uint8))
    picture.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture.transpose(Image.Transpose.ROTATE_90)  # as a camera held sideways stores it
    turned.save(tmp_path / "turned.png", exif=exif)
    paths = [tmp_path / name for name in ("upright.png", "turned.png")]
    text = call("classify.py", *paths, "--run", trained.run_folder, "--override", f"data_folder={data}")
    answers = re.findall(r"^ +([\d.]+)%  ([a-g])$", text, re.MULTILINE)
    assert len(answers) == 10 and (answers[:5] == answers[5:]) == (value == "apply")


@pytest.mark.slow
def test_a_runs_folder_says_what_classify_needs(tmp_path: Path) -> None:
    """The dataset is given relative to the working directory, and gone when the network is asked."""
    make_folder(tmp_path / "set")
    program = Program(Path(os.path.relpath(tmp_path / "set", ROOT)), tmp_path)
    run = program.run("n_epochs=1", "learning_rate=0.001", devices="[cpu]").run_folder
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data_folder"] == str(ROOT / program.data)  # so that validate.py works anywhere
    description = open_dataset(make_config(data_folder=str(tmp_path / "set"))).description
    found = read_description(run)
    assert found and found.class_names == description.class_names and (found.mean == description.mean).all()
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    before = call(
        "classify.py", tmp_path / "red.png", "--run", run, "--override", f"data_folder={program.data}"
    )
    (tmp_path / "set").rename(tmp_path / "moved")
    assert call("classify.py", tmp_path / "red.png", "--run", run) == before
    (run / "dataset.json").write_text('{"class_names": 5}')
    assert "dataset.json: can't be used" in call("classify.py", "a.png", "--run", run, code=2)


def test_a_picture_of_other_channels_is_opened_as_those_of_three_are(tmp_path: Path) -> None:
    gray = Description(("a", "b"), np.zeros((8, 8, 1), np.float32), "squash", "apply")
    (tmp_path / "photo.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    Image.new("1", (20_000, 20_000)).save(tmp_path / "huge.png")
    Image.new("1", (10_500, 10_500)).save(tmp_path / "large.png")
    for name, reason in (
        ("photo.jpg", "no image that Pillow reads"),  # a program, which Ghostscript would run
        ("huge.png", "exceeds limit"),
        ("large.png", "claims 10500 x 10500 pixels"),
    ):
        with pytest.raises(BadImage, match=reason):
            classify.read_image(tmp_path / name, gray)


def test_pictures_get_their_five_best_classes(trained: Running, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    picture = Image.fromarray(random.integers(0, 256, (36, 36, 3), dtype=np.uint8))
    picture.save(tmp_path / "upright.png")
    picture.save(tmp_path / "same.png")
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    names = ("upright.png", "broken.jpg", "same.png", "missing.png", "/dev/null", "pipe")
    os.mkfifo(tmp_path / "pipe")
    paths = [tmp_path / name for name in names]
    text = call("classify.py", *paths, "--run", trained.run_folder, code=2)
    answers = re.findall(r"^ +([\d.]+)%  (\d)$", text, re.MULTILINE)
    assert len(answers) == 10 and answers[:5] == answers[5:]
    shares = [float(share) for share, _ in answers[:5]]
    assert shares == sorted(shares, reverse=True) and len({label for _, label in answers[:5]}) == 5
    assert "broken.jpg: can't be used" in text and "missing.png: can't be used: No such file" in text
    assert "/dev/null: can't be used: it is not a regular file" in text
    assert "pipe: can't be used: it is not a regular file" in text


def test_json_records_are_all_that_standard_output_has(trained: Running, tmp_path: Path) -> None:
    Image.new("RGB", (36, 36)).save(tmp_path / "a.png")
    words = [str(tmp_path), "--run", str(trained.run_folder), "--json"]
    command = forked([sys.executable, str(ROOT / "classify.py"), *words])
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert [json.loads(line)["image"] for line in done.stdout.splitlines()] == [str(tmp_path / "a.png")]
    assert "epoch_0002.safetensors, epoch 2" in done.stderr


@pytest.mark.slow
def test_folders_and_patterns_are_classified_into_a_file(trained: Running, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    names = ["b.png", "deep/a.PNG", "deep/er/Käse, frisch.jpg"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (36, 36, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / name)
    (tmp_path / "in" / "note.txt").write_text("no image")
    run = ("--run", trained.run_folder, "--epoch", "best")
    text = call("classify.py", tmp_path / "in", f"{tmp_path}/in/*.png", *run, "--out", tmp_path / "a.csv")
    assert f"wrote {tmp_path}/a.csv: 3 images" in text
    assert f"left out 1, no image that Pillow reads: {tmp_path}/in/note.txt" in text
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(tmp_path / "in" / name) for name in names]
    best = find_checkpoint(trained.run_folder, "best")[0]
    assert f"{best.path}, epoch {best.state.epoch}" in text
    call("classify.py", f"{tmp_path}/in/**/*.*[gG]", *run, "--out", tmp_path / "a.json")
    records = json.loads((tmp_path / "a.json").read_text())
    for row, record in zip(rows, records, strict=True):
        assert row["image"] == record["image"]
        shown = [(a["class"], f"{a['probability']:.6f}") for a in record["answers"]]
        assert shown == [(row[f"class_{n}"], row[f"probability_{n}"]) for n in range(1, 6)]
    assert "a.csv: already exists" in call("classify.py", "x", *run, "--out", tmp_path / "a.csv", code=2)


def test_places_without_images_and_files_of_unknown_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.txt: is of no known format. Give a name that ends with .csv"):
        check_target(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"none\*: matches no file"):
        classify.find_images([f"{tmp_path}/none*"])
    with pytest.raises(UserError, match="holds no images that Pillow reads"):
        classify.find_images([str(tmp_path)])
    with pytest.raises(UserError, match=r"none/a.csv: can't be written: there is no folder"):
        check_target(tmp_path / "none" / "a.csv")
    with pytest.raises(UserError, match="can't be used: File name too long"):
        check_target(tmp_path / ("x" * 300 + ".csv"))
    assert classify.find_images(["x" * 300]) == [Path("x" * 300)]  # the others are classified all the same
    Image.new("RGB", (9, 9)).save(tmp_path / "a[1].png")  # a file's name, not a pattern
    assert classify.find_images([f"{tmp_path}/a[1].png", str(tmp_path)]) == [tmp_path / "a[1].png"]


@pytest.mark.slow
def test_the_newest_run_is_taken_and_errors_are_named(trained: Running, tmp_path: Path) -> None:
    Image.new("L", (50, 80)).save(tmp_path / "grey.png")
    text = call("classify.py", tmp_path / "grey.png", "--runs", trained.run_folder.parent)
    assert f"{trained.run_folder}/checkpoints/epoch_0002.safetensors, epoch 2" in text
    assert "holds no run" in call("classify.py", "a.png", "--runs", tmp_path, code=2)
