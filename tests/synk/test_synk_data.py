"""Data: arrays that all ranks, and other processes of the user, can read."""

import gc
import itertools
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytensor.tensor as pt
import pytest
from limits import limit
from synk_teams import team

import lockstep.synk as synk
from lockstep.synk import session


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[int]:
    with team(2) as size:
        yield size


def test_it_is_like_an_array() -> None:
    values = np.arange(12.0).reshape(4, 3)
    data = synk.data(values, name="x")
    assert (data.dtype, data.ndim, data.shape, data.size, len(data)) == (values.dtype, 2, (4, 3), 12, 4)
    assert (data.alloc_size, data.name, data.minibatch) == (12, "x", False)
    assert np.array_equal(data[1:3], values[1:3])
    data[2] = 0
    data[:, 0] += 1
    assert np.asarray(data).tolist() == [[1, 1, 2], [4, 4, 5], [1, 0, 0], [10, 10, 11]]
    assert np.shares_memory(data.data, data[:])


def test_growing_keeps_the_rows_and_what_fits_keeps_its_memory() -> None:
    data = synk.data(np.arange(6).reshape(3, 2), oversize=1.5)
    assert data.alloc_size == 9
    before = data.data
    data.set_length(4)
    assert np.shares_memory(data.data, before), "it had room"
    data.set_length(100)
    assert not np.shares_memory(data.data, before)
    assert data[:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    data.set_shape((2, 5))
    assert data.alloc_size == 200
    data.free_memory()
    assert (data.alloc_size, data.shape) == (0, (0, 0))
    data.set_value(np.ones((1, 2), int))
    assert data.alloc_size == 2


def test_where_the_dtype_comes_from() -> None:
    x = pt.fmatrix("x")
    assert synk.data(x).dtype == "float32"
    assert synk.data(x).name == "x"
    assert synk.data([[1, 2.5]], var=x)[0].tolist() == [1, 2.5]
    assert synk.data(np.ones(3, "float32"), dtype="float64").dtype == "float64", "an explicit dtype is obeyed"
    assert synk.data(np.ones(3), dtype="float32", force_cast=True).dtype == "float32"
    assert synk.data(dtype="int8", shape=(3, 4)).shape == (3, 4)
    assert synk.data(dtype="int8", shape=3).shape == (3,), "as in NumPy"
    roomy = synk.data(np.ones((2, 3)), shape=(4, 3))
    assert (roomy.shape, roomy.alloc_size) == ((2, 3), 12)
    assert synk.data(dtype=bool, ndim=1).ndim == 1
    assert synk.data(np.asfortranarray(np.arange(6).reshape(2, 3)))[:].flags.c_contiguous


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (synk.data, TypeError, "dtype and ndim"),
        (lambda: synk.data(dtype="f4"), TypeError, "dtype and ndim"),
        (lambda: synk.data(np.ones(3), dtype="f4", name="x"), TypeError, "x is float32.*force_cast"),
        (lambda: synk.data([1.5], dtype=int), TypeError, "force_cast"),
        (
            lambda: synk.data([1, 3_000_000_000], dtype="int32", name="x"),
            TypeError,
            "x is int32, which holds -2147483648 to 2147483647, not 3000000000: .*force_cast",
        ),
        (lambda: synk.data([-129], dtype="int8"), TypeError, "not -129"),
        (lambda: synk.data([2**63], dtype="int64"), TypeError, "not 9223372036854775808"),
        (lambda: synk.data(np.ones(3, "i4")).set_value([2**31] * 3), TypeError, "not 2147483648"),
        (lambda: synk.data([None], dtype=object), TypeError, "Python objects"),
        (
            lambda: synk.data(np.ones(3), oversize=2.1, name="x"),
            ValueError,
            r"x: oversize=2.1 is outside \[1, 2\]",
        ),
        (lambda: synk.data(np.ones(3), oversize=0.9), ValueError, "oversize"),
        (lambda: synk.data(np.ones(3)).set_length(0), ValueError, "one row"),
        (lambda: synk.data(np.ones((0, 3))), ValueError, "one row"),
        (
            lambda: synk.data(np.ones(3), name="x").set_shape((2.5,)),
            TypeError,
            "x: the length 2.5",
        ),
        (lambda: synk.data(np.ones(3), name="x").set_shape(2.5), TypeError, "x: the length 2.5"),
        (lambda: synk.data(np.ones(3)).set_shape((3, 1)), ValueError, "1 dimensions"),
        (lambda: synk.data(np.ones(3)).set_value(np.ones((3, 1))), ValueError, "1 dimensions"),
        (lambda: synk.data(np.ones(3), ndim=2), ValueError, "2 dimensions"),
        (lambda: synk.data(dtype="f4", ndim=3, shape=(1, 2)), ValueError, "3 dimensions"),
        (
            lambda: synk.data(dtype="u1", shape=(1 << 50,), name="huge"),
            MemoryError,
            r"\(data 'huge'\): .* MiB are allowed. Use less data or fewer ranks.$",
        ),
        (lambda: synk.data(dtype="u1", shape=(1 << 32,) * 2, name="huge"), MemoryError, "data 'huge'"),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_whole_numbers_wrap_only_if_asked_to() -> None:
    assert synk.data([3_000_000_000], dtype="int32", force_cast=True)[:].tolist() == [-1294967296]
    assert synk.data([127, -128], dtype="int8")[:].tolist() == [127, -128]


def write(array: np.ndarray) -> None:
    array[1] = os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_another_process_of_the_users_has_the_same_memory(method: str) -> None:
    data = synk.data(np.zeros((3, 2)))
    process = multiprocessing.get_context(method).Process(target=write, args=(data.data,))
    process.start()
    process.join(limit(60))
    assert data[1].tolist() == [process.pid] * 2
    copy = pickle.loads(pickle.dumps(data.data))
    assert type(copy) is np.ndarray and copy[1, 0] == process.pid, "elsewhere it is pickled by value"


def test_memory_that_belongs_to_no_data_is_not_passed_on() -> None:
    data = synk.data(np.zeros(2))
    former, alone = data.data, synk.data(np.zeros(2)).data
    data.set_value(np.zeros(100_000))
    for array in (former, alone):
        process = multiprocessing.get_context("spawn").Process(target=write, args=(array,))
        with pytest.raises(ValueError, match="keep the Data, and take its"):
            process.start()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1])


