"""Networks by name, of packages and of the user: their declared images, and refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Program, make_config
from limits import limit
from safetensors.numpy import load_file
from torch import nn

from lockstep.data.dataset import open_dataset, with_mean
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import UserError
from lockstep.launch.checks import check_model
from lockstep.memory.host import HostMemory
from lockstep.network.build import InputSpec, build_model, crop_size, input_spec_of
from lockstep.network.replica import Replica
from lockstep.runs import folder as runfolder
from lockstep.runs.state import Checkpoint, State

PARTS = ("lockstep", "models", "preprocessing", "train.py", "train_funcs.py", "proc_load.py", "config.yaml")
OWN = """
import torch
from safetensors.numpy import load_file
from torch import nn

class Net(nn.Sequential):
    input_size = 32
    input_mean = (1, 2, 3)
    input_scale = 0.5
    def __init__(self, n_classes, width=4):
        super().__init__(nn.Conv2d(3, width, 8, 8), nn.Flatten(), nn.LazyLinear(n_classes))

class Sizeless(nn.Sequential):
    def __init__(self, n_classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, n_classes))

class Features(Net):
    def __init__(self, n_classes):
        super().__init__(n_classes + 1)

class Pair(Sizeless):
    input_size = 32
    def forward(self, x):
        return super().forward(x), x

class Headed(nn.Module):
    input_size, aux_weights = 32, (0.3,)
    def __init__(self, n_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, n_classes)
        self.aux = nn.Sequential(nn.Dropout(), nn.Flatten(), nn.Linear(3 * 32 * 32, n_classes))
    def forward(self, x):
        x = self.norm(x + 1)
        logits = self.fc(x.mean((2, 3)))
        return (logits, self.aux(x)) if self.training else logits

class Volumes(nn.Sequential):
    input_size = 8
    def __init__(self, n_classes):
        super().__init__(nn.Conv2d(3, 4, 3), nn.Unflatten(1, (1, 4)), nn.Conv3d(1, 2, 3), nn.Flatten(),
                         nn.Linear(64, n_classes))

class Viewing(nn.Module):
    input_size = 32
    def __init__(self, n_classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 8, 8), nn.Linear(64, n_classes)
    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))

class Complex(nn.Module):
    input_size = 8
    def __init__(self, n_classes):
        super().__init__()
        self.filters, self.fc = nn.Parameter(torch.zeros(3, 8, 5, 2)), nn.Linear(192, n_classes)
    def forward(self, x):
        x = torch.fft.irfft2(torch.fft.rfft2(x) * torch.view_as_complex(self.filters), s=(8, 8))
        return self.fc(x.flatten(1))

class BadMean(Sizeless):
    input_size = 32
    input_mean = (1, 2)

