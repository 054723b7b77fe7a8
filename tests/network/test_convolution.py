"""Other forms of convolutions: values and gradients of the plain form in float64, odd sizes, training."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_config
from small_replicas import make_batch, recorder
from torch import nn

from lockstep.data.dataset import open_dataset
from lockstep.loading.slots import BlockLayout
from lockstep.memory.host import HostMemory
from lockstep.network import convolution
from lockstep.network.convolution import blocks_for
from lockstep.network.replica import Replica

# channels, outputs, size of the window; stride, padding, groups; rows and columns of the input
LAYERS: list[tuple[tuple[int, int, Any], dict[str, Any], tuple[int, int]]] = [
    ((3, 8, 11), {"stride": 4}, (27, 35)),
    ((3, 8, 7), {"stride": 2, "padding": 3}, (23, 16)),
    ((1, 4, 3), {"stride": 3, "padding": 1, "bias": False}, (10, 11)),
    ((4, 6, 5), {"stride": 4, "padding": (2, 0)}, (9, 22)),
    ((3, 4, 4), {"stride": 4, "bias": False}, (19, 17)),
    ((6, 8, 5), {"padding": 2, "groups": 2}, (7, 9)),
    ((12, 8, 3), {"stride": 2, "groups": 4, "dilation": 2}, (11, 12)),
    ((6, 9, (3, 1)), {"padding": "same", "groups": 3}, (5, 6)),
]


def run(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return values, and gradients of input and weights."""
    x = x.clone().requires_grad_()
    y = layer(x)
    random = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=random, dtype=torch.float64).to(y.dtype))
    assert x.grad is not None
    gradients = [value.grad for value in layer.parameters() if value.grad is not None]
    return [tensor.detach().double() for tensor in (y, x.grad, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sizes", "options", "shape"), LAYERS, ids=str)
def test_every_form_is_the_plain_convolution(
    sizes: tuple[int, int, Any], options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    plain = nn.Conv2d(*sizes, **options).double()
    x = torch.randn(3, sizes[0], *shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    low = nn.Conv2d(*sizes, **options).to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    low.load_state_dict(plain.state_dict())
    plain.load_state_dict(low.state_dict())
    x = x.to(dtype).double()
    expected = run(plain, x)
    convolution.install(low, make_config(conv_layout="all"))
    assert type(low) is convolution.Convolution
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for found, wanted in zip(run(low, x.to(dtype)), expected, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= bound * wanted.abs().max()


def test_a_form_is_taken_where_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("_stack_weight", "_fill"):
        way = getattr(convolution, name)
        monkeypatch.setattr(convolution, name, lambda *a, way=way, name=name: taken.append(name) or way(*a))
    for form, expected in (
        ("plain", []),
        ("space_to_depth", ["_stack_weight"]),
        ("dense", ["_fill"]),
        ("all", ["_stack_weight", "_fill"]),
    ):
        layers = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3, 2, groups=8)
        model = nn.Sequential(*layers, nn.Conv2d(8, 4, 1))
        convolution.install(model, make_config(conv_layout=form))
        taken.clear()
        model(torch.randn(2, 3, 21, 21))
        assert taken == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_the_same_to_rounding_and_weights_keep_their_form(
    shared_folder: Path, precision: str
) -> None:
    found = []
    for form in ("plain", "all"):
        keys = {"model": "small_networks:GroupedNet", "data_folder": str(shared_folder), "batch_size": 8}
        config = make_config(**keys, precision=precision, conv_layout=form)
        replica = Replica(config, open_dataset(config), HostMemory())
        replica.begin_epoch(1, 90, 0.05)
        for number in range(3):
            replica.forward_backward(make_batch(number, 8), 8, 0, recorder())
            replica.optimizer.step()
        found.append(replica.arena.state())
    bound = 1e-5 if precision == "fp32" else 2e-2
    for name, plain in found[0].items():
        other = found[1][name]
        assert other.shape == plain.shape and other.stride() == plain.stride()
        assert (other - plain).double().norm() <= bound * (plain.double().norm() + 1e-3), name


class Looking(nn.Sequential):
    """A network that may do more with images than convolve them: `also`."""

    def __init__(self, also: str = "") -> None:
        super().__init__(
            nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Flatten(), nn.LazyLinear(5)
        )
        self.also = also

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = pictures + 1 if self.also == "changes them" else pictures
        logits: torch.Tensor = super().forward(x)
        if self.also == "adds their mean":
            logits = logits + pictures.mean((1, 2, 3))[:, None]
        if self.also == "adds red":
            logits = logits + pictures[:, :1, :5, 0].flatten(1)
        return logits


def blocks_of(model: nn.Module, size: int, form: str = "space_to_depth") -> tuple[BlockLayout | None, str]:
    model.eval()(torch.zeros(1, 3, size, size))
    model.train()
    convolution.install(model, make_config(conv_layout=form))
    found = blocks_for(model, size, torch.zeros(()))
    assert model.training and not any(module._forward_pre_hooks for module in model.modules())
    return found


def test_a_network_is_given_blocks_where_only_its_first_convolution_sees_its_pictures() -> None:
    torch.manual_seed(3)
    assert blocks_of(Looking(), 21) == (BlockLayout(2, 3, 14), "")
    alexnets = nn.Sequential(nn.Conv2d(3, 4, 11, 4), nn.Flatten(), nn.LazyLinear(2))
    assert blocks_of(alexnets, 227) == (BlockLayout(4, 0, 57), "")
    for also in ("adds their mean", "adds red"):
        assert blocks_of(Looking(also), 21) == (
            None,
            "the network does more with its images than convolve them",
        )
    others = [
        Looking("changes them"),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, 2)),
        nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 4, 2)),
    ]
    for model in others:
        assert blocks_of(model, 21) == (
            None,
            "no single convolution by space-to-depth takes the images as they come",
        )
    assert blocks_of(Looking(), 21, "dense")[0] is None
    for odd in (nn.Conv2d(3, 4, 5, 3), nn.Conv2d(3, 4, 5, 4, (2, 0))):
        assert blocks_of(nn.Sequential(odd), 21)[1].startswith("the kernel makes blocks of 2 or 4 pixels")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "options", "shape"), [each for each in LAYERS if "stride" in each[1]][:3], ids=str
)
def test_pictures_in_blocks_give_what_they_themselves_give(
    sizes: tuple[int, int, Any], options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(4)
    layer = nn.Conv2d(*sizes, **options).to(dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    convolution.install(layer, make_config(conv_layout="space_to_depth"))
    assert isinstance(layer, convolution.Convolution)
    x = torch.randn(3, sizes[0], *shape).to(dtype)
    found = []
    for given in (x, layer.stack(x)):
        layer.zero_grad()
        y = layer(given)
        y.backward(torch.ones_like(y))
        found.append([y.detach(), *(value.grad for value in layer.parameters() if value.grad is not None)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("keys", [{}, {"precision": "bf16"}, {"scale": [0.5, 0.25, 2.0]}], ids=str)
def test_a_replica_learns_from_blocks_what_it_learns_from_pictures(
    shared_folder: Path, keys: dict[str, Any]
) -> None:
    found = []
    for in_blocks in (False, True):
        config = make_config(
            model="small_networks:GroupedNet",
            data_folder=str(shared_folder),
            conv_layout="all",
            batch_size=8,
            **keys,
        )
        replica = Replica(config, open_dataset(config), HostMemory())
        blocks, _ = blocks_for(replica.model, replica.crop_size[0], replica.arena.flat)
        assert blocks == BlockLayout(2, 0, 4)
        replica.begin_epoch(1, 90, 0.05)
        batch = make_batch(1, 8)
        if in_blocks:
            images = replica.model.conv1.stack(batch.images)  # type: ignore[operator,union-attr]
            batch = dataclasses.replace(batch, images=images)
        replica.forward_backward(batch, 8, 0, recorder())
        replica.optimizer.step()
        found.append({**replica.arena.state(), "errors": replica.count_errors(batch)})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