@pytest.mark.slow
def test_a_data_that_is_collected_is_let_go_by_all() -> None:
    x = pt.vector("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    worker = session.current_team("").workers[0].process.pid
    f(synk.data(np.ones(1000)))
    before = [descriptors(pid) for pid in (os.getpid(), worker)]
    for number in range(300):
        assert f(synk.data(np.full(1000, float(number)))) == 1000 * number
    gc.collect()
    f(synk.data(np.ones(1000)))
    after = [descriptors(pid) for pid in (os.getpid(), worker)]
    assert all(now <= then + 4 for now, then in zip(after, before, strict=True))


def test_functions_that_are_collected_release_the_memory_of_their_inputs() -> None:
    x = pt.vector("x")
    before = descriptors(os.getpid())
    for _ in range(8):
        f = synk.function([x], (x.sum(), "sum"))
        synk.distribute()
        assert f(np.ones(1000)) == 1000
    gc.collect()
    assert descriptors(os.getpid()) <= before + 4


@pytest.mark.slow
def test_3000_data_and_calls_in_a_loop_cost_no_memory_or_descriptors() -> None:
    x = pt.vector("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    pids = [os.getpid(), session.current_team("").workers[0].process.pid]

    def loop(number: int) -> list[tuple[int, int]]:
        for i in range(number):
            assert f(synk.data(np.full(50_000, 2.0)), batch=1 + i % 100) == 2 * (1 + i % 100)
        return [(descriptors(pid), resident(pid)) for pid in pids]

    before, after = loop(500), loop(3000)
    for (then, memory), (now, more) in zip(before, after, strict=True):
        assert now <= then + 2
        assert more <= memory + 2000, "8 MB in pages"


@pytest.mark.parametrize("has_input", [False, True])
def test_blocks_that_a_worker_could_not_open_are_sent_again(has_input: bool) -> None:
    x = pt.vector("x")
    f = synk.function([x], (2 * x, "gather"))
    synk.distribute()
    data = synk.data(np.ones(2_000_000 if has_input else 1_000_000))
    if has_input:  # then only the block for its results is missing
        f(data, batch=4)
    worker = session.current_team("").workers[0].process.pid
    used = {int(number) for number in os.listdir(f"/proc/{worker}/fd")}
    free = next(number for number in itertools.count() if number not in used)
    before = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (free, before[1]))
    with pytest.raises(OSError, match="too many open files"):
        f(data)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, before)
    assert f(data).sum() == 2 * len(data)


@pytest.mark.slow
def test_a_limit_on_descriptors_names_the_data(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import itertools, os, resource
            import numpy as np, pytensor.tensor as pt
            import lockstep.synk as synk
            synk.fork(2)
            x = pt.vector("x")
            f = synk.function([x], (x.sum(), "sum"))
            synk.distribute()
            kept = [synk.data(np.ones(3), name=f"data number {i}") for i in range(5)]
            f(kept[0])
            worker = synk.session.current_team("").workers[0].process.pid
            used = {int(number) for number in os.listdir(f"/proc/{worker}/fd")}
            free = next(number for number in itertools.count() if number not in used)
            resource.prlimit(worker, resource.RLIMIT_NOFILE, (free, free))
            try:
                f(kept[1])
            except OSError as error:
                print("worker:", error)
            print("goes on:", float(f(kept[0])))
            resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
            try:
                while True:
                    kept.append(synk.data(np.ones(3), name=f"data number {len(kept)}"))
            except OSError as error:
                print("here:", error)
            print("goes on:", float(f(kept[0])))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
            del kept[2:]
            try:
                synk.data(np.ones(1 << 20), name="too large")
            except MemoryError as error:
                print("limited:", error)
            """
        )
    )
    environment = {**os.environ, "PYTENSOR_FLAGS": "mode=FAST_COMPILE"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=limit(100), env=environment
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "too many open files" in lines[0] and "data number 1" in lines[0]
    assert lines[1] == lines[3] == "goes on: 3.0"
    assert "data number" in lines[2] and "ulimit -n" in lines[2]
    assert "too large" in lines[4] and "ulimit -f" in lines[4]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 40
