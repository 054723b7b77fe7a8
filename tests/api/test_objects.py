"""Networks that are passed to lockstep.train as a class or function, and where it may be called."""

import multiprocessing
import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from limits import limit
from own_programs import PROGRAM, program_for
from PIL import Image
from torch import nn

import lockstep

pytestmark = pytest.mark.usefixtures("forked_runs")
KEYS: dict[str, Any] = {
    "n_classes": 7,
    "batch_size": 8,
    "shuffle_block": 4,
    "print_freq": 2,
    "cpu_threads": 1,
}
KEYS |= {"learning_rate": 1e-5}  # for networks that leave pixels as they are


WAYS = ("script", "standard input", "IPython")


def keys(folder: Path, **more: object) -> dict[str, Any]:
    return {"weights_dir": str(folder / "runs"), "devices": ["cpu"], "quiet": True, **KEYS, **more}


def small_net(n_classes: int, width: int = 2) -> nn.Module:
    """A function that makes a network."""
    net = nn.Sequential(nn.Conv2d(3, width, 3, 4), nn.Flatten(), nn.LazyLinear(n_classes))
    net(torch.zeros(1, 3, 32, 32))
    return net


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-c", *WAYS])
def test_a_class_of_the_main_program_trains(way: str, shared_folder: Path, tmp_path: Path) -> None:
    text = program_for(shared_folder, tmp_path)
    (tmp_path / "mine.py").write_text(text)
    words, given = [str(tmp_path / "mine.py")], None
    if way == "-c":
        words = ["-c", text]
    elif way == "standard input":
        words, given = ["-"], text
    elif way == "IPython":
        pytest.importorskip("IPython")
        words = ["-m", "IPython", "--no-banner", "--quick", "-c", text]
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *words],
        input=given,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["once", "Net", "675", "True"]


@pytest.mark.slow
def test_a_function_of_this_test_trains_predicts_and_resumes(shared_folder: Path, tmp_path: Path) -> None:
    def make_net(n_classes: int) -> nn.Module:
        return small_net(n_classes, width)

    width = 3
    run = lockstep.train(shared_folder, model=make_net, input_size=32, n_epochs=1, **keys(tmp_path))
    model: Any = run.model()
    assert model[0].out_channels == 3
    Image.new("RGB", (50, 40), "red").save(tmp_path / "red.png")
    assert len(run.predict(tmp_path / "red.png")) == 5
    with pytest.raises(lockstep.UserError, match=r"make_net was passed by a Python program .* Pass it again"):
        lockstep.resume(run.folder, n_epochs=2, quiet=True)
    assert len(lockstep.resume(run, n_epochs=2, quiet=True).history) == 2
    assert len(lockstep.resume(run.folder, model=make_net, n_epochs=3, quiet=True).history) == 3


@pytest.mark.slow
def test_a_function_that_can_be_imported_is_named(shared_folder: Path, tmp_path: Path) -> None:
    run = lockstep.train(shared_folder, model=small_net, input_size=32, n_epochs=1, **keys(tmp_path))
    assert f"model: {__name__}:small_net" in (run.folder / "config.yaml").read_text()
    assert len(lockstep.resume(run.folder, n_epochs=2, quiet=True).history) == 2


def test_a_network_that_cannot_be_pickled_is_named(shared_folder: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def make_net(n_classes: int) -> nn.Module:
        with lock:
            return small_net(n_classes)

    with pytest.raises(lockstep.UserError, match=r"model: .*make_net can't be pickled .* '_thread.lock'"):
        lockstep.train(shared_folder, model=make_net, **keys(tmp_path, n_epochs=1))
    assert not list((tmp_path / "runs").glob("*"))


def train_in_child(connection: Any, folder: Path, place: Path) -> None:
    try:
        lockstep.train(folder, **keys(place, n_epochs=1))
    except lockstep.UserError as error:
        connection.send(str(error))


@pytest.mark.slow
def test_a_call_in_a_child_process_is_refused(shared_folder: Path, tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=train_in_child, args=(theirs, shared_folder, tmp_path))
    child.start()
    assert ours.poll(limit(60))
    assert "called in a child process" in ours.recv()
    child.join()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_module_that_trains_when_the_trainers_import_it_is_refused(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text(
        f"import lockstep\nlockstep.train({str(shared_folder)!r}, n_epochs=1, n_classes=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(lockstep.UserError, match="called in a child process"):
        lockstep.train(shared_folder, model="careless:Net", **keys(tmp_path, n_epochs=1))


@pytest.mark.slow
def test_the_run_is_where_the_projects_configuration_says(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text("weights_dir: elsewhere\nn_epochs: 1\n")
    monkeypatch.chdir(tmp_path)
    run = lockstep.train(shared_folder, devices=["cpu"], quiet=True, **KEYS)
    assert run.folder.parent == tmp_path / "elsewhere"
    assert len(run.history) == 1


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_a_bar_unless_it_is_quiet(quiet: bool, shared_folder: Path, tmp_path: Path) -> None:
    text = f"{PROGRAM}\nprint('end', flush=True)"
    text = text.replace("DATA", repr(str(shared_folder))).replace("FOLDER", repr(str(tmp_path / "runs")))
    text = text.replace("quiet=True", f"quiet={quiet}").replace("n_epochs=1", "n_epochs=9")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # EIO: the program has ended
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert process.wait(limit(60)) == 0, shown.decode()
    assert (b"epoch 1/9: " in shown and b"left, run " in shown) is not quiet
    assert b"\x1e" not in shown
    assert b"end" in shown
