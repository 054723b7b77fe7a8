"""Stages: their order in networks of several kinds, and the bits and memory of `recompute`."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_config
from small_replicas import make_replica, recorder
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lockstep.comm.messages import Order
from lockstep.errors import UserError
from lockstep.loading import Batch
from lockstep.network.replica import Replica
from lockstep.network.stages import rate_scales, recompute, stages_of


class Blocks(nn.Module):
    """A network of blocks with dropout, norms, and numbers from torch's generator."""

    input_size = 8

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([Block(8, p) for p in (0.2, 0.4, 0.2)])
        self.fc = nn.Linear(8, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(images / 64))
        for block in (*self.blocks, self.blocks[0]):  # the first block is used twice
            x = block(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """A residual block that scales its branch by random numbers."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.Dropout(p),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 0.5 + torch.rand(len(x), 1, 1, 1)
        return x + scale * self.drop(torch.relu(self.norm(self.conv(x))))


def without_values(name: str) -> nn.Module:
    """Return a network of models/ whose tensors have shapes only, which takes no time."""
    with torch.device("meta"):
        model: nn.Module = importlib.import_module(f"models.{name}").Model(7)
    return model


@pytest.mark.slow
def test_stages_follow_the_networks_order() -> None:
    def names(model: str) -> list[tuple[str, ...]]:
        return [stage.prefixes for stage in stages_of(without_values(model))]

    assert names("smallnet") == [("conv1",), ("conv2",), ("conv3",), ("fc4",), ("fc5",)]
    assert names("resnet20")[:2] == [("conv1", "bn1"), ("blocks.0",)] and names("resnet20")[-1] == ("fc",)
    assert len(names("resnet50")) == 1 + 16 + 1
    vgg = names("vgg16")
    assert len(vgg) == 16 and vgg[0] == ("features.0",)  # its layers with weights


def test_equal_blocks_within_an_encoder_are_stages() -> None:
    with torch.device("meta"):
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 4, nn.LayerNorm(8))
        branch = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), nn.Conv2d(8, 8, 1))
        model = nn.Sequential(nn.Linear(8, 8), encoder, nn.ModuleDict({"left": branch}), nn.Linear(8, 7))
    blocks = [("1.layers.0",), ("1.layers.1",), ("1.layers.2",), ("1.layers.3", "1.norm")]
    assert [stage.prefixes for stage in stages_of(model)] == [("0",), *blocks, ("2",), ("3",)]


class ConvNorm(nn.Sequential):
    """A convolution with what follows it, as in torchvision's networks."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU())


def test_a_block_of_equal_chains_is_one_stage() -> None:
    """Such as MobileNetV3's inverted residual without squeeze and excitation."""
    with torch.device("meta"):
        residuals = [nn.ModuleDict({"layers": nn.Sequential(*map(ConvNorm, (8, 8, 8)))}) for _ in range(2)]
        model = nn.Sequential(nn.Conv2d(3, 8, 1), *residuals, nn.Linear(8, 7))
    assert [stage.prefixes for stage in stages_of(model)] == [("0",), ("1",), ("2",), ("3",)]


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "mixer_s16_224"])
def test_layer_decay_of_timms_networks_is_timms(torchvision: Any, name: str) -> None:
    """Apart from the last norm, which timm counts to the head, and this package to the last block."""
    timm = pytest.importorskip("timm")
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name, num_classes=7)
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.75)
    theirs = {names[id(value)]: group["lr_scale"] for group in groups for value in group["params"]}
    ours = rate_scales(model, make_config(layer_decay=0.75))
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if ours[key] != pytest.approx(theirs[key])]
    assert set(different) <= {"norm.weight", "norm.bias"}


def test_every_parameter_belongs_to_one_stage() -> None:
    for name in ("smallnet", "resnet20", "googlenet", "vgg16"):
        model = without_values(name)
        stages = stages_of(model)
        for parameter, _ in model.named_parameters():
            assert sum(stage.holds(parameter) for stage in stages) == 1, parameter


def batch_of(number: int) -> Batch:
    random = torch.Generator().manual_seed(number)
    images = 60 * torch.randn(6, 3, 8, 8, generator=random)
    labels = torch.randint(0, 7, (6,), generator=random)
    return Batch(Order("train", 1, 1, 0, 6, 0, 6), images, labels, torch.arange(6))


def trained(folder: Path, **values: Any) -> Replica:
    replica = make_replica(folder, model="test_stages:Blocks", **values)
    for number in range(3):
        replica.forward_backward(batch_of(number), 6, 0, recorder())
        replica.optimizer.step()
    return replica


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recomputing_gives_the_same_bits(shared_folder: Path, precision: str) -> None:
    """Weights, momenta and running statistics: with dropout, a block used twice, and random numbers."""
    plain, recomputed = (
        trained(shared_folder, precision=precision, recompute=each) for each in (False, True)
    )
    for name, tensor in plain.arena.state().items():
        assert torch.equal(tensor, recomputed.arena.state()[name]), name
    assert "3 blocks" in recomputed.implementations["recompute"]


def test_statistics_that_count_twice_would_show(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: without their copies a recomputed pass moves the running statistics again."""
    monkeypatch.setattr("lockstep.network.stages._copies", lambda _: [])
    plain, recomputed = (trained(shared_folder, recompute=each) for each in (False, True))
    name = "buffers/blocks.0.norm.running_mean"
    assert not torch.equal(plain.arena.state()[name], recomputed.arena.state()[name])


class Spectral(nn.Module):
    """A block whose result depends on buffers that each pass changes: those of a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.normed, self.linear = spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.linear(torch.tanh(self.normed(x)))
        return y


def test_recomputing_begins_with_the_buffers_of_the_first_pass() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, 8), Spectral(), Spectral()), torch.randn(4, 8)
    recomputed = copy.deepcopy(plain)
    assert recompute(recomputed, "spectral") == 2
    for network in (plain, recomputed):
        network(x).square().sum().backward()
    for ours, theirs in zip(recomputed.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)
    for buffer, other in zip(recomputed.buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other)


def saved_bytes(folder: Path, recompute: bool) -> int:
    """Return the bytes that autograd keeps between the forward and the backward pass."""
    replica, kept = make_replica(folder, model="test_stages:Blocks", recompute=recompute), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        replica._learn_batch(batch_of(0), 6, 0, recorder())
    return sum(kept.values())


def test_recomputing_keeps_less(shared_folder: Path) -> None:
    weights = sum(
        value.nbytes for value in make_replica(shared_folder, model="test_stages:Blocks").model.parameters()
    )
    plain, recomputed = (saved_bytes(shared_folder, each) - weights for each in (False, True))
    assert recomputed < 0.5 * plain


def test_a_network_without_blocks_is_refused(shared_folder: Path) -> None:
    with pytest.raises(UserError, match=r"recompute: model small_replicas:TwoHeads has no blocks"):
        make_replica(shared_folder, recompute=True)
