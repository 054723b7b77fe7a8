"""The examples of docs/using-a-trained-network.md, each run as it stands, in its own process."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Program
from limits import limit
from own_folders import write_classes
from PIL import Image

from lockstep.export.__main__ import export, load_trained

PAGE = (ROOT / "docs" / "using-a-trained-network.md").read_text()
SECTIONS = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
EXAMPLES = [
    (section.partition("\n")[0], code)
    for section in SECTIONS
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
]
NETWORK = '''
from torch import nn


class Model(nn.Module):
    """A chain of layers, which theano_alexnet's folder can hold."""

    input_size = 32

    def __init__(self, n_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.fc = nn.Linear(8 * 8 * 8, n_classes)

    def forward(self, images):
        return self.fc(self.conv(images / 128).relu().flatten(1))
'''
NEEDS = {"An .onnx file": "onnxruntime"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its exports, a network and a photograph."""
    folder = tmp_path_factory.mktemp("using")
    (folder / "my_network.py").write_text(NETWORK)
    images = write_classes(folder / "images", {"cat": 30, "dog": 30, "emu": 30})
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    keys = ("n_classes=null", "n_epochs=2", "model=my_network:Model", "devices=[cpu]", "snapshot_freq=1")
    run = Program(images, folder).run(*keys, "val_split=0.3", environment=environment, name="try1")
    assert run.run_folder == folder / "runs" / "try1"
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        trained = load_trained(run.run_folder, "latest")
        export(trained, "safetensors", folder / "net.safetensors")
        export(trained, "torchvision", folder / "net.pth")
        export(trained, "theano_alexnet", folder / "theirs")
        if all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript")):
            export(trained, "onnx", folder / "net.onnx")
        del sys.modules["my_network"]
    Image.new("RGB", (60, 40), (200, 30, 30)).save(folder / "photo.jpg")
    return folder


def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == 6


@pytest.mark.parametrize(
    ("title", "code"),
    [
        pytest.param(*each, id=each[0], marks=[pytest.mark.slow] if each[0].startswith("From Python") else [])
        for each in EXAMPLES
    ],
)
@pytest.mark.slow
def test_an_example_runs(title: str, code: str, place: Path) -> None:
    if title in NEEDS:
        pytest.importorskip(NEEDS[title], reason=f"needs {NEEDS[title]}")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr, done.stderr
    if title == "A .safetensors file":
        assert done.stdout.split()[0] in ("cat", "dog", "emu")
