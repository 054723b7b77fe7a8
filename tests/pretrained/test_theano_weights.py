"""theano_alexnet's folders: read as their program wrote them, written so that it would read them.

The folders are made here, by NumPy, SciPy and the layout that theano_alexnet's own program writes.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal
from tiny import start

from lockstep.errors import UserError
from lockstep.network.build import build_model
from lockstep.network.optimizer import make_optimizer
from lockstep.pretrained import theano_folder
from lockstep.pretrained.theano_folder import LayerArrays, LibConv, TrainingState

EPOCH, RATE = 3, 0.01
# name and shape, in the order of momenta: (input, row, column, output), (input, output), (output,)
ARRAYS = {
    "W_0": (3, 3, 3, 4),
    "b_0": (4,),
    "W0_1": (2, 3, 3, 3),
    "b0_1": (3,),
    "W1_1": (2, 3, 3, 3),
    "b1_1": (3,),
    "W_2": (96, 10),
    "b_2": (10,),
    "W_3": (10, 7),
    "b_3": (7,),
}


def make_weights(shapes: dict[str, tuple[int, ...]] = ARRAYS, seed: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def save_folder(
    folder: Path, arrays: dict[str, np.ndarray], momenta: list[np.ndarray], lib_conv: str | None = "cudnn"
) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}_{EPOCH}.npy", array)
    for number, array in enumerate(momenta):
        np.save(folder / f"mom_{number}_{EPOCH}.npy", array)
    np.save(folder / f"lr_{EPOCH}.npy", np.float32(RATE))
    np.save(folder / "val_record.npy", [[0.9, 3.0], [0.8, 2.5], [0.7, 2.0]])
    if lib_conv:
        (folder / "config.yaml").write_text(f"lib_conv: {lib_conv}  # or the other\nbatch_size: 256\n")
    return folder


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "theirs", make_weights(), list(make_weights(seed=4).values()))


def filtered(image: np.ndarray, filters: np.ndarray, stride: int, pad: int, true: bool) -> np.ndarray:
    """A layer's filters over an image (channel, row, column), by SciPy; true: convolved, not correlated."""
    image = np.pad(image, [(0, 0), (pad, pad), (pad, pad)])
    over = signal.convolve2d if true else signal.correlate2d
    maps = [
        sum(over(image[i], filters[i, :, :, o], "valid") for i in range(len(image)))
        for o in range(filters.shape[3])
    ]
    return np.stack(maps)[:, ::stride, ::stride]


def their_logits(arrays: dict[str, np.ndarray], image: np.ndarray, true: bool) -> np.ndarray:
    """Return theano_alexnet's logits in validation: behind a dropout of 0.5 everything is halved."""
    x = filtered(image, arrays["W_0"], 4, 0, true) + arrays["b_0"][:, None, None]
    x = np.maximum(x, 0)
    halves = [
        filtered(x[2 * g : 2 * g + 2], arrays[f"W{g}_1"], 1, 1, true) + arrays[f"b{g}_1"][:, None, None]
        for g in range(2)
    ]
    x = np.maximum(np.concatenate(halves), 0)
    x = x.reshape(6, 4, 2, 4, 2).max((2, 4)).reshape(-1)
    x = np.maximum(x @ arrays["W_2"] + arrays["b_2"], 0) * 0.5
    return x @ arrays["W_3"] + arrays["b_3"]


@pytest.mark.parametrize("lib_conv", ["cudnn", "cudaconvnet"])
def test_logits_are_those_that_theano_alexnet_computes(tmp_path: Path, lib_conv: str) -> None:
    arrays = make_weights()
    image = np.random.default_rng(5).normal(size=(3, 32, 32)).astype(np.float32)
    expected = their_logits(arrays, image, true=lib_conv == "cudnn")
    other = their_logits(arrays, image, true=lib_conv != "cudnn")
    model, _, found = start(save_folder(tmp_path / "theirs", arrays, [], lib_conv))
    with torch.no_grad():
        ours = model.eval()(torch.from_numpy(image)[None])[0].numpy()
    assert np.abs(ours - expected).max() < 1e-5
    assert np.abs(ours - other).max() > 1e-2  # the other library's filters would show
    assert "matched 8 tensors, missing 0, unexpected 0, other shapes 0" in found.notes[-1]
    assert found.record == []


