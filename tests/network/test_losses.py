"""Losses: weights of classes, functions of one's own, and what such a function may not return."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_config
from multilabel_folders import make_multilabel_set
from small_replicas import make_batch, make_replica, recorder

from lockstep.errors import UserError
from lockstep.network.losses import TrainingLoss

LABELS = torch.tensor([0, 2, 1])
SAMPLES = torch.tensor([7, 8, 9])


def logits() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


def no_numbers(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.where(labels == 1, torch.nan * losses, losses)


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels)


def detached(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none").detach()


def raising(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


def of(name: str | None, weights: torch.Tensor | None = None, **values: Any) -> TrainingLoss:
    own = f"test_losses:{name}" if name else None
    return TrainingLoss(make_config(loss=own, **values), weights, torch.zeros(1))


def test_weights_multiply_the_loss_of_each_image() -> None:
    weights = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=torch.float64)
    each = F.cross_entropy(logits(), LABELS, reduction="none", label_smoothing=0.1)
    ours = of(None, weights, label_smoothing=0.1).of_each(logits(), LABELS, SAMPLES)
    assert torch.equal(ours, each * torch.tensor([0.5, 2.0, 1.0]))
    assert torch.equal(
        of(None).sum(logits(), LABELS, SAMPLES), F.cross_entropy(logits(), LABELS, reduction="sum")
    )


def test_an_own_loss_is_used_with_weights() -> None:
    weights = torch.tensor([0.5, 1.0, 2.0, 1.0])
    ours = of("focal", weights).sum(logits(), LABELS, SAMPLES)
    assert torch.allclose(ours, (focal(logits(), LABELS) * weights[LABELS]).sum())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_numbers", r"test_losses:no_numbers returns nan for training sample 9 of class 1"),
        ("mean", r"returns torch.float32 of shape \(\). It must return one float per image, shape \(3,\)"),
        ("detached", "that depends on the logits"),
        ("raising", "called for 3 images, fails: ValueError: no such thing"),
    ],
)
def test_an_own_loss_that_returns_something_else_is_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        of(name).sum(logits(), LABELS, SAMPLES)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("test_losses:focl", "test_losses has no function focl \\(did you mean 'focal'\\?\\)"),
        ("no_such_module:focal", "no_such_module can't be imported: ModuleNotFoundError"),
    ],
)
def test_a_loss_that_is_not_there_is_refused(loss: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingLoss(make_config(loss=loss), None, torch.zeros(1))


def test_training_uses_the_loss_and_validation_does_not(shared_folder: Path) -> None:
    """Heavier images have larger gradients; what is measured afterwards is the cross-entropy."""
    batch = make_batch(0)
    plain = make_replica(shared_folder)
    weighted = make_replica(shared_folder, class_weights=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    gradients = []
    for replica in (plain, weighted):
        replica.forward_backward(batch, 6, 0, recorder())
        gradients.append(replica.model.fc.bias.grad.clone())
        assert torch.equal(replica.count_errors(batch), plain.count_errors(batch))
    assert not torch.allclose(gradients[0], gradients[1])


TARGETS = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.uint8)
BINARY = {"task": "multilabel"}


def brier(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (torch.sigmoid(logits) - labels).square().sum(1)


def test_several_classes_have_the_mean_binary_cross_entropy() -> None:
    p, y = torch.sigmoid(logits().double()), TARGETS.double()
    expected = -(y * p.log() + (1 - y) * (1 - p).log()).mean(1)
    ours = of(None, **BINARY).of_each(logits(), TARGETS, SAMPLES)
    assert torch.allclose(ours.double(), expected, atol=1e-6)
    assert torch.equal(of(None, **BINARY).sum(logits(), TARGETS, SAMPLES), ours.sum())


def test_weights_of_several_classes_multiply_the_part_of_those_that_have_them() -> None:
    weights = torch.tensor([3.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    p, y = torch.sigmoid(logits().double()), TARGETS.double()
    expected = -(weights * y * p.log() + (1 - y) * (1 - p).log()).mean(1)
    ours = of(None, weights, **BINARY).of_each(logits(), TARGETS, SAMPLES)
    assert torch.allclose(ours.double(), expected, atol=1e-6)
    assert not torch.allclose(ours, of(None, **BINARY).of_each(logits(), TARGETS, SAMPLES))


def test_smoothing_of_several_classes_moves_targets_towards_a_half() -> None:
    smooth = of(None, label_smoothing=0.2, **BINARY).of_each(logits(), TARGETS, SAMPLES)
    targets = torch.where(TARGETS > 0, 0.9, 0.1)
    expected = F.binary_cross_entropy_with_logits(logits(), targets, reduction="none").mean(1)
    assert torch.allclose(smooth, expected)


def test_mixing_losses_of_several_classes_mixes_their_targets() -> None:
    """Binary cross-entropy is linear in the targets, so `mixup` and `cutmix` need no loss of their own."""
    loss, others = of(None, torch.tensor([2.0, 1.0, 1.0, 0.5]), **BINARY), TARGETS.flip(0)
    weights = torch.tensor([0.25, 1.0, 0.5])
    own, other = (loss.of_each(logits(), labels, SAMPLES) for labels in (TARGETS, others))
    mixed = weights[:, None] * TARGETS + (1 - weights[:, None]) * others
    assert torch.allclose(torch.lerp(other, own, weights), loss.of_each(logits(), mixed, SAMPLES), atol=1e-6)


def test_mixing_interpolates_an_own_loss_which_gets_whole_targets(tmp_path: Path) -> None:
    folder, own = make_multilabel_set(tmp_path / "set"), "test_losses:brier"
    replica = make_replica(folder, n_classes=4, loss=own, mixup=1.0, **BINARY)
    batch, labels, weights = make_batch(0), TARGETS.repeat(2, 1), torch.linspace(0, 1, 6)
    mixed = dataclasses.replace(batch, labels=labels, other_labels=labels.roll(1, 0), label_weights=weights)
    losses = recorder()
    replica.forward_backward(mixed, 6, 0, losses)
    outputs = replica._forward(batch.images)[0]
    others, own_losses = (brier(outputs, each.float()) for each in (mixed.other_labels, labels))
    assert losses.sums()[0] == pytest.approx(torch.lerp(others, own_losses, weights).sum().item(), rel=1e-5)


def test_an_own_loss_gets_numbers_for_several_classes() -> None:
    ours = of("brier", **BINARY).of_each(logits(), TARGETS, SAMPLES)
    assert torch.equal(ours, brier(logits(), TARGETS.float()))
