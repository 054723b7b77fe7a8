"""The core needs no package of an extra, and a user of a feature without its extra reads the command."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from limits import limit

from lockstep.errors import UserError
from lockstep.extras import install_command, require

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
BLOCKED = ("matplotlib", "sklearn", "scipy", "pytensor", "onnx", "onnxscript", "pycuda")
MODULES = (
    *("train", "train_funcs", "proc_load", "validate", "classify", "lockstep.cli", "lockstep.api"),
    *("lockstep.export.__main__", "lockstep.report.__main__", "lockstep.doctor.__main__", "lockstep.trace"),
    *("preprocessing.make_hkl", "preprocessing.converting", "preprocessing.own_images"),
    *("preprocessing.inspect_data", "preprocessing.make_digits", "lockstep.flow"),
)
WITHOUT = f"""
import importlib, importlib.util, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {BLOCKED} else find_spec(name, *rest)
"""


def call(code: str, *words: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT + code, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(100))


@pytest.mark.slow
def test_the_core_works_without_any_extra() -> None:
    done = call("for name in sys.argv[1:]: importlib.import_module(name)", *MODULES)
    assert done.returncode == 0, done.stderr
    blocked = call("import matplotlib")
    assert blocked.returncode == 1 and "No module named 'matplotlib'" in blocked.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from lockstep.report.__main__ import main; sys.exit(main(['x']))", "the report needs matplotlib"),
        (
            "from preprocessing.make_digits import main; sys.argv[1:] = ['x']; sys.exit(main())",
            "making the digits needs sklearn",
        ),
    ],
)
def test_a_feature_without_its_extra_names_the_command(code: str, message: str) -> None:
    done = call(code)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "python -m pip install -c " in done.stderr


def test_every_extra_exists_and_all_has_all_but_cuda() -> None:
    assert {"report", "demo", "synk", "cuda", "onnx", "all", "imagenet"} < EXTRAS.keys()
    (everything,) = EXTRAS["all"]
    named = set(everything.removeprefix("lockstep[").removesuffix("]").split(","))
    assert named == EXTRAS.keys() - {"all", "dev", "cuda"}
    core = {requirement.partition(">")[0] for requirement in PROJECT["dependencies"]}
    assert not core & {"matplotlib", "scikit-learn", "scipy"}


def test_the_command_fits_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("onnx") == f"python -m pip install -c {ROOT}/constraints.txt -e '{ROOT}[onnx]'"
    monkeypatch.setattr("lockstep.extras.program_folder", lambda: tmp_path)
    assert install_command("onnx") == "python -m pip install 'lockstep[onnx]'"
    with pytest.raises(
        UserError, match=r"^this needs nowhere. Install: python -m pip install 'lockstep\[x\]'"
    ):
        require("this", "x", "os", "nowhere")
