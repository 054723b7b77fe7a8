"""Weights out: what others load has the same numbers, and what we read back has the same bits."""

import json
import re
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, Program, make_config
from forked_programs import forked
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import Model, start
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.export.__main__ import export, load_trained, main
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.network.build import build_model
from lockstep.optim import states_of
from lockstep.pretrained.names import layers_of
from lockstep.runs import checkpoint
from lockstep.runs.state import State
from models import smallnet

RECORD = [{"epoch": n, "loss": 2.0 / n, "error_top1": 0.5 / n, "error_top5": 0.1} for n in (1, 2)]


def make_run(folder: Path, config: Config, n_classes: int = 7, n_validated: int = 2) -> Path:
    """A run's folder with a checkpoint of epoch 2, all of its numbers random."""
    torch.manual_seed(3)
    arena = Arena(
        build_model(config, n_classes), HostMemory(), states_of(config), config.ema_decay is not None
    )
    for name, tensor in arena.tensors.items():
        fan = tensor[0].numel() if tensor.ndim > 1 else 100
        tensor.copy_(torch.randn(tensor.shape) * (2 / fan) ** 0.5)
        if name.endswith("var"):
            tensor.abs_()
    (folder / "checkpoints").mkdir(parents=True)
    state = State(2, 90, 90, config.learning_rate, RECORD[:n_validated], 1, asdict(config), {})
    checkpoint.save(folder, arena.state(), state)
    return folder


def state_of(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / "checkpoints" / "epoch_0002.safetensors")
    return {name.partition("/")[2]: v for name, v in tensors.items() if not name.startswith("momenta/")}


@pytest.fixture
def run(tmp_path: Path, shared_folder: Path) -> Path:
    return make_run(tmp_path / "run", make_config(model="tiny", data_folder=str(shared_folder)))


@pytest.mark.parametrize(("to", "ending"), [("safetensors", ".safetensors"), ("torchvision", ".pth")])
def test_a_state_dict_that_plain_torch_loads(tmp_path: Path, run: Path, to: str, ending: str) -> None:
    out = tmp_path / f"net{ending}"
    assert export(load_trained(run, "latest"), to, out) == []
    state = load_file(out) if to == "safetensors" else torch.load(out, weights_only=True)
    plain = Model(7)
    plain.load_state_dict(state)
    again = start(out)[0]
    for name, value in state_of(run).items():
        assert torch.equal(plain.state_dict()[name], value) and torch.equal(again.state_dict()[name], value)


