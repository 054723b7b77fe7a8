"""Crop, mirror and mean against straightforward NumPy, and orders turned into slots."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZE, make_config, make_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.comm.messages import Order
from lockstep.data import hkl
from lockstep.data.augment import TORCH_FROM, Augmenter
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.data.sampling import EpochSamples, share
from lockstep.errors import UserError
from lockstep.loading.host import HostFiller, HostRing
from lockstep.loading.reader import Reader
from lockstep.loading.slots import RingShape, Slot


def straightforward(image: np.ndarray, mean: np.ndarray, row: int, column: int, mirror: bool, size: int):
    """theano_alexnet's order of things, for one image: subtract, crop, mirror."""
    whole = image.astype(np.float32) - mean
    crop = whole[row : row + size, column : column + size]
    return crop[:, ::-1] if mirror else crop


@pytest.mark.parametrize("by_torch", [False, True])
@given(data=st.data())
@settings(max_examples=60)
def test_agrees_with_numpy_bit_for_bit(data: st.DataObject, by_torch: bool) -> None:
    least = TORCH_FROM if by_torch else 1
    height, width = (data.draw(st.integers(least, least + 23)) for _ in "hw")
    size = data.draw(st.integers(least, min(height, width)))
    n_images = data.draw(st.integers(0, 4))
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    images = random.integers(0, 256, (n_images, height, width, 3), dtype=np.uint8)
    mean = random.uniform(0, 255, (height, width, 3)).astype(np.float32)
    most = (height - size + 1, width - size + 1, 2)
    crops = random.integers(0, most, (n_images, 3), dtype=np.int32)
    shifts = random.normal(0, 5, (n_images, 3)).astype(np.float32) if data.draw(st.booleans()) else None
    out = np.full((n_images, size, size, 3), np.nan, np.float32)
    Augmenter(mean, (size, size)).apply(images, crops, out, shifts)
    for i, (row, column, mirror) in enumerate(crops):
        expected = straightforward(images[i], mean, row, column, mirror, size)
        assert (out[i] == (expected if shifts is None else expected + shifts[i])).all()


def fill(dataset: Dataset, orders: list[Order], batch_size: int = 16, **values: object) -> list[Slot[Any]]:
    """Return the filler's result for each order, in a slot that held other bytes before."""
    config = make_config(batch_size=batch_size, **values)
    ring = HostRing(RingShape(len(orders), batch_size, (32, 32), "float32", (32, 32)))
    reader = Reader(config, dataset, (32, 32), print)
    filler = HostFiller(reader, ring.block, ring.shape)
    slots = ring.shape.tensors(ring.block.array(np.uint8, (ring.shape.n_bytes,)))
    for number, (slot, order) in enumerate(zip(slots, orders, strict=True)):
        slot.images.fill_(torch.nan)
        slot.labels.fill_(-1)
        slot.samples.fill_(-1)
        filler.fill(number, order)
    return slots


@pytest.fixture(scope="module")
def dataset(shared_folder) -> Dataset:
    return open_dataset(make_config(data_folder=str(shared_folder)))


def order(
    first: int, last: int, stage: str = "train", epoch: int = 1, start: int = 0, stop: int = 64
) -> Order:
    return Order(stage, epoch, 1, start, stop, first, last)  # type: ignore[arg-type]


def images_and_labels(dataset: Dataset, stage: str) -> tuple[np.ndarray, np.ndarray]:
    split = dataset.train if stage == "train" else dataset.val
    return np.concatenate([hkl.read(file.path) for file in split.files]), split.labels


def test_slots_hold_what_was_ordered(dataset: Dataset) -> None:
    slot = fill(dataset, [order(20, 33)], shuffle_block=4)[0]
    samples = EpochSamples(dataset.train.file_rows, "blocks", 4, 0, 1).samples(20, 33)
    images, labels = images_and_labels(dataset, "train")
    assert slot.samples[:13].tolist() == samples.tolist()
    assert slot.labels[:13].tolist() == labels[samples].tolist()
    assert slot.samples[13:].eq(-1).all() and slot.images[13:].isnan().all()
    margin = range(SIZE - 32 + 1)
    for picture, sample in zip(slot.images[:13].numpy(), samples, strict=True):
        candidates = (
            straightforward(images[sample], dataset.mean, row, column, mirror, 32)
            for row in margin
            for column in margin
            for mirror in (False, True)
        )
        assert any((picture == candidate).all() for candidate in candidates)


