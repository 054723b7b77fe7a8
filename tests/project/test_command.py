"""The command `lockstep`: its arguments."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from forked_programs import forked

from lockstep import __version__, cli
from lockstep.cli import _with_data_folder
from lockstep.config import read_command_line
from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths
from lockstep.launch.commandline import parse_arguments


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


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("-m lockstep.cli predict", "lockstep predict"),
        ("-m lockstep.cli report", "lockstep report"),
        ("-m lockstep.cli train", "lockstep train"),
        ("validate.py", "validate.py"),
        ("-m lockstep.report", "python -m lockstep.report"),
    ],
)
def test_a_help_text_has_the_name_by_which_the_program_was_called(words: str, name: str) -> None:
    command = forked([sys.executable, *words.split(), "--help"])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert f"usage: {name} [-h]" in done.stdout


@pytest.mark.slow
def test_keys_are_not_required(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "validate.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.endswith("the following arguments are required: RUN\n")


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="its module socket can't be imported there")
@pytest.mark.parametrize("arguments", [["-m", "lockstep.cli", "predict", "a.png"], ["train.py"]])
def test_a_removed_working_directory_is_named(tmp_path: Path, arguments: list[str]) -> None:
    words = [str(ROOT / word) if word.endswith(".py") else word for word in arguments]
    command = ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", sys.executable, *words]
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "gone", env=environment)
    said = "lockstep: the working directory does not exist any more. Change to another one.\n"
    assert (done.returncode, done.stderr) == (2, said)


def test_init_that_fails_leaves_no_unfinished_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def fill_the_disk(source: Path, target: Path) -> None:
        copyfile(source, target)
        if target.name != "config.yaml":
            os.truncate(target, 0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", fill_the_disk)
    for is_the_users in (False, True):
        with pytest.raises(UserError, match="project: can't be written: No space left on device"):
            cli._init([str(tmp_path / "project")])
        assert [path.name for path in tmp_path.iterdir()] == ["project"] * is_the_users
        (tmp_path / "project").mkdir(exist_ok=True)
    assert list((tmp_path / "project").iterdir()) == []
    monkeypatch.undo()
    assert cli._init([str(tmp_path / "project")]) == 0


@pytest.mark.parametrize("words", ["init LONG", "resize LONG +1", "trace LONG"])
def test_a_name_that_is_too_long_is_named(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    try:
        code: object = cli.main(words.replace("LONG", "x" * 300).split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert (
        f"{'x' * 200}...: can't be used: File name too long. Give a shorter path" in capsys.readouterr().err
    )


def test_keys_with_paths_that_are_too_long_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", f"weights_dir={'x' * 300}", "resume_train=true", "run_name=a"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(UserError, match=r"xxx\.\.\.: can't be used: File name too long"):
        parse_arguments("", ROOT / "config.yaml")


def test_a_file_in_a_folder_that_may_not_be_searched_is_named() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "closed/a")
    with pytest.raises(UserError, match="closed/a: can't be used: Permission denied"):
        raise_refusing(denied)
    of_process = PermissionError(errno.EPERM, "Operation not permitted")
    with pytest.raises(PermissionError):
        raise_refusing(of_process)


@refusing_unusable_paths()
def raise_refusing(error: OSError) -> None:
    raise error


def test_ctrl_c_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "lockstep: stopped as asked\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("-m lockstep.cli --help", 141),
        pytest.param("-m lockstep.cli train --help", 141, marks=pytest.mark.slow),
        pytest.param("-m lockstep.cli init folder", 141, marks=pytest.mark.slow),
        pytest.param("-m lockstep.doctor", 141, marks=pytest.mark.slow),
        pytest.param("-m lockstep.launch.resize", 141, marks=pytest.mark.slow),
        pytest.param("-m models", 141, marks=pytest.mark.slow),
        pytest.param("validate.py --help", 141, marks=pytest.mark.slow),
        ("preprocessing/make_hkl.py --help", 141),
        ("train.py --help", 0),  # its work matters more than its output
    ],
)
def test_a_reader_of_the_output_that_exits_ends_a_command_quietly(
    command: str, code: int, tmp_path: Path
) -> None:
    words = [str(ROOT / word) if word.endswith(".py") else word for word in command.split()]
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, *words], stdout=output, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
        )
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("command", ["-m lockstep.cli --help", "verify.py --help", "-m lockstep.doctor"])
def test_a_full_disk_below_the_output_ends_a_command_in_one_line(command: str, tmp_path: Path) -> None:
    words = [str(ROOT / word) if word.endswith(".py") else word for word in command.split()]
    with open("/dev/full", "wb") as output:
        done = subprocess.run(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    line = b"lockstep: standard output can't be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_run_continues_when_the_reader_of_its_output_exits(tmp_path: Path) -> None:
    program = "from lockstep.text import handle_closed_pipe; handle_closed_pipe(ends_program=False);" + (
        "print('lost'); print('lost, too'); open('done', 'w').close()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(writing, "wb") as output:
        subprocess.run(
            [sys.executable, "-c", program], stdout=output, cwd=tmp_path, env=environment, check=True
        )
    assert (tmp_path / "done").exists()


def test_streams_that_are_closed_lead_to_no_file(tmp_path: Path) -> None:
    """Without them, the first file would have descriptor 0 and the third what the program prints."""
    program = (
        "from lockstep.text import handle_closed_pipe; handle_closed_pipe(); import os, sys;"
        "files = [open(name, 'w') for name in 'abc']; print('out'); print('err', file=sys.stderr);"
        "os.write(1, b'out'); os.write(2, b'err'); os.system('echo out; echo err >&2');"
        "print(sys.stderr.isatty(), [file.fileno() for file in files], file=files[0])"
    )
    command = f'{sys.executable} -c "{program}" <&- >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
    assert [(tmp_path / name).read_text() for name in "abc"] == ["False [3, 4, 5]\n", "", ""]


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"
