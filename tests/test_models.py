"""The networks: published sizes, the paper's normalisation, and that they learn."""

import pytest
import torch
from conftest import ROOT, make_config
from torch import nn

from lockstep.network import build_model
from models import alexnet


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "models").glob("[!_]*.py")))
def test_every_model_keeps_the_contract(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(make_config(model=name), 6)
    images = torch.randn(2, 3, model.input_size, model.input_size).to(memory_format=torch.channels_last)
    logits = model(images)
    assert logits.shape == (2, 6) and logits.isfinite().all()
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_initial_weights_follow_the_seed() -> None:
    first, again, other = (build_model(make_config(seed=seed), 6) for seed in (1, 1, 2))
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_alexnet_has_the_published_sizes_and_initialisation() -> None:
    model = alexnet.Model(1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 60_965_224
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert shapes["conv1.weight"] == (96, 3, 11, 11)
    assert shapes["conv2.weight"] == (256, 48, 5, 5)
    assert shapes["conv4.weight"] == (384, 192, 3, 3)
    assert shapes["fc6.weight"] == (4096, 9216)
    assert model.fc6.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert model.conv4.bias.eq(1).all() and model.conv3.bias.eq(0).all()
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 2


def test_normalisation_is_the_papers_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3, 4, dtype=torch.float64) * 50
    expected = torch.empty_like(x)
    for channel in range(7):
        neighbours = x[:, max(0, channel - 2) : channel + 3]
        expected[:, channel] = x[:, channel] / (2 + 1e-4 * neighbours.square().sum(1)) ** 0.75
    assert torch.allclose(alexnet.LocalResponseNorm()(x), expected, rtol=1e-12)
