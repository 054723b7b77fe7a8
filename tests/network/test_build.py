"""Networks that are made without random initial weights, because a memory checkpoint's are loaded next."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_config
from torch import nn

from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.memory.host import HostMemory
from lockstep.network.build import build_model, make_without_draws
from lockstep.network.replica import Replica


class Plain(nn.Module):
    """Layers of each kind whose initial values are drawn; nothing else depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        nn.init.kaiming_normal_(self.fc.weight)
        nn.init.xavier_uniform_(self.conv.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.norm(self.conv(images)).mean((2, 3)))
        return logits


class DrawsForItself(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.directions = torch.randn(5)


class DrawsABuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.zeros(5).normal_())


class KeepsItsBeginning(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.beginning = [parameter.detach().clone() for parameter in self.parameters()]


class AveragesItsBeginning(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.cat([self.fc.weight, self.fc.weight]).sum().item()


class ScalesByItsBeginning(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.fc.weight.norm().item()


class ComputesAConstant(Plain):
    norm_of_weights: torch.Tensor | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.norm_of_weights is None:
            self.norm_of_weights = self.fc.weight.detach().norm()
        return super().forward(images) / self.norm_of_weights


class FillsACache(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.cache.setdefault("norm", self.fc.weight.detach().norm())
        return super().forward(images)


class AddsALayerLater(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(2)  # type: ignore[assignment]


class RefusesToBeMade(Plain):
    def __init__(self) -> None:
        super().__init__()
        raise ValueError("no such variant")


def try_out(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(2, 3, 8, 8))
    model.train()


def names_of(make: Callable[[], nn.Module]) -> set[str]:
    model = make()
    try_out(model)
    return {f"weights/{name}" for name, _ in model.named_parameters()} | {
        f"buffers/{name}" for name, _ in model.named_buffers()
    }


def test_nothing_is_drawn_for_weights_and_the_rest_is_the_same() -> None:
    names = names_of(Plain)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = make_without_draws(Plain, try_out, names)
    assert found is not None and torch.equal(torch.get_rng_state(), before)
    whole = Plain()
    assert [tuple(each.shape) for each in found.parameters()] == [
        tuple(each.shape) for each in whole.parameters()
    ]
    assert all(torch.equal(a, b) for a, b in zip(found.buffers(), whole.buffers(), strict=True))


@pytest.mark.parametrize(
    "make",
    [
        DrawsForItself,
        DrawsABuffer,
        KeepsItsBeginning,
        AveragesItsBeginning,
        ScalesByItsBeginning,
        ComputesAConstant,
        FillsACache,
        AddsALayerLater,
    ],
)
def test_what_depends_on_initial_weights_is_made_in_full(make: Callable[[], nn.Module]) -> None:
    names = names_of(make)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert make_without_draws(make, try_out, names) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_other_names_and_errors_are_left_to_the_full_construction() -> None:
    assert make_without_draws(Plain, try_out, names_of(Plain) | {"weights/other"}) is None
    assert make_without_draws(RefusesToBeMade, try_out, names_of(Plain)) is None


class Tied(nn.Module):
    """Two fully connected layers, and what the subclass does to their weights."""

    input_size = 8

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, 192, bias=False), nn.Linear(192, n_classes)
        self.third = nn.Linear(192, 192, bias=False)
        self.tie()

    def tie(self) -> None:
        """Have both layers use one parameter."""
        self.third.weight = self.first.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.second(self.third(torch.tanh(self.first(images.flatten(1)))))
        return logits


class Transposed(Tied):
    def tie(self) -> None:
        self.third.weight.data = self.first.weight.data.t()


class HasAView(Tied):
    def tie(self) -> None:
        self.register_buffer("row", self.first.weight.data[1])


class Halves(Tied):
    """Two parameters in columns of one tensor, and buffers that are the same."""

    def tie(self) -> None:
        both = torch.randn(192, 384)
        self.first.weight.data, self.third.weight.data = both[:, :192], both[:, 192:]
        self.register_buffer("ones", torch.ones(1).expand(4))
        self.register_buffer("more", self.ones[1:])


class Sparse(Tied):
    def tie(self) -> None:
        self.words = nn.Embedding(7, 192, sparse=True)


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(UserError, match=r"words has sparse gradients"):
        build_model(make_config(model="test_build:Sparse"), 7)


def test_parameters_in_the_same_memory_are_refused() -> None:
    """Each gets memory of its own, so they would not be equal any more."""
    for network in (Transposed, HasAView):
        with pytest.raises(UserError, match=r"has the memory of first\.weight"):
            build_model(make_config(model=f"test_build:{network.__name__}"), 7)
    for network in (Tied, Halves):
        build_model(make_config(model=f"test_build:{network.__name__}"), 7)


@pytest.mark.parametrize("model", ["smallnet", "resnet20", "alexnet"])
def test_networks_that_come_with_lockstep_need_no_random_weights(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[nn.Module | None] = []

    def spy(*arguments: Any) -> nn.Module | None:
        found.append(make_without_draws(*arguments))
        return found[-1]

    config = make_config(model=model, n_classes=10, n_channels=3)
    whole = build_model(config, 10)
    names = {f"weights/{name}" for name, _ in whole.named_parameters()}
    names |= {f"buffers/{name}" for name, _ in whole.named_buffers()}
    monkeypatch.setattr("lockstep.network.build.make_without_draws", spy)
    fast = build_model(config, 10, names)
    assert found == [fast]
    assert [each.stride() for each in fast.parameters()] == [each.stride() for each in whole.parameters()]


def test_a_replica_that_loads_a_checkpoint_has_its_bits(shared_folder: Path) -> None:
    config = make_config(data_folder=str(shared_folder), devices=["cpu"], n_classes=7)
    dataset = open_dataset(config)
    first = Replica(config, dataset, HostMemory())
    tensors = {name: value.clone() for name, value in first.arena.state().items()}
    second = Replica(config, dataset, HostMemory(), tensors)
    second.load(tensors, "the checkpoint")
    assert first.arena.digests() == second.arena.digests()
    assert all(torch.equal(value, second.arena.state()[name]) for name, value in tensors.items())
