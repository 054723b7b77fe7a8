"""The team: threads, profiles, errors between barriers, and many ranks."""

import gc
import os
import pstats
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import torch
from conftest import ROOT
from limits import limit
from synk_acts import Act
from synk_teams import largest_error, team
from threadpoolctl import threadpool_info

import lockstep.synk as synk
from lockstep.synk.extensions import train


def threads() -> list[int]:
    return [library["num_threads"] for library in threadpool_info()]


def test_blas_has_its_share_of_the_cores_until_close() -> None:
    synk.close()
    before = threads()
    with team(2, threads=1):
        assert set(threads()) == {1}
        worker = synk.session.current_team("").workers[0].process.pid
        assert b"OMP_NUM_THREADS=1" in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
    assert threads() == before


@pytest.mark.slow
def test_teams_one_after_the_other_cost_no_descriptors_and_values_stay() -> None:
    x, s = pt.vector("x"), pytensor.shared(np.zeros(3), name="s")
    numbers = []
    for number in range(2):
        with team(2):
            f = synk.function([x], (x.sum(), "sum"), updates=[(s, s + 1)])
            synk.distribute()
            data = synk.data(np.arange(4.0))
            assert f(data) == 6
        assert s.get_value().tolist() == [number + 1] * 3
        assert data[:].tolist() == data.data.tolist() == [0, 1, 2, 3]
        numbers.append(len(os.listdir("/proc/self/fd")))
    assert numbers[-1] <= numbers[0] + 1


@pytest.mark.slow
def test_a_module_is_collected_after_its_team() -> None:
    with team(2):
        net = synk.share(torch.nn.Linear(4, 2).double())
        f = synk.function(net, "gather")
        synk.distribute()
        f(np.ones((3, 4)))
        left = weakref.ref(net)
        del net, f
    gc.collect()
    assert left() is None


def test_what_a_program_holds_is_collected_after_its_team() -> None:
    with team(1):
        names: dict[str, Any] = {"synk": synk, "left": torch.nn.Linear(4, 2)}
        exec("f = synk.function(lambda x: x.sum(), 'sum'); synk.distribute(); f([1.0])", names)
        left = weakref.ref(names["left"])
        del names
    gc.collect()
    assert left() is None


@pytest.mark.slow
def test_profiles_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with team(3, profile_workers=True, master_rank=1):
        x = pt.vector("x")
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        f(np.ones(9))
    for rank in (0, 2):
        stats = pstats.Stats(str(tmp_path / f"synk_worker_{rank}.prof"))
        assert any(name == "compute" for _, _, name in stats.stats)  # type: ignore[attr-defined]
    assert not (tmp_path / "synk_worker_1.prof").exists()


def test_a_profile_that_can_not_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/proc")
    with team(2, profile_workers=True):
        pass
    error = "[Errno 2] No such file or directory: 'synk_worker_1.prof'"
    assert capfd.readouterr().err == f"lockstep.synk: the profile was not written: {error}\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_before_a_meeting_of_a_step_leaves_nobody_waiting(rank: int) -> None:
    """In Synkhronos a rank that failed between two barriers left all others in the second."""
    x, y, s = pt.vector("x"), pt.vector("y"), pytensor.shared(np.zeros(2), name="s")

    def rule(loss: Any, params: Any) -> Any:
        return [(s, s + loss)], [(s, s * 2)], s

    with team(2):
        bad = train.make_train_function(Act(rank, "raise")(x).mean() + 0 * y.sum(), [s], x, y, rule)
        good = train.make_train_function(x.mean() + 0 * y.sum(), [s], x, y, rule)
        synk.distribute()
        assert good(np.ones(4), np.ones(4)) == 1  # its first call is not one command
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="no good"):
                bad(np.ones(4), np.ones(4))
            synk.broadcast(s, np.zeros(2))
            assert good(np.ones(4), np.ones(4)) == 1
            assert synk.gather(s).tolist() == [[2, 2], [2, 2]]


