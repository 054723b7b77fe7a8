"""validate.py and classify.py: the same numbers for any devices, and what a stranger's picture is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Program, Running, make_config
from PIL import Image

from lockstep.comm.group import World
from lockstep.comm.messages import Predictions
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.evaluate.evaluation import Evaluation, orders_of
from lockstep.launch.computing import computing
from lockstep.launch.status import StatusBoard
from lockstep.network.build import build_model
from lockstep.runs.folder import find_checkpoint


@pytest.fixture(scope="module")
def trained(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    program = Program(shared_folder, tmp_path_factory.mktemp("run"))
    return program.run("n_epochs=2", "snapshot_freq=1", "learning_rate=0.001")


def call(script: str, *words: object, code: int = 0) -> str:
    command = [sys.executable, str(ROOT / script), *map(str, words)]
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
    told = [event for event in map(json.loads, lines) if event["event"] == "validated"]
    for epoch, devices in ((1, "[cpu, cpu, cpu]"), (2, "[cpu]")):
        words = ("--epoch", epoch, f"devices={devices}", "batch_size=5")
        text = call("validate.py", trained.run_folder, *words)
        top1, top5, loss = first_line(text)
        assert top1 == pytest.approx(100 * told[epoch - 1]["error_top1"], abs=0.006)
        assert top5 == pytest.approx(100 * told[epoch - 1]["error_top5"], abs=0.006)
        assert loss == pytest.approx(told[epoch - 1]["loss"], abs=2e-4)
    assert "classes with the largest error" in text


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
    text = call("validate.py", running.run_folder, code=2)
    assert re.search(r"trainer 0: cpu is out of memory \(.*validating\): .*; lower batch_size", text)
    assert "Traceback" not in text


def test_what_computing_cant_do_is_the_users_to_change() -> None:
    (world,) = World.on_one_host(1)
    board = StatusBoard.create()
    board.say("step 3")
    for error, message in (
        (
            torch.OutOfMemoryError("8 GB"),
            r"cpu is out of memory \(step 3\): 8 GB; lower batch_size or n_slots",
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


def test_pictures_get_their_five_best_classes_upright(trained: Running, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    picture = Image.fromarray(random.integers(0, 256, (36, 36, 3), dtype=np.uint8))
    picture.save(tmp_path / "upright.png")
    turned = picture.transpose(Image.Transpose.ROTATE_90)  # as a camera held sideways stores it
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=exif)
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8 no picture")
    paths = [tmp_path / name for name in ("upright.png", "broken.jpg", "turned.png", "missing.png")]
    text = call("classify.py", *paths, "--run", trained.run_folder, code=2)
    answers = re.findall(r"^ +([\d.]+)%  (\d)$", text, re.MULTILINE)
    assert len(answers) == 10 and answers[:5] == answers[5:]
    shares = [float(share) for share, _ in answers[:5]]
    assert shares == sorted(shares, reverse=True) and len({label for _, label in answers[:5]}) == 5
    assert "broken.jpg: can't be used" in text and "missing.png: can't be used: No such file" in text


@pytest.mark.slow
def test_the_newest_run_is_taken_and_errors_are_named(trained: Running, tmp_path: Path) -> None:
    Image.new("L", (50, 80)).save(tmp_path / "grey.png")
    text = call("classify.py", tmp_path / "grey.png", "--runs", trained.run_folder.parent)
    assert f"{trained.run_folder}/checkpoints/epoch_0002.safetensors, epoch 2" in text
    assert "holds no run" in call("classify.py", "a.png", "--runs", tmp_path, code=2)
