"""Gradients in the shared block are those of torch, whatever a network does with its linear layers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_replicas import TwoHeads, make_batch, make_replica, recorder
from torch import nn
from torch.nn.utils import prune

from lockstep.comm.group import Group
from lockstep.exchange.host import HostTransport
from lockstep.sync.factory import make_rule

GRADIENTS = {"rule": "gradients", "devices": ["cpu", "cpu"]}


class OneHead(TwoHeads):
    """A network whose features are also its own fully connected layer's inputs."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        del self.aux

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(images)).flatten(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(self.features(images))


class Adversarial(OneHead):
    """It moves its images along their gradient, as in adversarial training."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            images = images.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(images).square().sum(), images)
            images = (images + 0.5 * slope.sign()).detach()
        return super().forward(images)


class Attacked(OneHead):
    """It does the same by whole backward passes, and clears their gradients, but for one."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for clears in (True, False) if torch.is_grad_enabled() else ():
            images = images.detach().requires_grad_()
            super().forward(images).square().sum().backward()
            images = (images + 0.5 * images.grad.sign()).detach()
            if clears:
                self.zero_grad()
        return super().forward(images)


class Penalized(OneHead):
    """Its outputs depend on their own gradient."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(images)
        images = images.detach().requires_grad_()
        logits = super().forward(images)
        (slope,) = torch.autograd.grad(logits.square().sum(), images, create_graph=True)
        return logits + 100 * slope.square().flatten(1).mean(1, keepdim=True) * torch.arange(7.0)


class Pruned(OneHead):
    """The weight of its layer is computed from a parameter."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        prune.l1_unstructured(self.fc, "weight", 0.3)


class Hooked(OneHead):
    """Its user changes a gradient."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.fc.weight.register_hook(lambda gradient: gradient / 2)


class Transformed(OneHead):
    """It uses its layer within transformations of torch.func."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda x: torch.tanh(self.fc(x)).sum())(self.features(images))
        return torch.vmap(self.fc)(slope)


class OfOneVector(OneHead):
    """Its layer takes a vector without a batch."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) + self.fc(self.features(images).mean(0))


class InstanceNormed(OneHead):
    """Its instance norm gets a gradient that is channels last, as a convolution makes it."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.norm, self.last = nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 3, padding=1)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.norm(torch.tanh(self.conv(images))))).flatten(1)


def expected_gradients(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, precision: str
) -> dict[str, Any]:
    """Return torch's gradients of a network, by name."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        logits = model(images)
    F.cross_entropy(logits.float(), labels).backward()
    return {name: value.grad for name, value in model.named_parameters()}


NETWORKS = [InstanceNormed, Adversarial, Attacked, Penalized, Pruned, Hooked, Transformed, OfOneVector]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("n_images", [1, 6])
def test_gradients_in_the_block_are_torchs(
    shared_folder: Path, network: type[OneHead], precision: str, n_images: int
) -> None:
    model = f"test_gradients:{network.__name__}"
    replica = make_replica(shared_folder, model=model, precision=precision, **GRADIENTS)
    plain, batch = network(7), make_batch(0, n_images)
    plain.load_state_dict(copy.deepcopy(replica.model.state_dict()))
    images = batch.images * torch.tensor(TwoHeads.input_scale)[:, None, None]
    expected = expected_gradients(plain, images, batch.labels, precision)
    arena = replica.arena
    transport = HostTransport.open(arena.block, "f4", len(arena.flat), Group.on_one_host(0, {}))
    rule = make_rule(replica._config, replica, transport, {})
    replica.forward_backward(batch, n_images, 0, recorder())
    rule.end_backward()
    bound = 0.02 if precision == "bf16" else 1e-4
    for name, found in arena.views("gradients", replica._gradients.flat).items():
        own = expected[name.removeprefix("gradients/")]
        assert (found - own).norm() <= bound * own.norm() + 1e-6, name
    rule.close()
    transport.close()
