"""Cores and threads of a trainer: shares of cores never overlap, and square roots are prepared."""

import os
from pathlib import Path

import pytest
import torch
from conftest import Program, make_config
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.comm.group import World
from lockstep.errors import UserError
from lockstep.launch.status import StatusBoard
from lockstep.trainer import setup


def test_shares_are_whole_cores_with_their_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two cores with two threads each, numbered as is usual: siblings are far apart."""
    for cpu in range(8):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        for name, value in (("physical_package_id", cpu // 2 % 2), ("core_id", cpu % 2)):
            (tmp_path / f"cpu{cpu}" / "topology" / name).write_text(f"{value}\n")
    monkeypatch.setattr(setup, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    given: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: given.append(list(own)))
    for n_trainers in (2, 3, 4):
        for number in range(n_trainers):
            setup.pin_cores(number, n_trainers, 2)
    assert given[:2] == [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert given[2:5] == [[0, 4], [1, 5], [2, 6]]
    assert given[5:] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(UserError, match="3 trainers with 3 threads each need 9 cores, and 8 can be used"):
        setup.pin_cores(0, 3, 3)


class SquareRoots(TorchDispatchMode):
    """Records the dtypes of the square roots that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.sqrt.default:
            self.dtypes.append(args[0].dtype)
        return function(*args, **(kwargs or {}))


def test_one_thread_computes_the_first_square_roots_of_a_trainer() -> None:
    """Two threads that do have other bits now and then: Adam's first update of a large tensor."""
    (world,) = World.on_one_host(1)
    with SquareRoots() as roots, setup.computing(make_config(), world, StatusBoard.create()):
        assert roots.dtypes == [torch.float32, torch.float64]


def allowed(pid: int) -> str:
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "Cpus_allowed_list" in line
    ]
    return line.split()[-1]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_trainers_are_kept_apart_and_loaders_are_not(program: Program) -> None:
    words = ("n_epochs=2000", "pin_cores=true", "cpu_threads=1")
    running = program.start(*words)
    running.wait_for_text("epoch 1 ")
    found = {name: allowed(pid) for name, pid in running.pids().items()}
    assert found["trainer 0"] != found["trainer 1"]
    assert found["loader 0"] == found["loader 1"] == allowed(os.getpid())
    running.process.kill()
    many = program.run("pin_cores=true", "cpu_threads=999", name="many", code=2)
    assert "pin_cores: 2 trainers with 999 threads each need 1998 cores" in many.last_line()
