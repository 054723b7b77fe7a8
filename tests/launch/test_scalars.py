"""Event files for TensorBoard, read back by TensorBoard."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Program, make_config
from limits import limit

from lockstep.comm.group import World
from lockstep.comm.messages import Progress, Validated
from lockstep.errors import UserError
from lockstep.extras import require
from lockstep.launch import scalars
from lockstep.loading.orders import Orders


def reader_of(folder: Path) -> Callable[[str], dict[int, float]]:
    """Return a function that reads a scalar by step from the event files of a run's folder."""
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return lambda name: {event.step: float(make_ndarray(event.tensor_proto)) for event in read.Tensors(name)}


@pytest.mark.slow
def test_the_numbers_of_a_run_are_in_its_event_files(program: Program) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    running = program.run("n_epochs=2", "tensorboard=true")
    numbers = reader_of(running.run_folder)
    # 90 images in minibatches of 16: 6 steps, a line every 2
    assert list(numbers("loss/training")) == [2, 4, 6, 8, 10, 12]
    assert numbers("learning_rate")[12] == pytest.approx(0.02)
    assert list(numbers("error/validation_top1")) == [6, 12]
    assert f"{numbers('error/validation_top1')[12]:.2%} top-1" in running.last_line()
    assert 0 < numbers("share_of_time/compute")[2] <= 1


def test_a_step_is_the_optimizers_however_many_minibatches_it_has(tmp_path: Path) -> None:
    """90 images in steps of 3 x 2 x 8: two an epoch, so the third step is the second epoch's first."""
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    config = make_config(devices=["cpu", "cpu"], batch_size=8, accumulate=3)
    orders = Orders(config, World.on_one_host(2)[0], 90, 33)
    written = scalars.Scalars(tmp_path, orders.n_steps("train"))
    for epoch in (1, 2):
        for step in (1, 2):
            written.take(Progress(epoch, step, 2, 0.1, 1.0, 0.5, 100.0, 0.1, {}))
        written.take(Validated(epoch, 1.0, 0.5, 0.1, 33, 1.0))
    written.close()
    numbers = reader_of(tmp_path)
    assert list(numbers("loss/training")) == [1, 2, 3, 4]
    assert list(numbers("loss/validation")) == [2, 4]


def test_the_launcher_does_without_torch() -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    code = "import sys, train; from tensorboard.summary import Writer; "
    code += "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=limit(60)).returncode == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"needs tensorboard. Install: .*pip install -c .*\[tensorboard\]"):
        require("tensorboard: true", "tensorboard", "tensorboard")


def test_without_the_package_no_run_begins(program: Program) -> None:
    if importlib.util.find_spec("tensorboard"):
        pytest.skip("the package tensorboard is there")
    refused = program.run("tensorboard=true", code=2)
    assert "tensorboard: true needs tensorboard" in refused.last_line() and not refused.run_folder.exists()


@pytest.mark.parametrize("name", ["file", "\udcff"])
def test_a_place_where_no_event_files_can_be_made_is_named(tmp_path: Path, name: str) -> None:
    """A file has the folder's name, or TensorBoard can't use the path."""
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "tensorboard").touch()
    with pytest.raises(UserError, match="tensorboard: event files can't be made in"):
        scalars.Scalars(tmp_path / name, 1)
