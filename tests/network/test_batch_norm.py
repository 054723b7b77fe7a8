"""sync_batch_norm: batch normalisation with the statistics of all trainers' images."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, make_config, make_folder
from small_networks import TwoHeads
from torch import nn
from training_runs import SMOOTH, assert_same, relative_difference, train

from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.memory.host import HostMemory
from lockstep.network import batch_norm
from lockstep.network.batch_norm import check_shares, install, widest
from lockstep.network.build import build_model
from lockstep.network.replica import Replica


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of 37 images, as in tests/sync/test_rules.py."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


NORMS = {
    "weights": {"rule": "weights", "learning_rate": 0.01},
    "adamw": {"optimizer": "adamw", "clip_norm": 0.5},
    "accumulated": {"rule": "gradients", "accumulate": 2, "learning_rate": 0.01},
    "residual": {"model": "resnet20", "model_args": {"n": 1}, "learning_rate": 0.003, "n_epochs": 1},
}


SLOW = {"accumulated", "residual"}


@pytest.mark.parametrize(
    "values",
    [pytest.param(NORMS[name], marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in NORMS],
)
def test_batch_normalisation_over_all_is_exact(data: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """Weights, optimizer state, averages and statistics agree, with uneven shares too."""
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True, **values}
    one = train(1, data, tmp_path / "1", **keys)
    for n_trainers in (2, 3, 4):
        several = train(n_trainers, data, tmp_path / str(n_trainers), **keys)
        assert relative_difference(several, one) <= 1e-12
        for name in (name for name in one if name.startswith("buffers/")):
            assert np.abs(several[name] - one[name]).max() <= 1e-12 * np.abs(one[name]).max(), name


def test_batch_normalisation_over_all_has_trainers_without_pictures(tmp_path: Path) -> None:
    """An epoch of 9 images leaves a step of one image for four trainers."""
    data = make_folder(tmp_path / "set", n_train=9, n_val=3)
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True}
    one, four = (train(n, data, tmp_path / str(n), **keys) for n in (1, 4))
    assert relative_difference(four, one) <= 1e-12


class Standardizing(TwoHeads):
    """It divides each image by its own deviation."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes, norm=True)

    def forward(self, images: torch.Tensor) -> Any:
        return super().forward(images / images.std((1, 2, 3), keepdim=True))


def test_an_image_that_counts_for_nothing_does_so_in_every_network(tmp_path: Path) -> None:
    data = make_folder(tmp_path / "set", n_train=9, n_val=3)
    keys = {**SMOOTH, "model": "test_batch_norm:Standardizing", "sync_batch_norm": True}
    one, two = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2))
    assert relative_difference(two, one) <= 1e-12


@pytest.mark.slow
def test_batch_normalisation_over_all_in_lower_precision(data: Path, tmp_path: Path) -> None:
    keys = {**SMOOTH, "model_args": {"norm": True}, "sync_batch_norm": True, "double": False}
    one, three = (train(n, data, tmp_path / str(n), **keys) for n in (1, 3))
    assert relative_difference(three, one) <= 1e-6
    one, three = (train(n, data, tmp_path / f"bf16 {n}", **keys, precision="bf16") for n in (1, 3))
    assert relative_difference(three, one) <= 0.05


@pytest.mark.parametrize("rule", ["weights", "gradients"])
def test_layers_take_their_images_by_keyword(rule: str, data: Path, tmp_path: Path) -> None:
    """The layers that Lockstep puts in the place of torch's have the same argument."""
    keys = {"model_args": {"norm": True}, "sync_batch_norm": True, "conv_layout": "all", "rule": rule}
    named, other = (
        train(2, data, tmp_path / name, model=f"small_networks:{name}", n_epochs=1, **keys)
        for name in ("Keyworded", "TwoHeads")
    )
    assert_same(named, other)


class Norms(TwoHeads):
    """With a kind of batch normalisation that has a forward pass of its own."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.norm = type("TheirNorm", (nn.BatchNorm2d,), {})(8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smallnet", "sync_batch_norm: this network has no batch normalisation"),
        (
            "test_batch_norm:Norms",
            "sync_batch_norm: norm is a test_batch_norm.TheirNorm, and only torch's own",
        ),
    ],
)
def test_batch_normalisation_that_cant_be_over_all_is_named(data: Path, model: str, message: str) -> None:
    config = make_config(model=model, data_folder=str(data), sync_batch_norm=True)
    with pytest.raises(UserError, match=message):
        widest(build_model(config, 7))


FLAT = """
from torch import nn

class Net(nn.Module):
    input_size = 32

    def __init__(self, n_classes):
        super().__init__()
        layers = nn.Flatten(), nn.Linear(3072, 8), nn.BatchNorm1d(8), nn.Linear(8, n_classes)
        self.layers = nn.Sequential(*layers)

    def forward(self, images):
        return self.layers(images)
