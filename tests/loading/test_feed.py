"""The trainer's side of loading: how far ahead it orders, and that validation counts every image once."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_config

from lockstep.comm.group import Group
from lockstep.comm.messages import Fill, Filled, Order, Subtract
from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.errors import PeerLost
from lockstep.launch.ranks import run_ranks
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import LoaderFeed
from lockstep.loading.host import HostRing
from lockstep.loading.slots import RingShape
from lockstep.memory.host import HostMemory
from lockstep.network.build import build_model
from lockstep.runs.plan import RunPlan
from train_funcs import Trainer


def test_every_free_slot_is_on_order_and_a_slot_in_use_is_not() -> None:
    ours, theirs = multiprocessing.Pipe()
    orders = [Order("train", 1, step, 0, 4, 0, 4) for step in range(1, 7)]
    ring = HostRing(RingShape(3, 4, (2, 2), "float32", (2, 2)))
    feed = LoaderFeed([Pipe(ours, "loader 0", 5)], ring, iter(orders))
    loader = Pipe(theirs, "trainer 0", 5)
    assert loader.receive(Subtract, "the mean").mean is None
    shape = loader.receive(RingShape, "the shape")
    assert shape == ring.shape
    block = HostMemory().receive(loader, "the ring")
    slots = shape.tensors(block.array(np.uint8, (shape.n_bytes,)))

    def take() -> Fill:
        fill = loader.receive(Fill, "an order")
        slots[fill.slot].labels.fill_(fill.order.step)
        loader.send(Filled(fill.slot, fill.order))
        return fill

    first = [take() for _ in range(3)]
    assert [fill.slot for fill in first] == [0, 1, 2]
    assert not loader.poll()  # nothing more before the trainer has released a slot
    for step in range(1, 5):
        assert feed.next() == orders[step - 1]
        assert feed.batch().labels.eq(step).all()
        assert not loader.poll()
        feed.release()
        if step <= 3:
            assert take().slot == (step - 1) % 3
    loader.close()
    with pytest.raises(PeerLost):
        feed.close()


def validate_rank(rank: int, pipes: dict[int, Pipe], config: Config) -> list[dict[str, float]]:
    launcher, _keep_open = multiprocessing.Pipe()
    plan = RunPlan(config, Path(), None)
    trainer = Trainer(
        plan, Group.on_one_host(rank, pipes), Pipe(launcher, "launcher", 60), StatusBoard.create()
    )
    trainer.epoch = config.n_epochs
    trainer.feed._orders = trainer.orders.of("val", 1)  # type: ignore[attr-defined]
    assert not trainer.validate()
    return trainer.val_record


def means_over_classes(labels: np.ndarray, answers: np.ndarray) -> dict[str, float]:
    """Return the metrics that a record has, from their definitions."""
    recalls, f1 = [], []
    for number in np.union1d(labels, answers):
        right = int(((labels == number) & (answers == number)).sum())
        n_images, n_answers = int((labels == number).sum()), int((answers == number).sum())
        recalls += [right / n_images] if n_images else []
        f1.append(2 * right / (n_images + n_answers))
    return {"macro_f1": float(np.mean(f1)), "balanced_accuracy": float(np.mean(recalls))}


@pytest.mark.slow
def test_validation_counts_every_picture_once_for_any_number_of_trainers(shared_folder: Path) -> None:
    values = {"data_folder": str(shared_folder), "para_load": False, "batch_size": 5, "n_epochs": 1}
    config = make_config(**values)
    model, dataset = build_model(config, 7).eval(), open_dataset(config)
    images = np.concatenate([hkl.read(file.path) for file in dataset.val.files])
    middle = torch.from_numpy((images - dataset.mean)[:, 2:34, 2:34]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(dataset.val.labels)
    with torch.no_grad():
        logits = model(middle)
    best = logits.topk(5).indices == labels[:, None]
    expected = {
        "epoch": 1,
        "loss": F.cross_entropy(logits.double(), labels).item(),
        "error_top1": 1 - best[:, 0].double().mean().item(),
        "error_top5": 1 - best.any(1).double().mean().item(),
        **means_over_classes(labels.numpy(), logits.argmax(1).numpy()),
    }
    for n_trainers in (1, 2, 3):  # 33 images in minibatches of 5, 10 and 15
        config = make_config(devices=["cpu"] * n_trainers, **values)
        for record in run_ranks(validate_rank, n_trainers, config):
            assert record == [pytest.approx(expected, rel=1e-5)]
