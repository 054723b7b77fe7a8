"""The recipes that are shipped as configuration files: their values have sources, and they train."""

import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Program, make_folder
from limits import limit

from lockstep.config import read_yaml, resolve

RECIPES = sorted(ROOT.glob("config_*.yaml"))
# What is not a recipe's choice: the network, places, the order of images and output.
WITHOUT_SOURCE = {"model", "seed", "data_folder", "shuffle", "shuffle_block"}
WITHOUT_SOURCE |= {"snapshot_freq", "keep_checkpoints", "print_freq"}
SOURCED = [ROOT / f"config_{name}.yaml" for name in ("resnet50", "small_images")]
# The values in brackets, which are for hundreds of epochs.
STRONG = ("auto_augment=trivial", "random_erasing=0.1", "mixup=0.2", "cutmix=1")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_configuration(path: Path) -> None:
    config, _ = resolve([read_yaml(path)])
    assert config.model in path.read_text()


@pytest.mark.parametrize("path", SOURCED, ids=lambda path: path.stem)
def test_every_value_of_a_recipe_has_its_source(path: Path) -> None:
    """A paper, or that it is this project's choice, or another key's opposite."""
    off = (0, False, None)
    keys = yaml.safe_load(path.read_text())
    for line in path.read_text().splitlines():
        key = line.partition(":")[0]
        if key in keys and key not in WITHOUT_SOURCE and keys[key] not in off:
            assert re.search(r"  # .*([A-Z]\w+|our choice|for minutes|\[1024\])", line), line


def train(program: Program, folder: Path, *words: str) -> dict[str, float]:
    """Run train.py for a few steps, and return the last validation."""
    few = "n_epochs=2", "warm_up_epochs=0.5", "print_freq=1", "global_batch_size=4", "devices=[cpu]"
    few += (f"timeout={limit(60):.0f}",)
    running = program.run(f"data_folder={folder}", *few, *words)
    assert list((running.run_folder / "checkpoints").glob("epoch_0002.safetensors"))
    events = [json.loads(line) for line in (running.run_folder / "log.jsonl").read_text().splitlines()]
    last: dict[str, float] = [event for event in events if event["event"] == "validated"][-1]
    return last


def test_the_recipe_for_small_images_trains(program: Program, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set", n_train=12, n_val=5, size=32)
    last = train(program, folder, "--config", str(ROOT / "config_small_images.yaml"))
    assert last["epoch"] == 2 and last["loss"] < 100


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), STRONG], ids=["90 epochs", "600 epochs"])
def test_the_recipe_for_imagenet_trains(program: Program, tmp_path: Path, words: tuple[str, ...]) -> None:
    """ResNet-50 on a few images of 256 x 256 pixels; in fp32, since bf16 takes minutes on some processors."""
    folder = make_folder(tmp_path / "set", n_train=4, n_val=1, size=256)
    config = str(ROOT / "config_resnet50.yaml")
    last = train(program, folder, "--config", config, "precision=fp32", *words)
    assert last["epoch"] == 2 and last["loss"] < 100