def test_the_key_wins_over_the_folders_config_and_one_is_needed(golden: Path) -> None:
    weights = [start(golden, pretrained_lib_conv=key)[0].conv1.weight for key in (None, "cudaconvnet")]
    assert torch.equal(weights[0], weights[1].flip(2, 3)) and not torch.equal(*weights)
    (golden / "config.yaml").unlink()
    with pytest.raises(UserError, match="set pretrained_lib_conv: cudnn"):
        start(golden)


def test_the_newest_epoch_unless_another_is_named(golden: Path) -> None:
    newer = {name: array + 1 for name, array in make_weights().items()}
    for name, array in newer.items():
        np.save(golden / f"{name}_12.npy", array)
    bias = make_weights()["b_0"]
    assert np.array_equal(start(golden)[0].conv1.bias.detach().numpy(), bias + 1)
    assert np.array_equal(start(golden, pretrained_epoch=EPOCH)[0].conv1.bias.detach().numpy(), bias)
    with pytest.raises(UserError, match="has no weights of epoch 5; the newest are of 12"):
        start(golden, pretrained_epoch=5)


# -- resuming ------------------------------------------------------------------------------------------------

NO_HIDDEN = {**{name: ARRAYS[name] for name in list(ARRAYS)[:6]}, "W_2": (96, 7), "b_2": (7,)}