def test_stored_rows_beside_inputs_need_no_batch_s() -> None:
    x, stored = pt.matrix("x"), pytensor.shared(np.zeros((1, 2)), name="stored")
    with team(3):
        f = synk.function([x], ((x * stored).sum(0), "sum"), sliceable_shareds=[stored])
        synk.distribute()
        values = np.random.default_rng(0).normal(size=(2, 10, 2))
        synk.scatter(stored, values[0])
        assert largest_error(f(values[1]), (values[0] * values[1]).sum(0)) < 1e-10
        assert largest_error(f(values[1], num_slices=3), (values[0] * values[1]).sum(0)) < 1e-10


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed() -> None:
    """Neither PyTensor nor torch by the program, nor torch by workers that compute graphs."""
    program = "import sys, lockstep.synk as synk; synk.fork(2); print({'torch', 'pytensor'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
    x = pt.vector("x")
    with team(2):
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        assert f(np.ones(4)) == 4
        worker = synk.session.current_team("").workers[0].process.pid
        mapped = Path(f"/proc/{worker}/maps").read_text()
        assert "numpy" in mapped and "libtorch" not in mapped


def test_nothing_is_written_into_the_package() -> None:
    def files() -> set[Path]:
        return {path for path in (ROOT / "lockstep").rglob("*") if "__pycache__" not in path.parts}

    before = files()
    x = pt.vector("x")
    with team(2):
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        assert f(np.ones(4)) == 4
        assert files() == before
    assert files() == before


def test_a_team_outlives_the_thread_that_made_it() -> None:
    """The kernel ends a worker with the thread that started it: that is none of the user's."""
    synk.close()
    x = pt.vector("x")
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        maker = threading.Thread(target=synk.fork, args=(2,))
        maker.start()
        maker.join()
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        assert f(np.ones(5)) == 5
    synk.close()


def test_threads_that_fork_at_once_start_one_team() -> None:
    synk.close()
    outcomes: list[Any] = []

    def start() -> None:
        try:
            outcomes.append(synk.fork(2))
        except RuntimeError as error:
            outcomes.append(str(error))

    starting = [threading.Thread(target=start) for _ in range(2)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join(limit(60))
    synk.close()
    assert sorted(outcomes, key=str) == [2, "fork(): there is a team already; close() ends it"]


def test_threads_of_the_user_take_turns() -> None:
    x = pt.vector("x")
    with team(2):
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        wrong: list[float] = []

        def call(value: float) -> None:
            wrong.extend(found for _ in range(20) if (found := float(f(np.full(6, value)))) != 6 * value)

        callers = [threading.Thread(target=call, args=(float(number),)) for number in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(limit(60))
        assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks_than_cores(size: int) -> None:
    x, s = pt.matrix("x"), pytensor.shared(np.zeros(50_000), name="s")
    with team(size):
        f = synk.function([x], [(pt.tanh(x).sum(0), "sum"), (x, "gather")])
        add = synk.function([x], updates=[(s, s + x.sum())])
        synk.distribute()
        values = np.random.default_rng(0).normal(size=(101, 40))
        for number in range(30):
            total, rows = f(
                values, batch=np.random.default_rng(number).permutation(101), num_slices=1 + number % 3
            )
            assert largest_error(total, np.tanh(values).sum(0)) < 1e-10
            assert len(rows) == 101
            add(values)
            synk.all_reduce(s)
        found = synk.gather(s)
        assert all(np.array_equal(value, found[0]) for value in found)
        assert largest_error(found[0], np.full(50_000, 30 * values.sum() / size)) < 1e-8


@pytest.mark.slow
def test_a_soak_of_10000_calls_costs_nothing() -> None:
    x, s = pt.vector("x"), pytensor.shared(np.zeros(1000), name="s")
    with team(2):
        f = synk.function([x], [(x.sum(), "sum"), (x, "gather")], updates=[(s, s + 1)])
        synk.distribute()
        pids = [os.getpid(), synk.session.current_team("").workers[0].process.pid]

        def soak(number: int) -> list[tuple[int, int]]:
            for i in range(number):
                assert f(np.ones(2000), batch=list(range(1 + i % 7)))[0] == 1 + i % 7
                if i % 10 == 0:
                    synk.all_reduce(s)
            sizes = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
            return list(zip(sizes, [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids], strict=True))

        before, after = soak(1000), soak(10_000)
        for (pages, descriptors), (more, now) in zip(before, after, strict=True):
            assert more <= pages + 500, "2 MB in pages"
            assert now <= descriptors