"""


@pytest.mark.slow
def test_a_single_image_for_batch_normalisation_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 35 images, 16 a step, the last 3 are shares of 2 and 1, which used to end the run at step 3."""
    program = Program(make_folder(tmp_path / "set", n_train=35, n_val=9), tmp_path)
    (tmp_path / "flat.py").write_text(FLAT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    words = ("model=flat:Net", "n_epochs=1")
    refused = program.run(*words, code=2, name="two")
    assert "model flat:Net: its layers.2 can't normalise a single image" in refused.last_line()
    assert "of 35 training images a minibatch of 3 is left for 2 trainers" in refused.last_line()
    assert "set sync_batch_norm: true, which" in refused.last_line() and "Traceback" not in refused.output()
    assert "epoch 1 step 1" not in refused.output()
    program.run(*words, "sync_batch_norm=true", name="over_all")
    refused = program.run(*words, "sync_batch_norm=true", "batch_size=17", code=2, name="one_over_all")
    assert "of 35 training images a minibatch of 1 is left for all trainers" in refused.last_line()
    program.run(*words, "batch_size=16", name="one", devices="[cpu]")


@pytest.mark.parametrize(
    ("n_train", "values", "refused"),
    [
        (35, {"batch_size": 8}, True),
        (36, {"batch_size": 8}, False),
        (32, {"batch_size": 8}, False),
        (34, {"batch_size": 8}, True),  # one each
        (33, {"batch_size": 8}, True),
        (34, {"batch_size": 8, "sync_batch_norm": True}, False),
        (33, {"batch_size": 8, "sync_batch_norm": True}, True),  # a variance of 0 for all, not an unknown one
        (33, {"batch_size": 16, "devices": ["cpu"]}, True),
        (34, {"batch_size": 16, "devices": ["cpu"]}, False),
        (64, {"batch_size": 1}, True),
        (64, {"global_batch_size": 8, "logical_ranks": 8}, True),
        (64, {"global_batch_size": 16, "logical_ranks": 8}, False),
    ],
)
def test_shares_of_one_image(n_train: int, values: dict[str, Any], refused: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)).train()
    config = make_config(**{"devices": ["cpu", "cpu"], **values})
    with pytest.raises(UserError, match="single image") if refused else nullcontext():
        check_shares(model, config, torch.zeros(1, 3, 2, 2), [n_train])
    assert model.training and not model[1]._forward_pre_hooks
    check_shares(nn.Sequential(nn.BatchNorm2d(3)).train(), config, torch.zeros(1, 3, 2, 2), [n_train])


class NormInAHead(TwoHeads):
    """A network of which training alone computes the layer with one value per channel. It counts calls."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.aux = nn.Sequential(nn.Linear(512, 4), nn.BatchNorm1d(4), nn.Linear(4, n_classes))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: torch.Tensor) -> Any:
        self.calls += self.training
        return super().forward(images)


def test_a_share_of_one_image_is_refused_for_an_auxiliary_head_too() -> None:
    model, config = NormInAHead(7).train(), make_config(batch_size=8)
    with pytest.raises(UserError, match=r"its aux\.1 can't normalise a single image"):
        check_shares(model, config, torch.zeros(1, 3, 32, 32), [33])
    assert all(module.training for module in model.modules()) and model.calls == 0


@pytest.mark.parametrize(
    ("position", "n_epochs", "lengths"), [(0, 1, [57]), (24, 1, [33]), (24, 2, [33, 57]), (0, 2, [57, 57])]
)
def test_what_is_left_of_an_epoch_is_checked_after_a_resume_too(
    position: int, n_epochs: int, lengths: list[int], shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 57 images' batches of 16 has 9; after 24 that were in batches of 24 it has one."""
    keys = {"model": "small_replicas:TwoHeads", "data_folder": str(shared_folder), "batch_size": 16}
    config, found = make_config(n_epochs=n_epochs, **keys), list[list[int]]()
    replica = Replica(config, open_dataset(config), HostMemory())
    monkeypatch.setattr(batch_norm, "check_shares", lambda *arguments: found.append(arguments[-1]))
    replica.begin_epoch(1, 57, 0.1, position)
    assert found == [lengths]
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12)).train()
    with pytest.raises(UserError, match="of 33 training images a minibatch of 1 is left for a trainer"):
        check_shares(model, config, torch.zeros(1, 3, 2, 2), [33, 57])
    check_shares(model, config, torch.zeros(1, 3, 2, 2), [57, 57])


@pytest.mark.parametrize("affine", [True, False])
def test_a_large_mean_error_does_not_take_the_rest_with_it_in_bf16(affine: bool) -> None:
    torch.manual_seed(0)
    x, error = torch.randn(64, 4, 8, 8), 30 + torch.randn(64, 4, 8, 8)
    x, error = x.bfloat16(), error.bfloat16()
    ours, theirs = nn.BatchNorm2d(4, affine=affine), nn.BatchNorm2d(4, affine=affine).double()
    single = SimpleNamespace(counted=True, all_gather=lambda row, point: row[None])
    install(nn.Sequential(ours), single)  # type: ignore[arg-type]
    gradients = []
    for layer, images in ((ours, x.clone()), (theirs, x.double())):
        images.requires_grad_()
        layer(images).backward(error.to(images.dtype))
        gradients.append(images.grad)
    assert gradients[0].dtype == torch.bfloat16
    difference = (gradients[0].double() - gradients[1]).norm() / gradients[1].norm()
    assert difference < 4e-3  # 5e-2 where the mean was taken off after rounding


@pytest.mark.slow
def test_batch_normalisation_by_trainer_is_not_exact(data: Path, tmp_path: Path) -> None:
    """Without synchronized statistics the comparison of the tests above fails."""
    keys = {**SMOOTH, "model_args": {"norm": True}}
    one, two = (train(n, data, tmp_path / str(n), **keys) for n in (1, 2))
    assert relative_difference(two, one) > 1e-3
