"""The copy of a run's network: what is copied, and that nothing runs it without being asked."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import ROOT, make_config
from limits import limit
from PIL import Image

from lockstep.errors import UserError
from lockstep.export.__main__ import load_trained
from lockstep.runs.network_source import RunSources, changed_source, check_importable, keep_source

NETWORK = """
import torch

class Net(torch.nn.Module):
    input_size = 32

    def __init__(self, n_classes):
        super().__init__()
        self.layer = torch.nn.Linear(3 * 32 * 32, n_classes)

    def forward(self, images):
        return self.layer(images.flatten(1) / 128)
"""


def test_networks_of_files_are_copied_and_those_of_libraries_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "mine" / "net.py").write_text(NETWORK)
    (tmp_path / "alone.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    for model in ("mine.net:Net", "alone:Net", "smallnet", "timm:x", "torchvision:y", "nowhere:Net", "a b:C"):
        keep_source(tmp_path / "run", model)
    copies = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.py")}
    assert copies == {"network/mine/net.py", "network/alone.py", "network/models/smallnet.py"}
    assert (tmp_path / "run" / "network" / "mine" / "net.py").read_text() == NETWORK
    check_importable(tmp_path / "run", "alone:Net", "epoch_0001")
    with pytest.raises(UserError, match=r"nowhere:Net: can't be imported here.*PYTHONPATH=.*run/network"):
        check_importable(tmp_path / "run", "nowhere:Net", "epoch_0001")


def test_an_edited_network_is_noticed_whatever_the_runs_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer 0 may have copied the edited file, while another trainer had imported the file from before."""
    path = tmp_path / "edited_net.py"
    path.write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = RunSources(make_config(model="edited_net:Net"))
    assert source.describe_change() == ""
    path.write_text(NETWORK + "# edited\n")
    keep_source(tmp_path / "run", "edited_net:Net")
    assert source.describe_change() == f"{path}: the file of the network has changed since the run started"
    for model in ("edited_net:Net", "torchvision:y"):
        assert RunSources(make_config(model=model)).describe_change() == ""
    for key in ("loss", "augmentation", "data"):
        source = RunSources(make_config(**{key: "edited_net:function"}))
        path.write_text(path.read_text() + "# edited\n")
        assert f"{path}: the file of the {key}" in source.describe_change(key)
        assert source.describe_change("model") == ""


def test_a_checkpoint_keeps_the_source_it_was_trained_with_if_its_run_resumes_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run, model = tmp_path / "resumed_net.py", tmp_path / "run", "resumed_net:Net"
    monkeypatch.syspath_prepend(str(tmp_path))

    def begin(source: str, start: str) -> None:
        path.write_text(source)
        keep_source(run, model, start)

    def changed(*epochs: int) -> list[str]:
        found = [
            changed_source(run, model, f"epoch_{epoch:04d}").rpartition("(its copy: ")[2] for epoch in epochs
        ]
        return [text.removeprefix(f"{run}/").removesuffix("/resumed_net.py)") for text in found]

    begin(NETWORK, "")
    begin(NETWORK, "epoch_0001")
    begin(NETWORK + "# second\n", "epoch_0002")
    kept = "network-until-epoch_0002"
    assert changed(1, 2, 3) == [kept, kept, ""]
    assert (run / kept / "resumed_net.py").read_text() == NETWORK
    begin(NETWORK, "epoch_0002")  # from the same checkpoint again
    assert changed(1, 2, 3) == ["", "", ""]
    begin(NETWORK + "# third\n", "epoch_0004")
    assert changed(2, 4, 5) == [kept, "network-until-epoch_0004", ""]
    begin(NETWORK + "# fourth\n", "epoch_0001")  # the checkpoints after it were damaged
    assert changed(1, 2) == ["network-until-epoch_0001", ""]
    begin(NETWORK, "")
    assert changed(1, 2) == ["", ""] and list(run.glob("network*")) == [run / "network"]


def test_a_module_that_a_program_made_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no spec, for which find_spec raises ValueError."""
    monkeypatch.setitem(sys.modules, "made", ModuleType("made"))
    check_importable(tmp_path, "made:Net", "")
    (tmp_path / "network").mkdir()
    with pytest.raises(UserError, match="model made:Net: can't be imported here"):
        check_importable(tmp_path, "made:Net", "")


@pytest.mark.slow
def test_a_run_whose_network_has_changed_or_is_gone_names_its_copy(
    tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_net.py").write_text(NETWORK)

    def call(script: str, *words: object, path: Path | None = None) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(ROOT / script), *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit(60)
        )

    keys = ("n_classes=7", "n_epochs=1", "devices=[cpu]", "run_name=one", "rand_mirror=false")
    done = call("train.py", f"data_folder={shared_folder}", "model=my_net:Net", *keys, path=tmp_path)
    assert done.returncode == 0, done.stderr
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "a.png")
    assert "note: " not in call("classify.py", "a.png", path=tmp_path).stderr
    (tmp_path / "my_net.py").write_text(NETWORK.replace("128", "2"))
    note = f"{tmp_path}/my_net.py: the file of the network has changed"
    assert f"note: {note}" in call("classify.py", "a.png", path=tmp_path).stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_trained(tmp_path / "runs" / "one", "latest").notes[-1].startswith(note)
    (tmp_path / "my_net.py").unlink()
    refused = call("classify.py", "a.png")
    assert refused.returncode == 2
    assert f"set PYTHONPATH={tmp_path}/runs/one/network" in refused.stderr
    done = call("classify.py", "a.png", path=tmp_path / "runs" / "one" / "network")
    assert done.returncode == 0, done.stderr
