"""`logical_ranks` with any number of trainers and any shares: the same bits."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import make_config, make_folder
from safetensors.numpy import load_file
from training_runs import assert_same, make_trainer, newest, relative_difference, train

from lockstep.comm.pipes import Pipe
from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.launch.ranks import run_ranks

KEYS = {"n_epochs": 2, "learning_rate": 0.02, "model": "smallnet", "double": False}
NORMS = {"model": "resnet20", "model_args": {"n": 1}, "optimizer": "adamw", "learning_rate": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images: 5 steps of 8 an epoch, the last with 5, so that some logical ranks have none."""
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


def val_record(place: Path) -> Any:
    return json.loads(newest(place).with_suffix(".json").read_text())["val_record"]


@pytest.mark.parametrize(
    ("n_logical", "values", "divisions"),
    [
        (8, {"ema_decay": 0.9}, [(3, "equal"), (2, (5, 3)), (4, (1, 5, 1, 1))]),
        pytest.param(6, {"optimizer": "adamw"}, [(2, (1, 5)), (6, "equal")], marks=pytest.mark.slow),
        pytest.param(3, NORMS, [(2, "equal"), (3, (1, 1, 1))], marks=pytest.mark.slow),
    ],
    ids=["8", "6", "3"],
)
def test_any_shares_give_the_bits_of_one_trainer(
    data: Path, tmp_path: Path, n_logical: int, values: dict[str, Any], divisions: list[tuple[int, Any]]
) -> None:
    """Weights, momenta, statistics, and losses of training and validation; parts may have no image."""
    keys = {**KEYS, **values, "logical_ranks": n_logical}
    one = train(1, data, tmp_path / "one", **keys)
    for n_trainers, shares in divisions:
        place = tmp_path / f"{n_trainers} {shares}"
        assert_same(train(n_trainers, data, place, shares=shares, **keys), one)
        assert val_record(place) == val_record(tmp_path / "one")


def test_integer_buffers_count_steps_in_which_logical_ranks_have_no_image(data: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "n_epochs": 1, "model": "small_replicas:Counting", "logical_ranks": 8}
    one, three = (train(n, data, tmp_path / str(n), **keys) for n in (1, 3))
    assert_same(three, one)
    assert one["buffers/calls"] == one["buffers/norm.num_batches_tracked"] == 5


def test_a_teacher_of_buffers_has_the_same_bits_and_one_of_parameters_is_refused(
    data: Path, tmp_path: Path
) -> None:
    """A forward pass that averages parameters would do so once for each logical rank of its trainer."""
    keys = {**KEYS, "n_epochs": 1, "model": "small_replicas:Teaching", "logical_ranks": 4}
    as_buffer = {**keys, "model_args": {"as_buffer": True}}
    one, two = (train(n, data, tmp_path / str(n), **as_buffer) for n in (1, 2))
    assert_same(one, two)
    message = "the model's teacher is a parameter and is changed .* Make it a buffer"
    for n_trainers in (1, 4):
        with pytest.raises(AssertionError, match=message):
            train(n_trainers, data, tmp_path / f"refused {n_trainers}", **keys)


def test_weights_that_a_forward_pass_normalizes_are_refused(data: Path, tmp_path: Path) -> None:
    """They would be rounded once for each logical rank of their trainer, so bits would depend on these."""
    keys = {**KEYS, "n_epochs": 1, "model": "small_networks:Normalizing", "logical_ranks": 4}
    with pytest.raises(AssertionError, match=r"the model's fc.weight .* Compute with a changed copy"):
        train(2, data, tmp_path, **keys)


def test_another_tree_has_other_bits(data: Path, tmp_path: Path) -> None:
    """The tests above can fail."""
    eight, six = (train(2, data, tmp_path / str(n), logical_ranks=n, **KEYS) for n in (8, 6))
    assert relative_difference(eight, six) > 0


@pytest.mark.slow
def test_a_run_goes_on_with_other_shares(data: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "logical_ranks": 6}
    whole = train(1, data, tmp_path / "one", **keys)
    train(3, data, tmp_path / "first", shares=(1, 2, 3), **{**keys, "n_epochs": 1})
    shutil.copytree(tmp_path / "first", tmp_path / "then")
    ours = train(2, data, tmp_path / "then", start=newest(tmp_path / "then"), shares=(5, 1), **keys)
    assert_same(ours, whole)


Seen = tuple[set[tuple[int, ...]], list[str]]


def train_slowly(rank: int, pipes: dict[int, Pipe], config: Config, place: Path) -> Seen:
    """Train with a rank 0 that takes half a second more for each logical rank.

    Returns:
        The bounds of all orders, and this trainer's messages to the launcher.
    """
    trainer, launcher = make_trainer(rank, pipes, config, place, double=False)
    learn = trainer.program._learn_batch  # type: ignore[attr-defined]

    def learn_slowly(*arguments: Any) -> None:
        learn(*arguments)
        time.sleep(0.5 if rank == 0 else 0)

    trainer.program._learn_batch = learn_slowly  # type: ignore[attr-defined]
    seen, next_order = set(), trainer.feed.next

    def noted() -> Any:
        order = next_order()
        seen.add(order.bounds)
        return order

    trainer.feed.next = noted  # type: ignore[method-assign]
    assert not trainer.run()
    texts = []
    while launcher.poll():
        texts.append(str(launcher.receive(object, "a message")))
    return seen, texts


@pytest.mark.slow
def test_shares_follow_measured_times_and_change_no_bit(data: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "n_epochs": 3, "logical_ranks": 4}
    one = train(1, data, tmp_path / "one", **keys)
    (tmp_path / "auto" / "checkpoints").mkdir(parents=True)
    fixed = {"data_folder": str(data), "para_load": False, "global_batch_size": 8, "shuffle_block": 3}
    values = {**fixed, **keys, "shares": "auto", "devices": ["cpu", "cpu"]}
    values.pop("double")
    config, _ = settle(make_config(**values))
    (seen, texts), (others, _) = run_ranks(train_slowly, 2, config, tmp_path / "auto")
    assert seen == others == {(0, 2, 4), (0, 1, 4)}
    (text,) = [text for text in texts if "shares: [1, 3] from epoch 2, step" in text]
    assert "until then [2, 2]: a logical rank takes" in text
    assert_same(load_file(newest(tmp_path / "auto")), one)
