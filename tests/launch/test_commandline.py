"""The command line: which run is resumed, where several folders may be meant."""

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lockstep.errors import UserError
from lockstep.launch import commandline
from lockstep.runs.folder import folder_to_resume


def make_run(folder: Path, settings: str, age: int) -> None:
    """Write the files by which a run is found: its config.yaml, and a checkpoint of so many seconds ago."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(settings)
    record = folder / "checkpoints" / "epoch_0001.json"
    record.write_text("{}")
    os.utime(record, (1e9 - age, 1e9 - age))


def resumed(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Path, int]:
    """Return the folder of the run that these words resume, and its n_epochs."""
    monkeypatch.setattr(sys, "argv", ["train.py", "devices=[cpu]", *words])
    config, _ = commandline.complete_config(commandline.parse_arguments("", ROOT / "config.yaml"))
    return folder_to_resume(config), config.n_epochs


def test_the_newest_run_may_be_one_that_began_at_an_older_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its config.yaml has the name of the run that the checkpoint is of, which is another run."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), "run_name: a\nn_epochs: 4", age=50)
    make_run(Path("runs/a-from-epoch_0001"), "run_name: a\nn_epochs: 5", age=10)
    assert resumed(monkeypatch, "resume_train=true") == (Path("runs/a-from-epoch_0001"), 5)
    assert resumed(monkeypatch, "resume_train=true", "run_name=a") == (Path("runs/a"), 4)


@pytest.mark.parametrize("words", ["resume_train=true", "resume_train=true run_name=b", "in a spec"])
def test_a_run_that_was_copied_is_resumed_in_the_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    """Its config.yaml has the place of the original, which another run may use by now."""
    monkeypatch.chdir(tmp_path)
    here = "runs" if words != "in a spec" else "copies"
    make_run(tmp_path / "first" / "a", f"weights_dir: {tmp_path}/first\nrun_name: a\nn_epochs: 4", age=10)
    make_run(Path(here, "b"), f"weights_dir: {tmp_path}/first\nrun_name: a\nn_epochs: 5", age=50)
    if words == "in a spec":
        make_run(Path("runs/c"), "run_name: c\nn_epochs: 6", age=5)
        Path("spec.yaml").write_text("weights_dir: copies")
        words = "--spec spec.yaml resume_train=true"
    assert resumed(monkeypatch, *words.split()) == (Path(here, "b"), 5)


def test_a_run_that_began_at_a_checkpoint_of_a_run_with_a_long_name_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"{'x' * 100}-from-epoch_0001"
    make_run(Path("runs", name), "n_epochs: 5", age=10)
    for words in (["resume_train=true"], ["resume_train=true", f"run_name={name}"]):
        assert resumed(monkeypatch, *words) == (Path("runs", name), 5)


@pytest.mark.parametrize("where", ["command line", "config.yaml"])
def test_a_resumed_run_has_the_hosts_and_the_epoch_of_config_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """The run's own file brings none. Each host resumed the run alone, and from the newest checkpoint."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), "n_epochs: 5\nnetwork: gloo\nload_epoch: 7\nhost_rank: 0", age=10)
    keys = {"n_hosts": 2, "host_rank": 1, "rendezvous": "10.0.0.1:29500", "rejoin_seconds": 60.0}
    words = ["resume_train: auto", "run_name: a"]
    lines = [f"{key}: {value}" for key, value in keys.items()] + (words if where == "config.yaml" else [])
    Path("config.yaml").write_text("\n".join([*lines, "n_epochs: 3"]))
    given = [] if where == "config.yaml" else [word.replace(": ", "=") for word in words]
    monkeypatch.setattr(sys, "argv", ["train.py", "devices=[cpu]", *given])
    arguments = commandline.parse_arguments("", ROOT / "config.yaml")
    config, _ = commandline.complete_config(arguments)
    for key, value in keys.items():
        assert getattr(arguments.config, key) == getattr(config, key) == value
    assert (config.n_epochs, config.network, config.load_epoch) == (5, "gloo", "latest")
    Path("config.yaml").write_text("load_epoch: 3")
    monkeypatch.setattr(sys, "argv", ["train.py", "devices=[cpu]", "resume_train=true", "run_name=a"])
    config, _ = commandline.complete_config(commandline.parse_arguments("", ROOT / "config.yaml"))
    assert (config.n_epochs, config.load_epoch, config.n_hosts) == (5, 3, 1)


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_run_without_its_settings_is_begun_anew_only_without_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_checkpoint: bool
) -> None:
    """A new run is refused in a folder with a checkpoint."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), "", age=10)
    Path("runs/a/config.yaml").unlink()
    if not has_checkpoint:
        Path("runs/a/checkpoints/epoch_0001.json").unlink()
    with pytest.raises(UserError, match=r"a: has no config\.yaml, .*: --config FILE resumes it") as error:
        resumed(monkeypatch, "resume_train=true", "run_name=a")
    assert ("or start it anew" in str(error.value)) is not has_checkpoint
