"""The networks: published sizes, initialisation and formulas, compared with torchvision's."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, make_config
from torch import nn

from lockstep.network.build import build_model
from models import alexnet


def make(name: str, n_classes: int = 1000, **args: Any) -> Any:
    return importlib.import_module(f"models.{name}").Model(n_classes, **args)


def on_paper(name: str, n_classes: int = 1000, **args: Any) -> Any:
    """Return the model on torch's meta device: shapes without memory."""
    with torch.device("meta"):
        return make(name, n_classes, **args)


MODELS = sorted(path.stem for path in (ROOT / "models").glob("[!_]*.py"))
LARGE = {"vgg16", "resnet50", "googlenet"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in MODELS]
)
def test_every_model_keeps_the_contract(name: str) -> None:
    """build_model checks the logits in evaluation mode only."""
    model = build_model(make_config(model=name), 6)
    images = 50 * torch.randn(2, 3, model.input_size, model.input_size)
    outputs = model(images.to(memory_format=torch.channels_last))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert len(outputs) == 1 + len(getattr(model, "aux_weights", ()))
    assert all(logits.shape == (2, 6) and logits.isfinite().all() for logits in outputs)
    sum(logits.sum() for logits in outputs).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "n_classes", "args", "n_parameters"),
    [
        ("alexnet", 1000, {}, 60_965_224),
        ("alexnet", 1000, {"variant": "caffe"}, 60_965_224),
        ("alexnet", 1000, {"groups": 1}, 62_378_344),
        ("googlenet", 1000, {}, 13_378_280),
        ("vgg16", 1000, {}, 138_357_544),
        ("vgg16", 1000, {"batch_norm": True}, 138_365_992),
        ("resnet50", 1000, {}, 25_557_032),
        ("resnet20", 10, {}, 269_722),
        ("resnet20", 10, {"n": 9}, 853_018),  # ResNet-56; "0.85M" in table 6
    ],
)
def test_networks_have_the_published_numbers_of_parameters(
    name: str, n_classes: int, args: dict[str, Any], n_parameters: int
) -> None:
    model = on_paper(name, n_classes, **args)
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters


def test_googlenet_without_its_heads_is_the_one_that_answers() -> None:
    model = on_paper("googlenet")
    own = sum(value.numel() for name, value in model.named_parameters() if not name.startswith("aux"))
    assert own == 6_998_552
    first = [value.numel() for name, value in model.inception3a.named_parameters() if name.endswith("weight")]
    assert sum(first) // 1024 == 159  # "159K" in table 1


@pytest.mark.parametrize(
    ("ours", "args", "theirs"),
    [
        ("resnet50", {}, "resnet50"),
        ("vgg16", {}, "vgg16"),
        ("vgg16", {"batch_norm": True}, "vgg16_bn"),
    ],
)
def test_parameters_are_named_as_torchvisions(
    torchvision: Any, ours: str, args: dict[str, Any], theirs: str
) -> None:
    with torch.device("meta"):
        other = torchvision.models.get_model(theirs)
    expected = {name: value.shape for name, value in other.state_dict().items()}
    assert {name: value.shape for name, value in on_paper(ours, **args).state_dict().items()} == expected