class Theirs:
    """theano_alexnet's training, on its own arrays: v = m v - r (g + d w), w = w + v; biases: 2 r, no d."""

    def __init__(self) -> None:
        self.params = {
            name: torch.from_numpy(a).requires_grad_() for name, a in make_weights(NO_HIDDEN).items()
        }
        self.velocities = {name: torch.zeros_like(value) for name, value in self.params.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = {n: v.permute(3, 0, 1, 2).flip(2, 3) if v.ndim == 4 else v for n, v in self.params.items()}
        x = torch.relu(F.conv2d(x, p["W_0"], p["b_0"], stride=4))
        halves = [F.conv2d(x[:, 2 * g : 2 * g + 2], p[f"W{g}_1"], p[f"b{g}_1"], padding=1) for g in range(2)]
        x = F.max_pool2d(torch.relu(torch.cat(halves, 1)), 2)
        return x.flatten(1) @ p["W_2"] + p["b_2"]

    def step(self, images: torch.Tensor, labels: torch.Tensor, rate: float) -> None:
        loss = F.cross_entropy(self.forward(images), labels)
        gradients = torch.autograd.grad(loss, list(self.params.values()))
        with torch.no_grad():
            for name, gradient in zip(self.params, gradients, strict=True):
                is_weight = name.startswith("W")
                decayed = gradient + 0.0005 * self.params[name] if is_weight else gradient
                self.velocities[name].mul_(0.9).sub_((1 if is_weight else 2) * rate * decayed)
                self.params[name] += self.velocities[name]


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The rate fell after the last epoch: momenta were gathered at ten times the rate of the next step."""
    torch.manual_seed(1)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 7, (8,))
    theirs = Theirs()
    for _ in range(4):
        theirs.step(images, labels, 10 * RATE)
    arrays = {name: value.detach().numpy().copy() for name, value in theirs.params.items()}
    folder = save_folder(tmp_path / "theirs", arrays, [v.numpy().copy() for v in theirs.velocities.values()])
    keys = {"model_args": {"hidden": False}, "learning_rate": 10 * RATE, "lr_step": [EPOCH]}
    model, arena, found = start(folder, pretrained_part="whole", **keys)
    assert [entry["error_top1"] for entry in found.record] == [0.9, 0.8, 0.7]
    assert not any("would continue" in note for note in found.notes)
    optimizer = make_optimizer(model, arena, make_config(learning_rate=RATE))
    for _ in range(3):
        before = model.conv1.weight.detach().clone()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        theirs.step(images, labels, RATE)
        ours = model.conv1.weight.detach()
        assert (ours - before).abs().max() > 1e-3  # it moves, so agreement means something
        expected = theirs.params["W_0"].detach().permute(3, 0, 1, 2).flip(2, 3)
        assert torch.allclose(ours, expected, atol=1e-6)
        assert torch.allclose(model.conv2.bias[3:], theirs.params["b1_1"], atol=1e-6)
        assert torch.allclose(model.fc4.weight, theirs.params["W_2"].T, atol=1e-6)


def test_another_learning_rate_is_reported(golden: Path) -> None:
    found = start(golden, pretrained_part="whole", learning_rate=0.5)[2]
    assert any("at a learning rate of 0.01, this run continues at 0.5" in note for note in found.notes)


# -- bad input -----------------------------------------------------------------------------------------------


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def replace(name: str, array: object):
    return lambda folder: np.save(folder / name, array)


def truncate(name: str, n_bytes: int):
    return lambda folder: os.truncate(folder / name, n_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("W1_1_3.npy"), "W1_1_3.npy is missing"),
        (remove("b0_1_3.npy"), "b0_1_3.npy is missing"),
        (remove("b_2_3.npy"), "b_2_3.npy is missing"),
        (replace("W_1_3.npy", np.zeros(3)), "W_1_3.npy does not belong to a layer in two groups"),
        (truncate("W_2_3.npy", 1000), "W_2_3.npy: is not a whole .npy file"),
        (truncate("W_2_3.npy", 0), "W_2_3.npy: is not a whole .npy file"),
        (
            replace("W_2_3.npy", np.zeros((96, 10), int)),
            "W_2_3.npy: holds int64, not float32",
        ),
        (replace("b_2_3.npy", np.zeros((10, 1))), "b_2_3.npy: its shape (10, 1) is not that of biases"),
        (replace("W0_1_3.npy", np.zeros((2, 3, 3, 2), "f4")), "its other half"),
        (
            replace("W_2_3.npy", np.zeros((96, 11), "f4")),
            "mom_6_3.npy: its shape is (96, 10), that of its weights (96, 11)",
        ),
        (replace("W_2_3.npy", np.full((96, 10), np.nan, "f4")), "other values: fc3.weight not finite"),
        (remove("mom_9_3.npy"), "mom_9_3.npy: there is no such file"),
        (replace("mom_4_3.npy", np.zeros((3, 3), "f4")), "mom_4_3.npy: its shape is (3, 3)"),
        (
            replace("mom_0_3.npy", np.full((3, 3, 3, 4), np.inf, "f4")),
            "mom_0_3.npy: holds momenta that are not",
        ),
        (remove("lr_3.npy"), "lr_3.npy: there is no such file"),
        (replace("lr_3.npy", np.float32(0)), "lr_3.npy: is not a learning rate"),
        (replace("lr_3.npy", np.float32(np.nan)), "lr_3.npy: is not a learning rate"),
        (replace("val_record.npy", np.zeros((2, 2))), "val_record.npy: does not hold all of 3 epochs"),
        (replace("val_record.npy", np.zeros(6)), "val_record.npy: holds float64 of shape (6,)"),
    ],
)
def test_a_broken_folder_names_the_file(golden: Path, change, message: str) -> None:
    change(golden)
    with pytest.raises(UserError) as caught:
        start(golden, pretrained_part="whole")
    assert message in str(caught.value)


def test_a_pickle_in_a_npy_file_is_not_run(golden: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    np.save(golden / "W_0_3.npy", np.array([Malicious()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"W_0_3\.npy: is not a whole \.npy file"):
        start(golden)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"n_classes": 9}, "fc4.weight (7, 10), not (9, 10), fc4.bias (7,), not (9,) (new_head: true"),
        ({"model_args": {"groups": 1}}, "conv2.weight (6, 2, 3, 3), not (6, 4, 3, 3)"),
        ({"model_args": {"hidden": False}}, "unexpected: layer_3.weight, layer_3.bias"),
        ({"model": "smallnet"}, "missing: fc5.weight, fc5.bias"),
    ],
)
def test_weights_of_another_network_are_refused_by_name_and_shape(
    golden: Path, words: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        start(golden, **words)
    assert message in str(caught.value)


# -- out and in again ----------------------------------------------------------------------------------------


@st.composite
def networks(draw: st.DrawFn) -> list[LayerArrays]:
    """Convolutions of one or two groups, then fully connected layers, with any numbers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers = []
    for _ in range(draw(st.integers(1, 3))):
        n_groups, n_out, n_in, size = (draw(st.integers(1, most)) for most in (2, 3, 3, 4))
        layers.append(((n_out * n_groups, n_in, size, draw(st.integers(1, 4))), n_groups))
    for _ in range(draw(st.integers(1, 3))):
        layers.append(((draw(st.integers(1, 4)), draw(st.integers(1, 4))), 1))
    return [
        LayerArrays(random.normal(size=s).astype("f4"), random.normal(size=s[0]).astype("f4"), g)
        for s, g in layers
    ]


def assert_same(ours: list[LayerArrays], theirs: list[LayerArrays], relative: float = 0) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.n_groups == other.n_groups
        for a, b in ((one.weight, other.weight), (one.bias, other.bias)):
            assert a.shape == b.shape and (np.abs(a - b) <= relative * np.abs(b)).all()


@settings(max_examples=40)
@given(
    layers=networks(), lib_conv=st.sampled_from(["cudnn", "cudaconvnet"]), rate=st.sampled_from([0.01, 2**-7])
)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, layers: list[LayerArrays], lib_conv: LibConv, rate: float
) -> None:
    """Weights to the bit. Momenta too, unless the rate is no power of two: then within float32's rounding."""
    folder = tmp_path_factory.mktemp("written")
    theano_folder.write(folder, 2, lib_conv, layers, TrainingState(layers, rate, [(0.5, 1.0), (0.25, 0.5)]))
    assert theano_folder.lib_conv_of(folder) == lib_conv
    arrays = theano_folder.read_arrays(folder, 2)
    assert all(array.dtype == np.float32 for layer in arrays for array in layer)
    assert_same(theano_folder.join(arrays, lib_conv), layers)
    progress = theano_folder.read_progress(folder, 2, lib_conv, arrays)
    assert_same(progress.momenta, layers, relative=2**-23 if rate == 0.01 else 0)
    assert progress.errors == [(0.5, 1.0), (0.25, 0.5)]
    assert progress.learning_rate == np.float32(rate)


