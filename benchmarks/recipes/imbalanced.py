"""An imbalanced copy of a dataset folder, and the answers of a trained run on its validation images."""

import dataclasses
from pathlib import Path

import numpy as np

from lockstep.backends import backend_of
from lockstep.comm.group import World
from lockstep.config import Layer, resolve
from lockstep.data import hkl
from lockstep.data.dataset import Dataset, Split, open_dataset
from lockstep.evaluate.evaluation import Evaluation, orders_of, predict
from lockstep.launch.status import StatusBoard
from lockstep.loading.feed import open_feed
from lockstep.network.low_precision import configure
from lockstep.network.replica import open_trained
from lockstep.runs.checkpoint_files import find_checkpoint

RARE, SHARE = (2, 5, 8), 0.01  # of Fashion-MNIST: pullovers, sandals and bags
_ROWS, _BATCH = 256, 250


def thin_out(source: Dataset, folder: Path) -> None:
    """Write a dataset folder with 1 % of the training images of three classes. It has no manifest."""
    labels = source.train.labels
    kept = ~np.isin(labels, RARE) | (np.random.default_rng(0).random(len(labels)) < SHARE)
    _write_split(folder, "train", source.train, np.flatnonzero(kept))
    _write_split(folder, "val", source.val, np.arange(len(source.val)))
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", source.mean)


def _write_split(folder: Path, name: str, split: Split, chosen: np.ndarray) -> None:
    images = np.concatenate([hkl.read(file.path) for file in split.files])[chosen]
    (folder / f"{name}_hkl").mkdir(parents=True)
    for number, first in enumerate(range(0, len(images), _ROWS)):
        hkl.write(folder / f"{name}_hkl" / f"{number:04d}.hkl", images[first : first + _ROWS])
    (folder / "labels").mkdir(exist_ok=True)
    np.save(folder / "labels" / f"{name}_labels.npy", split.labels[chosen])


def answers_of(run: Path) -> Evaluation:
    """Return the answers of a run's newest checkpoint for all validation images, on the CPU."""
    checkpoint, _ = find_checkpoint(run, "latest")
    config, _ = resolve([Layer(str(run), checkpoint.state.config)])
    config = dataclasses.replace(
        config, devices=("cpu",), precision="fp32", para_load=False, batch_size=_BATCH, logical_ranks=None
    )
    configure(config)
    backend = backend_of("cpu")
    replica, dataset = open_trained(config, open_dataset(config), backend.memory, checkpoint.path)
    board, world = StatusBoard.create(), World.on_one_host(1)[0]
    orders = list(orders_of(len(dataset.val), _BATCH, world, 1))
    feed = open_feed(backend, config, dataset, replica, iter(orders), board.say)
    evaluation = Evaluation(len(dataset.val))
    for _ in orders:
        evaluation.take(predict(feed, replica, 1, board))
    feed.close()
    replica.close()
    return evaluation