def test_resnet50_computes_what_torchvisions_does(torchvision: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = make("resnet50", 10).eval(), torchvision.models.resnet50(num_classes=10).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        assert torch.allclose(ours(images), theirs(images), atol=1e-5)


def test_initial_weights_follow_the_seed() -> None:
    first, again, other = (build_model(make_config(seed=seed), 6) for seed in (1, 1, 2))
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(
    ("variant", "fc_std", "biases"),
    [
        ("published", 0.01, [0, 1, 0, 1, 1, 1, 1, 0]),
        ("caffe", 0.005, [0, 1, 0, 1, 1, 1, 1, 0]),
        ("theano_alexnet", 0.005, [0, 0.1, 0, 0.1, 0, 0.1, 0.1, 0]),
    ],
)
def test_alexnet_has_the_sizes_and_the_initialisation_of_its_variant(
    variant: str, fc_std: float, biases: list[float]
) -> None:
    model = alexnet.Model(1000, variant)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")}
    assert shapes["conv1.weight"] == (96, 3, 11, 11)
    assert shapes["conv2.weight"] == (256, 48, 5, 5)
    assert shapes["conv4.weight"] == (384, 192, 3, 3)
    assert shapes["fc6.weight"] == (4096, 9216)
    assert model.conv2.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert model.fc6.weight.std().item() == pytest.approx(fc_std, rel=0.01)
    found = [p.unique().tolist() for name, p in model.named_parameters() if name.endswith("bias")]
    assert found == [[pytest.approx(value)] for value in biases]
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 2


def test_alexnets_variants_normalise_and_pool_in_their_order() -> None:
    """torch's normalisation divides alpha by n, as Caffe's does."""
    x = 100 * torch.randn(2, 6, 9, 9).relu()
    pool = nn.MaxPool2d(3, 2)
    papers, caffes = nn.LocalResponseNorm(5, 5e-4, 0.75, 2.0), nn.LocalResponseNorm(5, 1e-4, 0.75, 1.0)
    expected = {
        "published": pool(papers(x)),
        "theano_alexnet": papers(pool(x)),
        "caffe": caffes(pool(x)),
    }
    for variant, result in expected.items():
        model = on_paper("alexnet", 10, variant=variant)
        assert torch.allclose(model._norm_and_pool(nn.Identity(), x), result, rtol=1e-5), variant
    model = on_paper("alexnet", 10, variant="caffe", order="norm-pool", n=3, k=3.0, alpha=1e-3, beta=0.5)
    assert torch.allclose(
        model._norm_and_pool(nn.Identity(), x), pool(nn.LocalResponseNorm(3, 1e-3, 0.5, 3.0)(x)), rtol=1e-5
    )


@pytest.mark.parametrize("args", [{"variant": "x"}, {"order": "x"}, {"groups": 3}, {"n": 4}, {"size": 1}])
def test_alexnet_refuses_options_that_there_are_not(args: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=next(iter(args))):
        on_paper("alexnet", 10, **args)


def test_normalisation_is_the_papers_formula() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3, 4, dtype=torch.float64) * 50
    expected = torch.empty_like(x)
    for channel in range(7):
        neighbours = x[:, max(0, channel - 2) : channel + 3]
        expected[:, channel] = x[:, channel] / (2 + 1e-4 * neighbours.square().sum(1)) ** 0.75
    assert torch.allclose(alexnet.LocalResponseNorm()(x), expected, rtol=1e-12)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_normalisation_in_bf16_is_float32_inside(autocast: bool, grad: bool) -> None:
    """Only the result is rounded to bfloat16, as on a GPU; sums and powers are float32."""
    torch.manual_seed(0)
    x = (torch.randn(2, 16, 5, 5) * 100).bfloat16()
    exact, ours = x.double().requires_grad_(grad), x.clone().requires_grad_(grad)
    norm, error = alexnet.LocalResponseNorm(alpha=1e-3), torch.randn(2, 16, 5, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = norm(ours)
    assert y.dtype == torch.bfloat16
    expected = norm(exact)
    assert (y == expected.bfloat16()).float().mean() > 0.99
    if grad:
        y.backward(error)
        expected.backward(error.double())
        assert (ours.grad.double() - exact.grad).norm() <= 2e-3 * exact.grad.norm()


@pytest.mark.parametrize("zero", [True, False])
def test_resnet50_starts_as_its_shortcuts_where_asked(zero: bool) -> None:
    model = make("resnet50", 10, zero_init_residual=zero)
    gains = torch.cat([value for name, value in model.named_parameters() if name.endswith("bn3.weight")])
    assert gains.eq(0.0 if zero else 1.0).all() and len(gains) == 4 * (3 * 64 + 4 * 128 + 6 * 256 + 3 * 512)
    assert model.layer2[0].conv1.stride == (1, 1) and model.layer2[0].conv2.stride == (2, 2)  # v1.5
    assert model.conv1.weight.std().item() == pytest.approx((2 / (64 * 49)) ** 0.5, rel=0.05)


@pytest.mark.slow
def test_the_documents_table_is_the_commands() -> None:
    command = [sys.executable, "-m", "models"]
    table = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert table in Path(ROOT / "docs" / "models.md").read_text()