def test_a_folder_of_theirs_is_written_again_to_the_same_bits(golden: Path, tmp_path: Path) -> None:
    arrays = theano_folder.read_arrays(golden, EPOCH)
    (tmp_path / "ours").mkdir()
    theano_folder.write(tmp_path / "ours", EPOCH, "cudnn", theano_folder.join(arrays, "cudnn"), None)
    for name in ARRAYS:
        file = f"{name}_{EPOCH}.npy"
        assert (golden / file).read_bytes() == (tmp_path / "ours" / file).read_bytes()
    assert yaml.safe_load((tmp_path / "ours" / "config.yaml").read_text())["lib_conv"] == "cudnn"


@pytest.mark.slow
def test_alexnet_has_the_layers_and_momenta_of_theano_alexnet(tmp_path: Path) -> None:
    """The real sizes once: 22 files, with the shapes of its alex_net.py."""
    model = build_model(make_config(model="alexnet"), 1000)
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    layers = [
        LayerArrays(parameters[f"{name}.weight"], parameters[f"{name}.bias"], getattr(module, "groups", 1))
        for name, module in model.named_modules()
        if f"{name}.weight" in parameters
    ]
    theano_folder.write(tmp_path, 65, "cudnn", layers, None)
    shapes = {path.name: np.load(path, mmap_mode="r").shape for path in tmp_path.glob("*.npy")}
    assert len(shapes) == 22
    assert shapes["W_0_65.npy"] == (3, 11, 11, 96) and shapes["W_2_65.npy"] == (256, 3, 3, 384)
    assert shapes["W0_1_65.npy"] == shapes["W1_1_65.npy"] == (48, 5, 5, 128)
    assert shapes["W1_3_65.npy"] == (192, 3, 3, 192) and shapes["W0_4_65.npy"] == (192, 3, 3, 128)
    assert shapes["W_5_65.npy"] == (9216, 4096) and shapes["W_7_65.npy"] == (4096, 1000)
