"""The command `lockstep`: its arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lockstep import __version__, cli
from lockstep.cli import _with_data_folder
from lockstep.config import read_command_line


@pytest.mark.parametrize("name", ["photos", "photos #2", "2024", "a: b", "x=y", "ü 'q' \"d\"", "null", "[a]"])
def test_any_name_of_a_folder_is_that_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir(name)
    words = _with_data_folder([name, "n_epochs=1"])
    assert dict(read_command_line(words).values) == {"data_folder": name, "n_epochs": 1}


def test_keys_are_no_folder() -> None:
    assert _with_data_folder(["n_epochs=1"]) == ["n_epochs=1"]


@pytest.mark.parametrize("arguments", [["-m", "lockstep.cli", "predict", "a.png"], ["train.py"]])
def test_a_removed_working_directory_is_named(tmp_path: Path, arguments: list[str]) -> None:
    words = [str(ROOT / word) if word.endswith(".py") else word for word in arguments]
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, *words]
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "gone", env=environment)
    said = "lockstep: the working directory does not exist any more. Change to another one.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_ctrl_c_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "lockstep: stopped as asked\n"


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"