def test_safetensors_say_how_to_use_them(tmp_path: Path, run: Path, shared_folder: Path) -> None:
    export(load_trained(run, 2), "safetensors", tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        facts = {name: json.loads(value) for name, value in file.metadata().items()}
    mean = np.load(shared_folder / "misc" / "img_mean.npy").mean((0, 1))
    assert np.allclose(facts.pop("input_mean"), mean, atol=1e-3)
    assert facts == {
        "model": "tiny",
        "model_args": {},
        "n_classes": 7,
        "epoch": 2,
        "input_size": 32,
        "input_order": "RGB",
        "input_scale": [1.0, 1.0, 1.0],
        "classes": list("0123456"),
    }


def test_arguments_of_a_network_for_grey_images_have_their_channels(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config(model="smallnet", n_channels=1))
    export(load_trained(run, 2), "safetensors", tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        facts = {name: json.loads(value) for name, value in file.metadata().items()}
    plain = smallnet.Model(facts["n_classes"], **facts["model_args"])
    plain.load_state_dict(load_file(tmp_path / "net.safetensors"))


def test_a_damaged_checkpoint_that_is_passed_over_is_named(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "epoch_0003.json").write_text('{"epoch": 3')
    out = tmp_path / "net.safetensors"
    monkeypatch.setattr(sys, "argv", ["export", str(run), "--to", "safetensors", "--out", str(out)])
    assert main() == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"note: passing over a checkpoint: {run}/checkpoints/epoch_0003.json")
    assert "checkpoints/epoch_0002.safetensors" in said.out


def test_class_names_are_those_of_the_datasets_manifest(tmp_path: Path, folder: Path) -> None:
    labels = [np.load(folder / "labels" / f"{split}_labels.npy").tolist() for split in ("train", "val")]
    entries = [
        [
            {"file": f"{split}_hkl/{number:04d}.hkl", "labels": own[32 * number : 32 * number + 32]}
            for number in range(-(-len(own) // 32))
        ]
        for split, own in zip(("train", "val"), labels, strict=True)
    ]
    manifest = {"version": 1, "classes": list("abcdefg"), "train": entries[0], "val": entries[1]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    run = make_run(tmp_path / "run", make_config(model="tiny", data_folder=str(folder), n_classes=None))
    export(load_trained(run, 2), "safetensors", tmp_path / "net.safetensors")
    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == list("abcdefg")


def test_a_checkpoint_from_within_an_epoch_has_weights_but_no_place_to_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config(model="tiny"), n_validated=1)
    trained = load_trained(run, "latest")
    with pytest.raises(UserError, match="was saved within an epoch"):
        export(trained, "theano_alexnet", tmp_path / "theirs")
    with pytest.raises(UserError, match="was saved within an epoch: resume_train=True resumes it"):
        start(run, pretrained_part="whole")
    assert torch.equal(start(run)[0].conv1.weight, trained.model.conv1.weight)


def test_a_run_of_another_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", make_config(model="tiny"))
    monkeypatch.setattr(sys.modules["models.tiny"], "Model", lambda n: Model(n, groups=1))
    with pytest.raises(UserError, match=r"conv2\.weight \(6, 2, 3, 3\), not \(6, 4, 3, 3\)"):
        load_trained(run, "latest")
    monkeypatch.setattr(sys.modules["models.tiny"], "Model", Normalised)
    with pytest.raises(UserError, match="it has no last layer of that network"):
        load_trained(run, "latest")


def test_without_its_dataset_a_run_is_exported_all_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config(model="tiny", n_classes=None, data_folder="/nowhere"))
    trained = load_trained(run, "latest")
    assert trained.n_classes == 7  # by the shapes of the last layer
    notes = export(trained, "safetensors", tmp_path / "net.safetensors")
    assert "without class names and mean" in notes[0] and "/nowhere" in notes[0]


@pytest.mark.parametrize("rate", [0.01, 2**-7])
@pytest.mark.parametrize("lib_conv", ["cudnn", "cudaconvnet"])
def test_theano_alexnets_folder_is_read_back(tmp_path: Path, lib_conv: str, rate: float) -> None:
    """Weights to the bit; momenta too where the rate is a power of two, else to float32's rounding."""
    run = make_run(tmp_path / "run", make_config(model="tiny", learning_rate=rate))
    out = tmp_path / "theirs"
    export(load_trained(run, "latest"), "theano_alexnet", out, lib_conv)
    _, arena, found = start(out, pretrained_part="whole", learning_rate=rate)
    for name, value in load_file(run / "checkpoints" / "epoch_0002.safetensors").items():
        tolerance = 2**-23 if name.startswith("momenta/") and rate == 0.01 else 0
        assert ((arena.tensors[name] - value).abs() <= tolerance * value.abs()).all(), name
    assert found.record == [{k: v for k, v in entry.items() if k != "error_top5"} for entry in RECORD]


def test_the_folders_rate_is_that_of_the_next_epoch(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config(model="tiny", learning_rate=0.1, lr_step=[2]))
    export(load_trained(run, "latest"), "theano_alexnet", tmp_path / "theirs")
    assert np.load(tmp_path / "theirs" / "lr_2.npy") == np.float32(0.01)
    momentum = load_file(run / "checkpoints" / "epoch_0002.safetensors")["momenta/conv1.bias"].numpy()
    assert np.allclose(np.load(tmp_path / "theirs" / "mom_1_2.npy"), -2 * 0.01 * momentum, rtol=1e-6)


class Normalised(nn.Module):
    """A network with all kinds of tensors: normalised, one of them shared, one not for state dicts."""

    input_size = 32

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, n_classes)
        self.again = self.conv
        self.register_buffer("ones", torch.ones(4), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(self.conv(images)).mean((2, 3)) * self.ones)


def test_every_kind_of_tensor_goes_out_and_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["models.tiny"], "Model", Normalised)
    run = make_run(tmp_path / "run", make_config(model="tiny"))
    trained = load_trained(run, "latest")
    export(trained, "torchvision", tmp_path / "net.pth")
    plain = Normalised(7)
    plain.load_state_dict(torch.load(tmp_path / "net.pth", weights_only=True))
    assert torch.equal(plain.bn.running_var, state_of(run)["bn.running_var"])
    assert torch.equal(start(run)[0].ones, state_of(run)["ones"])
    assert "bn.running_var" in start(tmp_path / "net.pth")[0].state_dict()
    with pytest.raises(UserError, match="theano_alexnet has convolutions and fully connected layers"):
        export(trained, "theano_alexnet", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_moving_averages_are_what_goes_out_and_they_begin_where_a_run_starts(tmp_path: Path) -> None:
    """They were validated; the weights under them were not."""
    run = make_run(tmp_path / "run", make_config(model="tiny", ema_decay=0.9))
    tensors = load_file(run / "checkpoints" / "epoch_0002.safetensors")
    assert not torch.equal(tensors["ema/fc4.bias"], tensors["weights/fc4.bias"])
    export(load_trained(run, 2), "torchvision", tmp_path / "net.pth")
    assert torch.equal(torch.load(tmp_path / "net.pth")["fc4.bias"], tensors["ema/fc4.bias"])
    export(load_trained(run, 2), "theano_alexnet", tmp_path / "theirs")
    for source, part in ((run, "weights"), (tmp_path / "theirs", "whole")):
        _, arena, _ = start(source, ema_decay=0.5, pretrained_part=part)
        for kind in ("weights", "ema"):
            assert torch.equal(arena.tensors[f"{kind}/fc4.bias"], tensors["ema/fc4.bias"])
    _, arena, _ = start(run, ema_decay=0.5, pretrained_part="whole")
    assert torch.equal(arena.tensors["weights/fc4.bias"], tensors["weights/fc4.bias"])


def test_another_optimizers_training_cannot_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_config(model="tiny", optimizer="adamw"))
    assert start(run)[1].tensors["momenta/fc4.bias"].eq(0).all()
    with pytest.raises(UserError, match="was made with optimizer: adamw, the configuration says sgd"):
        start(run, pretrained_part="whole")
    of_sgd = make_run(tmp_path / "of_sgd", make_config(model="tiny"))
    with pytest.raises(UserError, match="was made with optimizer: sgd, the configuration says lars"):
        start(of_sgd, pretrained_part="whole", optimizer="lars")
    export(load_trained(run, 2), "theano_alexnet", tmp_path / "theirs")
    assert not list((tmp_path / "theirs").glob("mom_*"))
    with pytest.raises(UserError, match=r"lr_2\.npy: there is no such file"):
        start(tmp_path / "theirs", pretrained_part="whole")