def three(n_classes):
    return 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "__init__.py").write_text("")
    (tmp_path / "mypackage" / "mymodule.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("mypackage")]:
        del sys.modules[name]


@pytest.fixture
def timm() -> Any:
    return pytest.importorskip("timm", exc_type=Exception)


def build(model: str, n_classes: int = 7, **values: object) -> tuple[nn.Module, InputSpec]:
    config = make_config(model=model, **values)
    built = build_model(config, n_classes)
    return built, input_spec_of(built, config)


def test_ones_own_network_is_found_by_module_and_name(package: Path) -> None:
    model, input_spec = build("mypackage.mymodule:Net", model_args={"width": 5})
    assert model[0].weight.shape == (5, 3, 8, 8) and model[2].weight.shape == (
        7,
        80,
    )  # LazyLinear has its size
    assert input_spec == InputSpec((32, 32), (1, 2, 3), (0.5, 0.5, 0.5))
    assert build("mypackage.mymodule:Sizeless", input_size=24)[1] == InputSpec((24, 24))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Nett", {}, r"mypackage.mymodule has no Nett \(did you mean 'Net'\?\)"),
        ("Net", {"model_args": {"depth": 3}}, r"can't be made .* unexpected keyword argument 'depth'"),
        ("Net", {"input_size": 4}, r"can't take 4 x 4 images: .*set input_size, or null"),
        ("Headed", {"input_size": 24}, r"can't take 24 x 24 images: .*set input_size, or null"),
        ("Viewing", {}, r"can't take 32 x 32 images: .*channels last: use reshape\(\) for view\(\)"),
        ("Complex", {}, r"can't take 8 x 8 images: .*channels last: .* contiguous\(\) where"),
        ("Sizeless", {}, r"has no whole number `input_size`"),
        ("Features", {}, r"must make logits \(2, 7\) of 2 images, not \(2, 8\)"),
        ("Pair", {}, r"must make logits \(2, 7\) of 2 images, not tuple"),
        ("BadMean", {}, r"its input_mean must be 3 numbers"),
        ("three", {}, r"must make a torch.nn.Module, not int"),
    ],
)
def test_what_is_no_network_is_refused(
    package: Path, name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(f"mypackage.mymodule:{name}", **values)


def test_trying_auxiliary_heads_changes_no_statistics_and_no_random_numbers(package: Path) -> None:
    """Forward runs them in training only, where batch normalization and dropout have side effects."""
    built, _ = build("mypackage.mymodule:Headed")
    draws = torch.rand(3)
    torch.manual_seed(seed_of(Purpose.INITIALISATION, 0))
    fresh = type(built)(7)
    assert torch.equal(draws, torch.rand(3)) and built.training
    assert all(torch.equal(built.state_dict()[name], value) for name, value in fresh.state_dict().items())


def test_weights_of_five_dimensions_stay_as_they_are_and_those_of_four_become_channels_last(
    package: Path,
) -> None:
    config = make_config(model="mypackage.mymodule:Volumes")
    drawn = build_model(config, 7)
    names = [f"weights/{name}" for name, _ in drawn.named_parameters()]
    for model in (drawn, build_model(config, 7, names)):
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert model[2].weight.is_contiguous() and model[2].weight.shape == (2, 1, 3, 3, 3)


def test_a_module_that_does_not_import_is_named(package: Path) -> None:
    (package / "mypackage" / "broken.py").write_text("import no_such_thing")
    with pytest.raises(UserError, match=r"mypackage.broken:Net: can't be made .* 'no_such_thing'"):
        build("mypackage.broken:Net")
    with pytest.raises(UserError, match=r"mypackage.absent:Net: can't be made .* 'mypackage.absent'"):
        build("mypackage.absent:Net")


def test_the_configuration_wins_over_what_a_network_says(package: Path) -> None:
    keys = {"input_size": 40, "subtract_mean": [9, 8, 7], "scale": [1, 2, 3]}
    _, input_spec = build("mypackage.mymodule:Sizeless", **keys)
    assert input_spec == InputSpec((40, 40), None, (1.0, 2.0, 3.0))
    assert build("mypackage.mymodule:Net", subtract_mean="image", scale=2)[1] == InputSpec(
        (32, 32), None, (2.0,) * 3
    )


def test_a_networks_mean_and_scale_come_to_its_pictures(package: Path, shared_folder: Path) -> None:
    config = make_config(model="mypackage.mymodule:Net", data_folder=str(shared_folder))
    dataset = open_dataset(config)
    replica = Replica(config, dataset, HostMemory())
    assert replica.mean == (1, 2, 3) and replica.crop_size == (32, 32)
    assert (with_mean(dataset, replica.mean).mean == np.array([1, 2, 3])).all()
    assert with_mean(dataset, None) is dataset
    images = torch.randn(2, 3, 32, 32)
    replica.begin_validation()
    assert torch.equal(replica._forward(images)[0], replica.model(images / 2))


@pytest.mark.parametrize(
    ("value", "expected"), [("none", [0, 0, 0]), ([1, 2.5, 3], [1, 2.5, 3])], ids=["none", "list"]
)
def test_a_mean_of_three_numbers_needs_no_file(shared_folder: Path, value: Any, expected: Any) -> None:
    config = make_config(data_folder=str(shared_folder), mean_file="/nowhere.npy", subtract_mean=value)
    mean = open_dataset(config).mean
    assert mean.shape == (36, 36, 3) and mean.dtype == np.float32 and (mean == np.array(expected)).all()


def test_a_picture_too_small_for_the_network_is_refused(package: Path) -> None:
    config = make_config(model="mypackage.mymodule:Net")
    with pytest.raises(UserError, match=r"takes 32 x 32 images, .* --size 32 or more, or set input_size"):
        crop_size(build_model(config, 7), config, (31, 40, 3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smalnet", r"no models/smalnet.py \(did you mean 'smallnet'\?\) \(there are: .*alexnet"),
        ("no_such:resnet18", "no_such:resnet18 needs the Python package no_such, which is not installed"),
        ("my package:Net", "is not of the form package.module:Name"),
        ("mypackage:", "is not of the form package.module:Name"),
        (":Net", "is not of the form package.module:Name"),
    ],
)
def test_the_launcher_checks_the_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(make_config(model=name), ROOT / "models")


def test_a_runs_folder_has_a_name_that_can_be_given(tmp_path: Path) -> None:
    model = "mypackage.mymodule:" + "Net" * 40
    run = runfolder.open_run(make_config(model=model, weights_dir=str(tmp_path)), 10)
    assert make_config(run_name=run.folder.name).run_name.startswith("mypackage.mymodule-Net")


def test_another_end_of_a_cosine_is_told(tmp_path: Path) -> None:
    then, now = (make_config(lr_policy="cosine", n_epochs=n_epochs) for n_epochs in (5, 8))
    old = {key: value for key, value in asdict(then).items() if key not in ("optimizer", "ema_decay")}
    state = State(2, 0, 10, 0.1, [{"error_top1": 1.0}] * 2, 1, json.loads(json.dumps(old)), {})
    (notice,) = runfolder._check_same_run(now, 10, Checkpoint(tmp_path / "epoch_0002.safetensors", state))
    assert notice == "the learning rate falls over n_epochs: 8 now, 5 before"
    with pytest.raises(UserError, match="was made with optimizer: sgd, the configuration says lars"):
        runfolder._check_same_run(replace(now, optimizer="lars"), 10, Checkpoint(tmp_path, state))


@pytest.mark.parametrize("record", [[], [{"epoch": 2, "error_top1": 1.0}], [{"error_top1": 1.0}] * 2])
def test_the_policy_auto_needs_the_error_of_each_epoch(tmp_path: Path, record: list[dict]) -> None:
    config = make_config(val_freq=2)
    state = State(2, 0, 10, 0.1, record, 1, json.loads(json.dumps(asdict(config))), {})
    start = Checkpoint(tmp_path / "epoch_0002.safetensors", state)
    now = replace(config, lr_policy="auto", val_freq=1)
    if len(record) == 2:
        assert runfolder._check_same_run(now, 10, start) is not None
        return
    with pytest.raises(UserError, match="lr_policy: auto compares the errors of consecutive epochs"):
        runfolder._check_same_run(now, 10, start)


def test_the_launcher_imports_nothing_for_it() -> None:
    code = (
        "import sys, train; from lockstep.config import Config; models = train.HERE / 'models'; "
        "from lockstep.launch.checks import check_model; "
        "check_model(Config(model='alexnet'), models); check_model(Config(model='torch.nn:Linear'), models); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_torchvision_of_another_build_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"  # as with CUDA's beside a CPU torch
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match="torchvision has another build than torch: install both"):
        build("torchvision:resnet18")


def test_torchvisions_networks_by_name(torchvision: Any) -> None:
    model, input_spec = build("torchvision:resnet18", model_args={"zero_init_residual": True})
    assert model.fc.out_features == 7 and model.layer1[0].bn2.weight.eq(0).all()
    assert input_spec.size == (224, 224) and input_spec.mean == pytest.approx((123.675, 116.28, 103.53))
    assert input_spec.scale == pytest.approx((1 / 58.395, 1 / 57.12, 1 / 57.375))
    with pytest.raises(UserError, match=r"torchvision has no resnet19 \(did you mean 'resnet1"):
        build("torchvision:resnet19")
    with pytest.raises(UserError, match=r"can't be made .* unexpected keyword argument 'depth'"):
        build("torchvision:resnet18", model_args={"depth": 3})


def test_timms_networks_by_name(timm: Any) -> None:
    model, input_spec = build("timm:resnet10t", input_size=64)
    assert model.get_classifier().out_features == 7
    assert input_spec.size == (64, 64) and input_spec.mean == pytest.approx((123.675, 116.28, 103.53))
    with pytest.raises(UserError, match=r"timm has no convnext_tinny \(did you mean 'convnext_tiny"):
        build("timm:convnext_tinny")


@pytest.mark.slow
def test_a_loader_subtracts_what_the_network_wants(program: Program, package: Path) -> None:
    """A loader process and the trainer itself both subtract the network's mean, not the mean image."""
    environment = {**os.environ, "PYTHONPATH": f"{package}:{ROOT}"}
    results = []
    for name, words in (("ahead", []), ("direct", ["para_load=false"]), ("image", ["subtract_mean=image"])):
        keys = ["model=mypackage.mymodule:Net", "n_epochs=1", "learning_rate=0.001", *words]
        running = program.run(*keys, name=name, devices="[cpu]", environment=environment)
        results.append(load_file(running.run_folder / "checkpoints" / "epoch_0001.safetensors"))
    ahead, direct, image = results
    assert all(ahead[key].tobytes() == direct[key].tobytes() for key in ahead)
    assert not np.allclose(ahead["weights/0.weight"], image["weights/0.weight"], atol=1e-4)


def ten_lines() -> str:
    text = (ROOT / "docs" / "models.md").read_text()
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


def test_the_ten_lines_of_the_document_are_a_network_of_a_package(package: Path) -> None:
    assert len(ten_lines().splitlines()) <= 10
    (package / "mypackage" / "mynet.py").write_text(ten_lines())
    _, input_spec = build("mypackage.mynet:Model", model_args={"width": 8})
    assert input_spec == InputSpec((32, 32), None, (1 / 64,) * 3)


def test_the_ten_lines_of_the_document_train_when_pasted(shared_folder: Path, tmp_path: Path) -> None:
    """The lines of docs/models.md train as models/mynet.py, with two trainers and loaders."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "models" / "mynet.py").write_text(ten_lines())
    words = [f"data_folder={shared_folder}", "n_classes=7", "devices=[cpu, cpu]", "batch_size=8"]
    command = [sys.executable, "train.py", "model=mynet", "n_epochs=1", *words]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("done: validation error")
    text = "2 trainers are not exactly one with 2 times the batch: batch normalisation"
    assert result.stdout.count(text) == 1


def test_a_file_of_models_without_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modelless.py").write_text("class Net: pass\n")
    monkeypatch.setattr("models.__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=r"modelless\.py has no Model\. Give its class .* that name"):
        build("modelless")
