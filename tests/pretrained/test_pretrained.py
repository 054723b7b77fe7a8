"""Starting from weights that were trained elsewhere: what fits is taken, the rest named, no code run."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Program, make_config
from safetensors.torch import load_file, save_file
from saved import assert_same, tensors
from tiny import Model, fresh, start
from torch import nn

from lockstep.errors import UserError
from lockstep.pretrained.heads import class_tensors


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    """Weights that no new network has."""
    torch.manual_seed(7)
    return {name: torch.randn_like(value) for name, value in Model(7).state_dict().items()}


def assert_has(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("ending", [".safetensors", ".pth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_state_dict_with_the_same_names(tmp_path: Path, trained, ending: str, dtype: torch.dtype) -> None:
    path = tmp_path / f"net{ending}"
    state = {name: value.to(dtype) for name, value in trained.items()}
    (save_file if ending == ".safetensors" else torch.save)(state, path)
    model, arena, found = start(path)
    assert_has(model, {name: value.float() for name, value in state.items()})
    assert found.notes == ["matched 8 tensors, missing 0, unexpected 0, other shapes 0, other values 0"]
    assert torch.equal(arena.tensors["weights/fc4.bias"], state["fc4.bias"].float())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"epoch": 5, "state_dict": state, "optimizer": {"lr": [0.1]}},
        lambda state: {"model": state},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
    ],
)
def test_what_training_scripts_wrap_around_a_state_dict(tmp_path: Path, trained, wrap) -> None:
    torch.save(wrap(trained), tmp_path / "net.pth")
    assert_has(start(tmp_path / "net.pth")[0], trained)


def test_names_in_sequences_are_taken_in_their_order(tmp_path: Path, trained) -> None:
    """features before classifier, 3 before 10, however the file has them sorted."""
    layers = {"features.3": "conv1", "features.10": "conv2", "classifier.1": "fc3", "classifier.4": "fc4"}
    state = {
        f"{theirs}.{kind}": trained[f"{ours}.{kind}"] for theirs, ours in layers.items() for kind in KINDS
    }
    save_file(state, tmp_path / "net.safetensors")
    assert_has(start(tmp_path / "net.safetensors")[0], trained)


KINDS = ("weight", "bias")


@pytest.mark.parametrize("form", ["{}/blobs/{}", "{}.blobs.{}"])
def test_caffes_blobs_are_read_and_bgr_is_turned(tmp_path: Path, trained, form: str) -> None:
    """The names are those of converters of .caffemodel files; before 2015 all had four dimensions."""
    state = {}
    for name, value in trained.items():
        layer, kind = name.split(".")
        blob = value.flip(1) if name == "conv1.weight" else value
        state[form.format(layer, KINDS.index(kind))] = blob.reshape((1,) * (4 - blob.ndim) + blob.shape)
    torch.save(state, tmp_path / "net.pth")
    model, _, found = start(tmp_path / "net.pth", pretrained_channels="bgr")
    assert_has(model, trained)
    assert "conv1.weight: input channels reversed from BGR to RGB" in found.notes
    as_they_are, _, found = start(tmp_path / "net.pth")
    assert torch.equal(as_they_are.conv1.weight, trained["conv1.weight"].flip(1))
    assert "Caffe's own networks take BGR" in found.notes[0]


@pytest.mark.slow
def test_torchvisions_alexnet_is_another_network_and_its_shapes_say_so(tmp_path: Path) -> None:
    shapes = {"features.0": (64, 3, 11, 11), "features.3": (192, 64, 5, 5), "features.6": (384, 192, 3, 3)}
    shapes |= {"features.8": (256, 384, 3, 3), "features.10": (256, 256, 3, 3)}
    shapes |= {"classifier.1": (4096, 9216), "classifier.4": (4096, 4096), "classifier.6": (1000, 4096)}
    state = {}
    for layer, shape in shapes.items():  # one number, seen as many: a small file of the real shapes
        state[f"{layer}.weight"], state[f"{layer}.bias"] = torch.zeros(1).expand(shape), torch.zeros(shape[0])
    torch.save(state, tmp_path / "alexnet.pth")
    with pytest.raises(UserError) as caught:
        start(tmp_path / "alexnet.pth", 1000, model="alexnet")
    assert "alexnet.pth (torchvision's sequences): does not fit model alexnet" in str(caught.value)
    assert "conv1.weight (64, 3, 11, 11), not (96, 3, 11, 11)" in str(caught.value)


# -- what does not fit ---------------------------------------------------------------------------------------


def without(*names: str):
    return lambda state: {name: value for name, value in state.items() if name not in names}


def with_value(name: str, value: torch.Tensor):
    return lambda state: {**state, name: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("conv2.bias"), "missing: conv2.bias (pretrained_allow: [conv2.*]"),
        (without("fc4.bias", "fc4.weight"), "missing: fc4.weight, fc4.bias (new_head: true"),
        (with_value("fc9.bias", torch.zeros(3)), "unexpected: fc9.bias (pretrained_allow: [fc9.*]"),
        (with_value("fc3.bias", torch.zeros(4)), "other shapes: fc3.bias (4,), not (10,)"),
        (with_value("fc3.bias", torch.zeros(10).long()), "other values: fc3.bias int64, not float32"),
        (with_value("fc3.bias", torch.full((10,), torch.inf)), "other values: fc3.bias not finite"),
        (
            lambda state: {f"a.{name}": value for name, value in state.items()},
            "fc3.weight, fc3.bias and 2 more",
        ),
    ],
)
def test_a_mismatch_is_an_error_that_changes_nothing(tmp_path: Path, trained, change, message: str) -> None:
    save_file(change(trained), tmp_path / "net.safetensors")
    with pytest.raises(UserError) as caught:
        start(tmp_path / "net.safetensors")
    assert message in str(caught.value) and "does not fit model tiny" in str(caught.value)


def test_a_mismatch_that_is_allowed_by_name_stays_as_it_was(tmp_path: Path, trained) -> None:
    state = {**without("conv2.bias")(trained), "fc3.bias": torch.zeros(4), "extra": torch.zeros(1)}
    save_file(state, tmp_path / "net.safetensors")
    allow = ["conv2.*", "fc3.bias", "extra"]
    model, _, found = start(tmp_path / "net.safetensors", pretrained_allow=allow)
    new = fresh().state_dict()
    assert_has(model, {**trained, "conv2.bias": new["conv2.bias"], "fc3.bias": new["fc3.bias"]})
    assert found.notes[1:] == [
        "allowed by name: missing conv2.bias",
        "allowed by name: other shapes fc3.bias (4,), not (10,)",
        "allowed by name: unexpected extra",
    ]
    with pytest.raises(UserError, match=r"\(pretrained_allow: \[\*\]"):
        start(tmp_path / "net.safetensors", pretrained_allow=allow[:2])
    with pytest.raises(
        UserError, match=r"pretrained_allow: no tensor .* matches 'extar' .did you mean 'extra'"
    ):
        start(tmp_path / "net.safetensors", pretrained_allow=[*allow, "extar"])


@pytest.mark.parametrize("n_classes", [7, 12])
def test_finetuning_makes_the_last_layer_anew(tmp_path: Path, trained, n_classes: int) -> None:
    save_file(trained, tmp_path / "net.safetensors")
    model, _, found = start(tmp_path / "net.safetensors", n_classes, new_head=True)
    new = fresh(n_classes).state_dict()
    assert_has(model, {**trained, **{f"fc4.{kind}": new[f"fc4.{kind}"] for kind in KINDS}})
    assert "new, as the last layer is to be replaced: fc4.weight, fc4.bias" in found.notes


def test_the_last_layers_are_found_in_any_network() -> None:
    """Not by their number of outputs: fc3 has as many as there are classes."""
    assert class_tensors(make_config(model="tiny")) == {"fc4.weight": 0, "fc4.bias": 0}
    assert class_tensors(make_config(model="smallnet")) == {"fc5.weight": 0, "fc5.bias": 0}


class Marker:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_pth_that_would_run_code_is_refused_and_nothing_runs(
    tmp_path: Path, trained, legacy: bool, inside: bool
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "net.pth"
    content = {**trained, "extra": Marker(marker)} if inside else Marker(marker)
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(UserError, match=r"net\.pth: refused: it needs unpickling of code \(posix\.mkdir\)"):
        start(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the file is what the test says
    assert marker.exists()


def test_a_whole_module_is_refused_by_its_class(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "net.pth")
    with pytest.raises(
        UserError, match=r"refused: .*torch\.nn\.modules\.container\.Sequential.*state_dict\(\)"
    ):
        start(tmp_path / "net.pth")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("net.pth", b"", "is not a whole file of weights"),
        ("net.pth", b"PK\3\4 and so on", "is not a whole file of weights"),
        ("net.pth", b"some text", "is not a whole file of weights"),
        ("net.safetensors", b"\xff" * 100, "is not a whole safetensors file"),
        ("net.caffemodel", b"", "not '.caffemodel'"),
        (
            "net.pth",
            pickle.dumps([1, 2], protocol=2),
            "torch.save has not written it; perhaps pickle.dump has. If",
        ),
        ("net.pth", pickle.dumps({"fc.weight": [1.0]}), "program and save its state dict with torch.save"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        start(tmp_path / name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {}, {"a": 3}, {1: torch.zeros(2)}, torch.zeros(3)])
def test_a_pth_without_a_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "net.pth")
    with pytest.raises(UserError, match=r"net\.pth: holds no state dict"):
        start(tmp_path / "net.pth")


def test_a_truncated_pth_and_a_folder_of_something_else(tmp_path: Path, trained) -> None:
    torch.save(trained, tmp_path / "net.pth")
    os.truncate(tmp_path / "net.pth", 5000)
    with pytest.raises(UserError, match=r"net\.pth: is not a whole file of weights"):
        start(tmp_path / "net.pth")
    with pytest.raises(UserError, match="is not a run's folder"):
        start(tmp_path)
    with pytest.raises(UserError, match="there is no such file"):
        start(tmp_path / "other.pth")
    save_file(trained, tmp_path / "net.safetensors")
    with pytest.raises(UserError, match="holds weights alone: pretrained_part: whole needs a checkpoint"):
        start(tmp_path / "net.safetensors", pretrained_part="whole")


# -- runs ----------------------------------------------------------------------------------------------------


ALONE = ("devices=[cpu]", "para_load=false")  # as few processes as there can be


@pytest.mark.slow
def test_a_whole_training_goes_on_in_another_folder_bit_for_bit(program: Program) -> None:
    words = ["n_epochs=4", "snapshot_freq=2", "lr_step=[1,3]", *ALONE]
    unbroken = program.run(*words, name="unbroken")
    first = program.run("n_epochs=2", *words[1:], name="first")
    before = {path: path.read_bytes() for path in (first.run_folder / "checkpoints").iterdir()}
    second = program.run(*words, f"pretrained={first.run_folder}", "pretrained_part=whole", name="second")
    assert_same(tensors(unbroken, 4), tensors(second, 4))
    assert "epoch_0002.safetensors (a checkpoint), continuing after epoch 2" in second.output()
    assert "matched 10 tensors, missing 0" in second.output()
    assert {path: path.read_bytes() for path in (first.run_folder / "checkpoints").iterdir()} == before


@pytest.mark.slow
def test_such_a_run_resumes_from_its_own_checkpoints(program: Program) -> None:
    first = program.run("n_epochs=1", *ALONE, name="first")
    words = [*ALONE, f"pretrained={first.run_folder}", "pretrained_part=whole"]
    program.run("n_epochs=2", *words, name="second")
    resumed = program.run("n_epochs=3", *ALONE, "resume_train=true", name="second")
    assert "resuming from" in resumed.output() and "starting with" not in resumed.output()
    assert "epoch 3/3" in resumed.output()
    refused = program.run("n_epochs=1", *words, name="third", code=2)
    assert "all 1 epochs are done; raise n_epochs" in refused.last_line()


@pytest.mark.slow
def test_a_run_starts_with_weights_alone_and_fine_tunes(program: Program) -> None:
    first = program.run("n_epochs=1", *ALONE, name="first")
    words = ["n_epochs=1", *ALONE, f"pretrained={first.run_folder}"]
    still = "learning_rate=1e-9"  # so that the weights stay
    second = program.run(*words, still, name="second")
    ours, theirs = load_file_of(second), load_file_of(first)
    for name in ours:
        same = torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6)
        assert same == name.startswith("weights/"), name
    refused = program.run(*words, "n_classes=9", name="third", code=2)
    assert "fc5.weight (7, 128), not (9, 128)" in refused.last_line()
    assert "new_head: true replaces the last layer" in refused.last_line()
    tuned = program.run(*words, "n_classes=9", "new_head=true", still, name="fourth")
    assert "new, as the last layer is to be replaced: fc5.weight, fc5.bias" in tuned.output()
    ours = load_file_of(tuned)
    assert ours["weights/fc5.weight"].shape == (9, 128)
    assert torch.allclose(ours["weights/conv1.weight"], theirs["weights/conv1.weight"], rtol=0, atol=1e-6)


def load_file_of(running) -> dict[str, torch.Tensor]:
    return load_file(running.run_folder / "checkpoints" / "epoch_0001.safetensors")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new_head=true"], "new_head needs `pretrained`"),
        (["pretrained=x.pth", "pretrained_part=whole", "new_head=true"], "can't be combined with new_head"),
        (["pretrained=/nowhere.pth"], "/nowhere.pth: there is no such file (pretrained)"),
        (["pretrained=x.pth", "pretrained_part=some"], "pretrained_part must be 'weights' or 'whole'"),
    ],
)
def test_the_program_refuses(program: Program, words: list[str], message: str) -> None:
    running = program.run(*words, code=2)
    assert message in running.last_line() and "Traceback" not in running.output()


SOURCES = {
    "torchvision": "class models:\n    @staticmethod\n    def get_model(name, weights):\n"
    "        assert (name, weights) == ('resnet50', 'DEFAULT')\n        return Model(5)\n",
    "timm": "def create_model(name, pretrained):\n    assert name == 'resnet50' and pretrained\n"
    "    return Model(5)\n",
}


def documents_command(package: str) -> str:
    """Return the Python program with which docs/weights.md writes a package's weights."""
    commands = re.findall(r'^python -c "(.*)"$', (ROOT / "docs" / "weights.md").read_text(), re.MULTILINE)
    (command,) = [each for each in commands if f"import {package}" in each or f", {package};" in each]
    return str(command)


