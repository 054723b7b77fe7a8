"""The bits of a training with everything on that chooses at random or weighs images.

They are the same for any number of trainers, after a resume, and with loaders in other processes.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Program, make_config, make_folder
from safetensors.numpy import load_file
from training_runs import Tensors, assert_same, newest, relative_difference, train, train_rank

from lockstep.config.rules import settle
from lockstep.data.mixing import Mixer, Mixing
from lockstep.launch.ranks import run_ranks

AUGMENTED: dict[str, Any] = {
    "model": "smallnet",
    "learning_rate": 0.002,
    "logical_ranks": 4,
    "n_epochs": 2,
    "rand_mirror": True,
    "crop": "random_resized",
    "rotate": 10.0,
    "color_jitter": (0.4, 0.4, 0.4, 0.1),
    "auto_augment": "trivial",
    "random_erasing": 0.5,
    "rand_color": 0.1,
    "mixup": 0.8,
    "cutmix": 1.0,
    "class_weights": "balanced",
    "sampler": "balanced",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: 5 steps of 8 an epoch, the last with 5, which no number of trainers divides.

    Most images are of one class, so the sampler draws those of the others several times.
    """
    folder = make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)
    path = folder / "labels" / "train_labels.npy"
    labels = np.load(path)
    labels[:25] = 3
    np.save(path, labels)
    return folder


@pytest.fixture(scope="module")
def of_one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Return the checkpoint of one trainer."""
    return train(1, data, tmp_path_factory.mktemp("one"), double=False, **AUGMENTED)


@pytest.mark.parametrize("n_trainers", [2, 4])
def test_any_number_of_trainers_has_the_bits_of_one(
    data: Path, tmp_path: Path, of_one: Tensors, n_trainers: int
) -> None:
    assert_same(train(n_trainers, data, tmp_path, double=False, **AUGMENTED), of_one)


def test_a_resume_in_the_middle_of_an_epoch_with_fewer_trainers_has_them_too(
    data: Path, tmp_path: Path, of_one: Tensors
) -> None:
    train(2, data, tmp_path, double=False, stopped=True, **AUGMENTED)
    start = newest(tmp_path)
    assert start.stem == "epoch_0001_at_8"
    assert_same(train(1, data, tmp_path, double=False, start=start, **AUGMENTED), of_one)


def test_loaders_in_processes_of_their_own_give_them_too(
    program: Program, data: Path, of_one: Tensors
) -> None:
    """Train by train.py; the trainers of the tests above load their images themselves."""
    fixed = {"data_folder": data, "global_batch_size": 8, "shuffle_block": 3, "cpu_threads": 1}
    keys = {**AUGMENTED, **fixed, "para_load": True}
    words = [f"{key}={list(value) if isinstance(value, tuple) else value}" for key, value in keys.items()]
    running = program.run(*words)
    assert_same(load_file(newest(running.run_folder)), of_one)


CHANGED = {
    "rand_mirror": False,
    "crop": "padded",
    "rotate": 0.0,
    "color_jitter": 0.0,
    "auto_augment": "rand",
    "random_erasing": 0.0,
    "rand_color": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
    "class_weights": None,
    "sampler": None,
}


@pytest.mark.slow
def test_every_key_changes_the_bits(data: Path, tmp_path: Path, of_one: Tensors) -> None:
    """The comparisons above would not notice a key that is never applied."""
    for key, value in CHANGED.items():
        other = train(1, data, tmp_path / key, double=False, **{**AUGMENTED, key: value})
        assert relative_difference(other, of_one) > 1e-4, key


def train_with_partners_in_the_share(rank: int, pipes: Any, *arguments: Any) -> Tensors:
    """Train with partners from this trainer's own share, as a program would that mixes what it has."""

    def choose_partners(self: Mixer, start: int, stop: int, first: int, last: int) -> Mixing:
        whole = of_whole_batch(self, start, stop, first, last)
        return dataclasses.replace(whole, partners=np.roll(np.arange(first, last), 1))

    of_whole_batch, Mixer.choose_partners = Mixer.choose_partners, choose_partners  # type: ignore[method-assign]
    return train_rank(rank, pipes, *arguments)


def test_partners_within_a_share_would_break_the_promise(data: Path, tmp_path: Path) -> None:
    weights = []
    for n_trainers in (1, 2):
        place = tmp_path / str(n_trainers)
        (place / "checkpoints").mkdir(parents=True)
        fixed = {"data_folder": str(data), "para_load": False, "global_batch_size": 8, **AUGMENTED}
        config, _ = settle(make_config(devices=["cpu"] * n_trainers, **{**fixed, "n_epochs": 1}))
        run = train_with_partners_in_the_share, n_trainers, config, place, False, None, False
        tensors = run_ranks(*run)[0]
        weights.append({name: tensor for name, tensor in tensors.items() if name.startswith("weights/")})
    assert relative_difference(*weights) > 1e-4