def test_a_network_that_branches_has_no_form_in_theano_alexnet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Branching(Model):
        def __init__(self, n_classes: int) -> None:
            super().__init__(n_classes)
            self.fc5 = nn.Linear(96, n_classes)

    monkeypatch.setattr(sys.modules["models.tiny"], "Model", Branching)
    trained = load_trained(make_run(tmp_path / "run", make_config(model="tiny")), 2)
    with pytest.raises(UserError, match="one layer after the other, in 1 or 2 groups; tiny is not so"):
        export(trained, "theano_alexnet", tmp_path / "theirs")


def test_a_rate_that_has_fallen_to_zero_divides_no_momenta(tmp_path: Path) -> None:
    config = make_config(model="tiny", lr_policy="cosine", n_epochs=2, learning_rate=0.5)
    export(load_trained(make_run(tmp_path / "run", config), 2), "theano_alexnet", tmp_path / "theirs")
    momentum = load_file(tmp_path / "run" / "checkpoints" / "epoch_0002.safetensors")["momenta/fc4.bias"]
    _, arena, _ = start(tmp_path / "theirs", pretrained_part="whole")
    assert torch.equal(arena.tensors["momenta/fc4.bias"], momentum)


def test_nothing_is_overwritten_and_nothing_half_written_is_left(tmp_path: Path, run: Path) -> None:
    trained = load_trained(run, "latest")
    (tmp_path / "net.pth").write_text("mine")
    with pytest.raises(UserError, match=r"net\.pth: already exists"):
        export(trained, "torchvision", tmp_path / "net.pth")
    assert (tmp_path / "net.pth").read_text() == "mine"
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=r"can't be written"):
        export(trained, "torchvision", tmp_path / "no" / "net.pth")
    with pytest.raises(UserError, match=r"can't be written"):
        export(trained, "theano_alexnet", tmp_path / "no" / "theirs")
    (tmp_path / "file").touch()  # below which nothing can be written, removed or looked for
    for to in ("torchvision", "safetensors", "theano_alexnet"):
        with pytest.raises(UserError, match=r"can't be written"):
            export(trained, to, tmp_path / "file" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "file"])