@pytest.mark.parametrize("package", SOURCES)
def test_the_documents_commands_write_files_that_fit(tmp_path: Path, package: str) -> None:
    """A stand-in for the package gives the network; its own one needs a connection."""
    command = documents_command(package)
    (tmp_path / f"{package}.py").write_text("from models.resnet20 import Model\n" + SOURCES[package])
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    (file,) = tmp_path.glob("resnet50.*")
    model, _, loaded = start(file, model="resnet20", new_head=True)
    assert "new, as the last layer is to be replaced" in "\n".join(loaded.notes)
    assert model.fc.weight.shape == (7, 64)


@pytest.mark.parametrize("package", SOURCES)
def test_the_packages_own_networks_start_with_such_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """With random weights, because trained ones need a connection."""
    pytest.importorskip(package, exc_type=Exception)
    command = documents_command(package).replace("resnet50", "resnet18")
    command = command.replace("weights='DEFAULT'", "weights=None").replace(
        "pretrained=True", "pretrained=False"
    )
    monkeypatch.chdir(tmp_path)
    exec(command, {})
    (file,) = tmp_path.glob("resnet18.*")
    model, arena, loaded = start(file, model=f"{package}:resnet18", new_head=True, input_size=64)
    saved = torch.load(file) if file.suffix == ".pth" else load_file(file)
    assert "new, as the last layer is to be replaced: fc.weight, fc.bias" in "\n".join(loaded.notes)
    head = {name: value for name, value in model.state_dict().items() if name.startswith("fc.")}
    assert head["fc.weight"].shape == (7, 512)
    assert_has(model, {**saved, **head})
    before = model.conv1.weight.clone()
    model(torch.randn(2, 3, 64, 64)).logsumexp(1).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    step = arena.tensors["weights/conv1.weight"] - before
    assert step.any() and step.isfinite().all()
