"""Mixup and CutMix: pairs for any number of trainers, images and weights against NumPy, exact losses."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st
from small_replicas import make_batch, make_replica, recorder

from lockstep.comm.messages import Order
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.mixing import PARTS, Mixer, _boxes, mix
from lockstep.data.sampling import share
from lockstep.loading.reader import Reader
from lockstep.loading.slots import Slot

CROP = 32


def mixer(n_samples: int = 64, epoch: int = 1, **values: Any) -> Mixer:
    made = Mixer(make_config(**values), (CROP, CROP))
    made.begin_epoch(epoch, n_samples)
    return made


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 4), st.sampled_from([0.2, 1.0]))
def test_partners_are_others_of_the_global_batch_whoever_holds_them(
    size: int, start: int, n_trainers: int, alpha: float
) -> None:
    made = mixer(mixup=alpha, cutmix=alpha)
    whole = made.choose_partners(start, start + size, start, start + size)
    ends = [share(start, start + size, rank, n_trainers) for rank in range(n_trainers)]
    parts = [made.choose_partners(start, start + size, *end) for end in ends]
    for name in ("partners", "weights", "boxes"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert (joined == getattr(whole, name)).all()
    positions = np.arange(start, start + size)
    assert ((start <= whole.partners) & (whole.partners < start + size)).all()
    if size > 1:
        assert ((whole.weights == 1) == (whole.partners == positions)).all()
    assert (whole.weights * PARTS == np.rint(whole.weights * PARTS))[whole.boxes[:, 2] == 0].all()


def test_pairs_differ_by_epoch_and_batch_and_end_at_mix_off_epoch() -> None:
    first, again, second = (
        mixer(512, epoch, mixup=0.8).choose_partners(0, 512, 0, 512) for epoch in (1, 1, 2)
    )
    assert (first.weights == again.weights).all() and (first.partners == again.partners).all()
    assert (first.weights != second.weights).any()
    distances = {
        int(mixer(512, epoch, mixup=0.8)._distances[64 * k] * 63) for epoch in (1, 2) for k in range(8)
    }
    assert len(distances) > 8
    for epoch, is_mixed in ((2, True), (3, False), (4, False)):
        pairs = mixer(64, epoch, mixup=0.8, cutmix=1.0, mix_off_epoch=3).choose_partners(0, 64, 0, 64)
        assert (pairs.weights < 1).any() == is_mixed


def test_shares_have_the_papers_distribution() -> None:
    n_samples = 20_000
    blended = mixer(n_samples, mixup=0.4)._weights
    assert abs(blended.mean() - 0.5) < 0.01 and abs(blended.var() - 0.25 / 1.8) < 0.005  # Beta(0.4, 0.4)
    some = mixer(n_samples, mixup=1.0, mix_prob=0.3)._weights
    assert abs((some < 1).mean() - 0.3) < 0.02
    both = mixer(n_samples, mixup=1.0, cutmix=1.0)
    cut = both._boxes[:, 2] > 0
    assert abs(cut.mean() - 0.49) < 0.02  # half of them, less those whose rectangle is empty
    boxes = both._boxes[cut]
    assert (both._weights[cut] == (1 - boxes[:, 2] * boxes[:, 3] / CROP**2).astype(np.float32)).all()
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 0] + boxes[:, 2] <= CROP).all()


@given(st.integers(0, PARTS), st.integers(0, 100))
def test_blends_are_within_one_gray_level_of_numpy(part: int, seed: int) -> None:
    first, second = np.random.default_rng(seed).integers(0, 256, (2, 6, 5, 3), dtype=np.uint8)
    out, weight = np.zeros_like(first), part / PARTS
    mix(first, second, weight, np.zeros(4, np.int32), out)
    assert np.abs(out - (weight * first + (1 - weight) * second.astype(float))).max() <= 0.5
    for image in (first, second):
        mix(image, image, weight, np.zeros(4, np.int32), out)
        assert (out == image).all()


def test_cutmix_replaces_the_box_only() -> None:
    first, second = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    out, expected = np.zeros_like(first), first.copy()
    mix(first, second, 0.7, np.array([2, 3, 4, 5]), out)
    expected[2:6, 3:8] = second[2:6, 3:8]
    assert (out == expected).all()


def one_hot(labels: torch.Tensor, weight: float) -> torch.Tensor:
    """Return the targets of images whose partners are those before them, for `weight` of their own."""
    return weight * F.one_hot(labels, 7) + (1 - weight) * F.one_hot(labels.roll(1), 7)


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.7109375, 1.0])
def test_mixup_is_torchvisions(
    torchvision: Any,
    monkeypatch: pytest.MonkeyPatch,
    random_batch: tuple[np.ndarray, torch.Tensor],
    weight: float,
) -> None:
    from torchvision.transforms import v2

    images, labels = random_batch
    transform, out = v2.MixUp(num_classes=7), np.empty_like(images)
    monkeypatch.setattr(transform, "make_params", lambda inputs: {"lam": weight})
    theirs, targets = transform(torch.from_numpy(images).float(), labels)
    for image, partner, result in zip(images, np.roll(images, 1, 0), out, strict=True):
        mix(image, partner, weight, np.zeros(4, np.int32), result)
    assert np.abs(out - theirs.numpy()).max() <= 0.5  # rounded to gray levels
    assert torch.allclose(targets, one_hot(labels, weight))


def test_cutmix_is_torchvisions(
    torchvision: Any, monkeypatch: pytest.MonkeyPatch, random_batch: tuple[np.ndarray, torch.Tensor]
) -> None:
    """With the same share and center, the rectangle, the images and the share after clipping are the same."""
    from torchvision.transforms import v2

    images, labels = random_batch
    size = np.array(images.shape[1:3])
    transform, out = v2.CutMix(num_classes=7), np.empty_like(images)
    for seed, kept in enumerate(np.linspace(0, 1, 20).tolist()):
        share = types.SimpleNamespace(sample=lambda shape, kept=kept: kept)
        monkeypatch.setattr(transform, "_dist", share)
        torch.manual_seed(seed)
        x, y = (int(torch.randint(int(side), (1,))) for side in size[::-1])
        (box,) = _boxes(np.array([kept]), (np.array([[y, x]]) + 0.5) / size, size)
        torch.manual_seed(seed)
        theirs, targets = transform(torch.from_numpy(images).permute(0, 3, 1, 2), labels)
        weight = 1 - box[2] * box[3] / size.prod()
        for image, partner, result in zip(images, np.roll(images, 1, 0), out, strict=True):
            mix(image, partner, weight, box, result)
        assert (out == theirs.permute(0, 2, 3, 1).numpy()).all()
        assert torch.allclose(targets, one_hot(labels, weight))


@pytest.fixture(scope="module")
def random_batch() -> tuple[np.ndarray, torch.Tensor]:
    """Return five images, uint8 (image, row, column, channel), and their labels."""
    images = np.random.default_rng(3).integers(0, 256, (5, 12, 18, 3), dtype=np.uint8)
    return images, torch.tensor([0, 6, 2, 2, 4])


@pytest.fixture(scope="module")
def dataset(shared_folder: Path) -> Dataset:
    return open_dataset(make_config(data_folder=str(shared_folder), mixup=1.0))


def read(dataset: Dataset, orders: list[Order], **values: Any) -> list[Slot[np.ndarray]]:
    slots = []
    for order in orders:
        reader = Reader(make_config(batch_size=16, shuffle_block=4, **values), dataset, (CROP, CROP), print)
        shape = reader.raw_shape(1)
        slots.append(shape.slots(np.zeros(shape.n_bytes, np.uint8))[0])
        reader.read(order, slots[-1])
    return slots


def test_mixed_images_are_the_pairs_of_unmixed_ones(dataset: Dataset) -> None:
    values = {"crop": "random_resized", "seed": 5}
    order = Order("train", 2, 2, 16, 32, 16, 32)
    plain, mixed = (
        read(dataset, [order], **values)[0],
        read(dataset, [order], mixup=1.0, cutmix=1.0, **values)[0],
    )
    made = Mixer(make_config(mixup=1.0, cutmix=1.0, seed=5), (CROP, CROP))
    made.begin_epoch(2, len(dataset.train))
    pairs = made.choose_partners(16, 32, 16, 32)
    assert (mixed.labels == plain.labels).all() and (mixed.label_weights == pairs.weights).all()
    assert (pairs.boxes[:, 2] > 0).any() and (pairs.boxes[:, 2] == 0).any()
    for number, partner in enumerate(pairs.partners - 16):
        expected = np.empty_like(plain.images[0])
        arguments = float(pairs.weights[number]), pairs.boxes[number]
        mix(plain.images[number], plain.images[partner], *arguments, expected)
        assert (mixed.images[number] == expected).all()
        assert mixed.other_labels[number] == plain.labels[partner]


def test_a_loader_reads_partners_that_other_trainers_hold(dataset: Dataset) -> None:
    values = {"crop": "padded", "auto_augment": "trivial", "mixup": 1.0, "cutmix": 1.0, "rand_color": 0.1}
    whole = read(dataset, [Order("train", 1, 1, 0, 16, 0, 16)], **values)[0]
    for n_trainers in (2, 3, 16):
        ends = [share(0, 16, rank, n_trainers) for rank in range(n_trainers)]
        parts = read(dataset, [Order("train", 1, 1, 0, 16, *end) for end in ends], **values)
        for name in ("images", "labels", "other_labels", "label_weights", "samples", "shifts"):
            pieces = [
                getattr(part, name)[: last - first] for part, (first, last) in zip(parts, ends, strict=True)
            ]
            assert np.concatenate(pieces).tobytes() == getattr(whole, name).tobytes(), name
    nothing = read(dataset, [Order("train", 1, 1, 0, 2, 2, 2)], **values)[0]
    assert not nothing.images.any()
    alone = read(dataset, [Order("train", 1, 6, 89, 90, 89, 90)], **values)[0]
    assert alone.label_weights[0] == 1 or alone.other_labels[0] == alone.labels[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_both_labels(shared_folder: Path, smoothing: float) -> None:
    """In closed form, and its gradient; with auxiliary heads."""
    replica = make_replica(shared_folder, mixup=1.0, label_smoothing=smoothing)
    batch = make_batch(1)
    weights = torch.tensor([1, 0.75, 0.5, 0.25, 0, 0.125])
    others = batch.labels.roll(1)
    mixed = type(batch)(batch.order, batch.images, batch.labels, batch.samples, others, weights)
    losses = recorder()
    replica.forward_backward(mixed, 6, 0, losses)
    gradients = {name: weight.grad.clone() for name, weight in replica.model.named_parameters()}
    replica.model.zero_grad()
    outputs = replica._forward(batch.images)
    share = weights[:, None]
    targets = F.one_hot(batch.labels, 7) * share + F.one_hot(others, 7) * (1 - share)
    targets = targets * (1 - smoothing) + smoothing / 7
    wanted = [-(targets * logits.log_softmax(1)).sum() for logits in outputs]
    ((wanted[0] + 0.3 * wanted[1]) / 6).backward()
    for name, weight in replica.model.named_parameters():
        assert torch.allclose(gradients[name], weight.grad, rtol=1e-4, atol=1e-6), name
    summed, n_wrong, *_ = losses.sums()
    assert summed == pytest.approx(wanted[0].item(), rel=1e-5)
    main = torch.where(weights >= 0.5, batch.labels, others)
    assert n_wrong == (outputs[0].argmax(1) != main).sum()


def test_a_batch_of_whole_weights_has_the_loss_of_one_label(shared_folder: Path) -> None:
    batch, ones = make_batch(2), torch.ones(6)
    same = type(batch)(batch.order, batch.images, batch.labels, batch.samples, batch.labels, ones)
    sums = []
    for each, values in ((batch, {}), (same, {"cutmix": 1.0})):
        losses = recorder()
        make_replica(shared_folder, **values).forward_backward(each, 6, 0, losses)
        sums.append(losses.sums())
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)
