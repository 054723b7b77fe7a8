"""The parts of `python -m benchmarks.recipes`: the imbalanced set, and the plain loop's recipe."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, make_config, make_folder
from limits import limit
from PIL import Image

from benchmarks.recipes import plain
from benchmarks.recipes.imbalanced import RARE, thin_out
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset


def test_the_imbalanced_set_has_all_but_most_images_of_the_rare_classes(tmp_path: Path) -> None:
    source = open_dataset(make_config(data_folder=str(make_folder(tmp_path / "set", n_train=700))))
    thin_out(source, tmp_path / "thin")
    thin = open_dataset(make_config(data_folder=str(tmp_path / "thin")))
    before, after = (np.bincount(each.train.labels, minlength=7) for each in (source, thin))
    for label in range(7):
        assert after[label] <= before[label] // 20 if label in RARE else after[label] == before[label]
    assert (thin.val.labels == source.val.labels).all()
    first = hkl.read(thin.train.files[0].path)[0]
    kept = int(np.flatnonzero(~np.isin(source.train.labels, RARE))[0])
    assert thin.train.labels[0] in RARE or (first == hkl.read(source.train.files[0].path)[kept]).all()


def test_the_plain_loop_has_the_keys_of_the_configuration() -> None:
    keys = yaml.safe_load((ROOT / "config_small_images.yaml").read_text())
    ours = [keys[name] for name in ("global_batch_size", "learning_rate", "momentum", "weight_decay")]
    assert ours == [plain.BATCH, plain.RATE, plain.MOMENTUM, plain.DECAY]
    assert (keys["label_smoothing"], keys["warm_up_epochs"]) == (plain.SMOOTHING, plain.WARM_UP)
    assert keys["crop"] == "padded" and keys["rand_mirror"] and keys["lr_policy"] == "cosine"
    rates = [plain.rate_at(progress, 8) for progress in (0, 0.5, 1, 4.5, 8)]
    assert rates == pytest.approx([0.01, 0.055, 0.1, 0.05, 0])


def test_timms_schedule_is_that_of_the_plain_loop(torchvision: Any) -> None:
    pytest.importorskip("timm")
    from benchmarks.recipes.by_timm import schedule_of

    optimizer = torch.optim.SGD([torch.zeros(1)], plain.RATE)
    schedule, rates = schedule_of(optimizer, 8, 20), []
    for step in range(160):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([plain.rate_at(step / 20, 8) for step in range(160)])


def test_timms_loop_trains_on_few_images(torchvision: Any, tmp_path: Path) -> None:
    """Three classes that differ in brightness; timm drops the images that do not fill a batch."""
    pytest.importorskip("timm")
    noise = np.random.default_rng(0).integers(0, 100, (110, 32, 32, 3))
    for label in range(3):
        for number, pixels in enumerate((noise + 60 * label).astype(np.uint8)):
            folder = tmp_path / ("train" if number < 100 else "val") / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    command = [sys.executable, "-m", "benchmarks.recipes.by_timm", str(tmp_path), "3", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["error_top1"] <= 1 for line in lines)
    assert lines[0]["library"].startswith("timm ")


def test_pillows_crops_are_those_of_the_padded_image() -> None:
    random.seed(0)
    pixels = np.random.default_rng(0).integers(1, 256, (8, 8, 3), dtype=np.uint8)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)))
    windows = {
        padded[row : row + 8, column : column + 8].tobytes() for row in range(9) for column in range(9)
    }
    flipped = padded[:, ::-1]
    windows |= {
        flipped[row : row + 8, column : column + 8].tobytes() for row in range(9) for column in range(9)
    }
    found = {np.asarray(plain.change_by_pillow(Image.fromarray(pixels))).tobytes() for _ in range(2000)}
    assert found == windows


def test_a_part_that_is_measured_alone_leaves_the_other_on_the_page(tmp_path: Path) -> None:
    from benchmarks.recipes.__main__ import write  # with matplotlib

    write(tmp_path, {"recipe": ("### The recipe\n", {"recipes": {}})})
    before = json.loads((tmp_path / "recipes.json").read_text())
    page = write(tmp_path, {"imbalance": ("### The imbalanced set\n", {"imbalanced": {"none": [0.5]}})})
    after = json.loads((tmp_path / "recipes.json").read_text())
    assert after["recipe"] == before["recipe"] and after["imbalance"]["found"] == {
        "imbalanced": {"none": [0.5]}
    }
    text = page.read_text()
    assert text.index("### The recipe") < text.index("### The imbalanced set") and text.count("commit ") == 2