@pytest.mark.parametrize("to", ["torchvision", "safetensors", "theano_alexnet"])
def test_an_export_that_finds_no_room_says_so(tmp_path: Path, to: str) -> None:
    trained = load_trained(make_run(tmp_path / "run", make_config(model="tiny")), "latest")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, unlimited[1]))  # as a full disk
    try:
        with pytest.raises(UserError, match=r"/out: can't be written: .*File too large"):
            export(trained, to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_that_was_killed_hinders_no_other_one(tmp_path: Path) -> None:
    trained = load_trained(make_run(tmp_path / "run", make_config(model="tiny")), "latest")
    (tmp_path / ".theirs.unfinished").mkdir()
    (tmp_path / ".theirs.unfinished" / "W_0.npy").touch()
    export(trained, "theano_alexnet", tmp_path / "theirs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]


def logits_in_onnx(path: Path, images: torch.Tensor) -> np.ndarray:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to run what was exported")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"images": images.numpy()})[0]


def test_onnx_has_the_same_logits_for_any_number_of_images(tmp_path: Path, run: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the packages onnx and onnxscript")
    trained = load_trained(run, "latest")
    export(trained, "onnx", tmp_path / "net.onnx")
    for n_images in (1, 5):
        images = torch.randn(n_images, 3, 32, 32)
        with torch.no_grad():
            expected = trained.model(images).numpy()
        assert np.abs(logits_in_onnx(tmp_path / "net.onnx", images) - expected).max() < 1e-5


def test_onnx_without_its_packages_says_what_to_install(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -c .*constraints.txt -e '.*\[onnx\]'"):
        export(load_trained(run, "latest"), "onnx", tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.slow
def test_alexnet_in_plain_torch_has_the_same_logits(tmp_path: Path) -> None:
    """The real one, once, in the class that docs/weights.md gives to others."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "weights.md").read_text(), re.DOTALL)
    assert code
    names: dict[str, type[nn.Module]] = {}
    exec(code[1], names)
    config = make_config(model="alexnet", model_args={"variant": "theano_alexnet"})
    trained = load_trained(make_run(tmp_path / "run", config, 1000), "latest")
    export(trained, "torchvision", tmp_path / "alexnet.pth")
    plain = names["AlexNet"](1000).eval()
    plain.load_state_dict(torch.load(tmp_path / "alexnet.pth", weights_only=True))
    images = torch.randn(2, 3, 227, 227) * 60
    with torch.no_grad():
        expected, found = trained.model(images), plain(images)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert layers_of(plain) == layers_of(trained.model)


@pytest.mark.slow
def test_the_command(program: Program, tmp_path: Path) -> None:
    running = program.run("n_epochs=1", "para_load=false", devices="[cpu]")

    def command(*words: object) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "lockstep.export", str(running.run_folder), *map(str, words)]
        return subprocess.run(forked(line), capture_output=True, text=True, cwd=ROOT)

    out = tmp_path / "theirs"
    done = command("--to", "theano_alexnet", "--epoch", 1, "--out", out)
    assert done.returncode == 0 and f"wrote {out}: model smallnet, 7 classes" in done.stdout, done.stderr
    assert (out / "W_4_1.npy").exists() and (out / "mom_9_1.npy").exists()
    again = command("--to", "theano_alexnet", "--out", out)
    assert again.returncode == 2 and again.stderr.startswith(f"lockstep: {out}: already exists")
    absent = command("--to", "torchvision", "--epoch", 4)
    assert absent.returncode == 2 and "has no checkpoint of epoch 4" in absent.stderr
    (tmp_path / "file").touch()
    unwritable = command("--to", "torchvision", "--out", tmp_path / "file" / "net.pth")
    assert unwritable.returncode == 2 and "net.pth: can't be written: " in unwritable.stderr
    assert len(unwritable.stderr.splitlines()) == 1
    other = command("--to", "torchvision", "--lib-conv", "cudnn")
    assert other.returncode == 2 and "--lib-conv cudnn is for --to theano_alexnet" in other.stderr
    back = program.run(
        "n_epochs=2", f"pretrained={out}", "pretrained_part=whole", name="back", devices="[cpu]"
    )
    assert "(theano_alexnet's epoch 1), continuing after epoch 1" in back.output()
    assert "epoch 2/2" in back.output()
