"""`recheck_every`: a trainer with wrong gradients is found within `logical_ranks` checks, and named."""

from pathlib import Path
from typing import Any

import pytest
from conftest import make_config, make_folder
from faulty_gradients import KEYS, config_of, train_faultily
from training_runs import assert_same, newest, train

from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.errors import DeviceFault, PeerLost, UndecidedFault
from lockstep.launch.attempts import Attempt, next_attempt
from lockstep.launch.children import ExitStatus
from lockstep.launch.processes import Processes
from lockstep.launch.ranks import run_ranks
from lockstep.runs.folder import RunFolder
from lockstep.trainer.recheck import Recheck


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("data") / "set", n_train=37, n_val=9)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("wrong", "from_step"), [(1, 3), pytest.param(0, 1, marks=SLOW), pytest.param(2, 2, marks=SLOW)]
)
def test_a_faulty_trainer_of_three_is_found_and_named(
    data: Path, tmp_path: Path, wrong: int, from_step: int
) -> None:
    (tmp_path / "checkpoints").mkdir()
    config = config_of(data, 3, recheck_every=1)
    results = run_ranks(train_faultily, 3, config, tmp_path, wrong, from_step, 10 * wrong + from_step)
    for rank, (name, text, steps) in enumerate(results):
        if rank == wrong:
            assert name == "DeviceFault" and from_step <= steps < from_step + KEYS["logical_ranks"]
            assert "is not that of two other trainers" in text
        else:
            assert name == "PeerLost" and f"trainer {wrong} computes wrong gradients" in text


def test_two_trainers_that_differ_are_both_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    config = config_of(data, 2, recheck_every=2)
    for name, text, _ in run_ranks(train_faultily, 2, config, tmp_path, 1, 1, 11):
        assert name == "UndecidedFault" and "only a third trainer could decide" in text


def test_true_trainers_are_not_accused_and_keep_their_bits(data: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "double": False, "model": "resnet20", "model_args": {"n": 1}}
    one = train(1, data, tmp_path / "one", **keys)
    three = train(3, data, tmp_path / "three", recheck_every=1, **keys)
    assert_same(three, one)
    assert newest(tmp_path / "three").exists()


def fail_as_faulty(control: Pipe, board: Any, is_faulty: bool) -> bool:
    if is_faulty:
        raise DeviceFault("its device computes wrong numbers")
    raise PeerLost("trainer 1", "finds that trainer 1 computes wrong gradients")


def fail_undecided(control: Pipe, board: Any) -> bool:
    raise UndecidedFault("trainers 0 and 1 compute different gradients")


def test_every_logical_rank_is_checked_in_turn_wherever_the_run_resumes() -> None:
    config = make_config(logical_ranks=4, recheck_every=2, global_batch_size=8)
    for first in range(1, 6):
        recheck = Recheck(config, *[None] * 4)  # type: ignore[arg-type]
        steps = [Order("train", 1, first + n, 8 * n, 8 * n + 8, 8 * n, 8 * n + 8) for n in range(8)]
        checked = [recheck.begin_step(order) for order in steps]
        assert checked[::2] == [None] * 4 and checked[1::2] == [(first - 1 + n) % 4 for n in range(4)]


@SLOW
def test_neither_of_two_trainers_that_differ_is_left_out() -> None:
    with Processes(20, has_main=True) as processes:
        for rank in range(2):
            processes.start(f"trainer {rank}", "test_recheck:fail_undecided", ())
        exit_status = processes.watch(lambda message: None)
    assert exit_status.code == 1 and not exit_status.lost and not exit_status.traceback
    assert "trainers 0 and 1 compute different gradients" in exit_status.message


@pytest.mark.parametrize(("on_failure", "devices"), [("restart", None), ("shrink", ("a", "c"))])
def test_a_faulty_device_is_not_started_again(
    tmp_path: Path, on_failure: str, devices: tuple[str, ...] | None
) -> None:
    config = make_config(
        devices=["a", "b", "c"], on_failure=on_failure, global_batch_size=12, logical_ranks=6
    )
    with open(tmp_path / "lock", "w") as lock:
        attempt = Attempt(config, RunFolder(tmp_path, None, [], lock))
    found = next_attempt(attempt, ExitStatus(1, "it is wrong", lost="trainer 1", is_faulty=True), 0)
    assert (found and found.config.devices) == devices


def test_the_launcher_names_the_faulty_trainer_and_can_go_on_without_it() -> None:
    with Processes(20, has_main=True) as processes:
        for rank in range(2):
            processes.start(f"trainer {rank}", "test_recheck:fail_as_faulty", (rank == 1,))
        exit_status = processes.watch(lambda message: None)
    assert exit_status.lost == "trainer 1" and exit_status.code == 1 and exit_status.is_faulty
    assert "trainer 1 (pid " in exit_status.message
    assert "its device computes wrong numbers" in exit_status.message
