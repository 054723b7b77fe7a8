"""Event files for TensorBoard, read back by TensorBoard."""

import subprocess
import sys

import pytest
from conftest import ROOT, Program
from limits import limit

from lockstep import scalars
from lockstep.errors import UserError


def test_the_numbers_of_a_run_are_in_its_event_files(program: Program) -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    running = program.run("n_epochs=2", "tensorboard=true")
    read = EventAccumulator(str(running.run_folder / "tensorboard"))
    read.Reload()

    def numbers(name: str) -> dict[int, float]:
        return {event.step: float(make_ndarray(event.tensor_proto)) for event in read.Tensors(name)}

    # 90 pictures in minibatches of 16: 6 steps, told every 2
    assert list(numbers("cost/training")) == [2, 4, 6, 8, 10, 12]
    assert numbers("learning_rate")[12] == pytest.approx(0.02)
    assert list(numbers("error/validation_top1")) == [6, 12]
    assert f"{numbers('error/validation_top1')[12]:.2%} top-1" in running.last_line()
    assert 0 < numbers("share_of_time/compute")[2] <= 1


def test_the_launcher_does_without_torch() -> None:
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    code = "import sys, train; from tensorboard.summary import Writer; "
    code += "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=limit(60)).returncode == 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        scalars.check_installed()


def test_without_the_package_no_run_begins(program: Program) -> None:
    if scalars.is_installed():
        pytest.skip("the package tensorboard is there")
    refused = program.run("tensorboard=true", code=2)
    assert "needs the package tensorboard" in refused.last_line() and not refused.run_folder.exists()