@pytest.mark.parametrize("shuffle", ["blocks", "none"])
def test_several_threads_read_the_same(dataset: Dataset, shuffle: str) -> None:
    orders = [order(0, 16), order(20, 36, start=16, stop=48), order(48, 48), order(3, 14, "val")]
    expected = fill(dataset, orders, shuffle=shuffle)
    for n_threads in (2, 4, 40):
        found = fill(dataset, orders, shuffle=shuffle, read_threads=n_threads)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.images.nan_to_num(-1), theirs.images.nan_to_num(-1))
            assert torch.equal(ours.labels, theirs.labels)


def test_a_file_that_a_thread_can_not_read_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set")
    broken = open_dataset(make_config(data_folder=str(folder)))
    victim = sorted((folder / "train_hkl").iterdir())[1]
    victim.write_bytes(victim.read_bytes()[:5000])
    with pytest.raises(UserError, match=f"{victim}: can't be read"):
        fill(broken, [order(0, 90, stop=90)], batch_size=90, read_threads=3)


def test_validation_takes_the_middle_unmirrored_in_file_order(dataset: Dataset) -> None:
    slot = fill(dataset, [order(3, 17, "val")])[0]
    images, labels = images_and_labels(dataset, "val")
    assert slot.labels[:14].tolist() == labels[3:17].tolist()
    for picture, image in zip(slot.images[:14].numpy(), images[3:17], strict=True):
        assert (picture == straightforward(image, dataset.mean, 2, 2, False, 32)).all()


def test_a_sample_is_augmented_alike_whoever_loads_it(dataset: Dataset) -> None:
    """One trainer's minibatch of 16 is the shares of loaders that never saw the others'."""
    for values in ({}, {"rand_color": 0.1}):
        whole = fill(dataset, [order(32, 48, start=32)], **values)[0].images
        for n_trainers in (2, 3):
            ends = [share(32, 48, rank, n_trainers) for rank in range(n_trainers)]
            parts = [fill(dataset, [order(*end, start=32)], **values)[0].images for end in ends]
            combined = [part[: last - first] for part, (first, last) in zip(parts, ends, strict=True)]
            assert torch.equal(whole, torch.cat(combined))
    whole = fill(dataset, [order(32, 48, start=32)], batch_crop_mirror=True)[0]
    other = fill(dataset, [order(40, 48, start=32)], batch_crop_mirror=True)[0]
    assert torch.equal(whole.images[8:16], other.images[:8])


def test_epochs_differ_and_repeat_exactly(dataset: Dataset) -> None:
    orders = [order(0, 16, epoch=epoch) for epoch in (1, 2, 1)]
    first, second, again = fill(dataset, orders, shuffle="none")
    assert first.samples.equal(second.samples)
    assert not first.images.equal(second.images) and first.images.equal(again.images)


def test_batch_crop_mirror_uses_one_place_for_all(dataset: Dataset) -> None:
    slot = fill(dataset, [order(0, 16)], batch_crop_mirror=True)[0]
    images, _ = images_and_labels(dataset, "train")

    def places(number: int) -> set[tuple[int, int, bool]]:
        image = images[slot.samples[number]]
        every = ((r, c, m) for r in range(5) for c in range(5) for m in (False, True))
        found = slot.images[number].numpy()
        return {place for place in every if (straightforward(image, dataset.mean, *place, 32) == found).all()}

    assert len(places(0)) == 1
    assert all(places(number) == places(0) for number in range(16))


def test_crop_and_mirror_can_be_turned_off(dataset: Dataset) -> None:
    slot = fill(dataset, [order(0, 16)], rand_crop=False, rand_mirror=False)[0]
    images, _ = images_and_labels(dataset, "train")
    for picture, sample in zip(slot.images.numpy(), slot.samples, strict=True):
        assert (picture == straightforward(images[sample], dataset.mean, 2, 2, False, 32)).all()
