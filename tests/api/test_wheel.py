"""The wheel, installed into a fresh environment and used from another folder."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from limits import limit
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*words: object, cwd: Path, code: int = 0) -> str:
    command = [str(word) for word in words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel; other packages are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"lockstep"}
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    site = next((folder / "env" / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # without its own .pth files: not the repository
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    return python.parent


def write_images(folder: Path) -> None:
    random = np.random.default_rng(1)
    for split, n_images in (("train", 20), ("val", 6)):
        for name in ("cats", "dogs"):
            (folder / split / name).mkdir(parents=True)
            for number in range(n_images):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def test_the_command_works_from_another_folder(programs: Path, tmp_path: Path) -> None:
    lockstep = programs / "lockstep"
    write_images(tmp_path / "images")
    run(lockstep, "convert", "images", "mine", "--size", "36", cwd=tmp_path)
    small = ("n_epochs=1", "batch_size=8", "devices=[cpu]", "run_name=one")
    assert "done: " in run(lockstep, "train", "mine", *small, cwd=tmp_path)
    assert "12 images" in run(lockstep, "validate", "../runs/one", cwd=tmp_path / "images")
    assert "dogs" in run(lockstep, "predict", "images/val/dogs/1.png", "--run", "runs/one", cwd=tmp_path)
    run(lockstep, "report", "runs/one", cwd=tmp_path)
    run(lockstep, "export", "runs/one", "--to", "safetensors", cwd=tmp_path)
    for name in ("train", "trace", "init"):
        assert f"lockstep {name} " in run(lockstep, name, "--help", cwd=tmp_path), name
    assert "did you mean 'train'" in run(lockstep, "trian", cwd=tmp_path, code=2)


def test_a_folder_of_images_is_trained_on_in_one_step(programs: Path, tmp_path: Path) -> None:
    lockstep = programs / "lockstep"
    write_images(tmp_path / "images")
    (tmp_path / "images" / "train").rename(tmp_path / "mine")
    small = ("n_epochs=1", "batch_size=8", "devices=[cpu]", "run_name=one", "val_split=0.3")
    text = run(lockstep, "train", "mine", *small, cwd=tmp_path)
    assert "images by class: cats 20, dogs 20" in text and "done: " in text
    assert (tmp_path / "mine.lockstep" / "36x36_val_split_0.3" / "manifest.json").exists()
    run(lockstep, "predict", "mine", "--epoch", "best", "--out", "answers.csv", cwd=tmp_path)
    assert len((tmp_path / "answers.csv").read_text().splitlines()) == 41


def test_a_project_of_ones_own(programs: Path, tmp_path: Path) -> None:
    lockstep = programs / "lockstep"
    write_images(tmp_path / "images")
    run(lockstep, "init", "project", cwd=tmp_path)
    assert "already exists" in run(lockstep, "init", "project", cwd=tmp_path, code=2)
    project = tmp_path / "project"
    run(lockstep, "convert", "../images", "mine", "--size", "36", cwd=project)
    text = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(text.replace("n_epochs: 16", "n_epochs: 1"))
    words = ("model=my_network:Model", "batch_size=8", "devices=[cpu]", "run_name=one")
    assert "epoch 1" in run(lockstep, "train", "mine", *words, cwd=project)
    api = (
        "import lockstep; run = lockstep.train('mine', n_epochs=1, devices=['cpu'], batch_size=8, quiet=True)"
    )
    assert "True run-" in run(
        programs / "python", "-c", f"{api}; print(run.complete, run.folder.name)", cwd=project
    )
