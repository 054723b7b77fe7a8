"""Conversion of a folder of images that `data_folder` names, before a run starts.

preprocessing/own_images.py converts, in its own process: the launcher imports no torch. That process
ends with the launcher, and its work is resumed by the next run.
"""

import dataclasses
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path

from lockstep.config import Config, to_yaml
from lockstep.data import old_folders
from lockstep.errors import PeerLost, UserError
from lockstep.launch.programs import start_program
from lockstep.signals import Interrupts

_OF_DATASETS = ("manifest.json", "train_hkl", "val_hkl", "labels/train_labels.npy", "misc/img_mean.npy")


def with_converted_images(config: Config, interrupts: Interrupts) -> Config:
    """Return the configuration with the converted set as data_folder, if data_folder holds images.

    Raises:
        UserError: The images can't be used, or the set can't be written.
        PeerLost: The converting process was killed.
    """
    if is_image_folder(config):
        if config.n_hosts > 1:
            raise UserError(
                f"{config.data_folder}: holds images, and a run on several hosts needs a dataset folder. "
                "Convert them first on each host: lockstep convert IMAGES FOLDER"
            )
        interrupts.leave("stopped as asked, while images were converted; the same command resumes")
        config = dataclasses.replace(config, data_folder=_convert(config, interrupts))
        interrupts.leave("stopped as asked, before training began")
    _hold(Path(config.data_folder))
    return config


def is_image_folder(config: Config) -> bool:
    """Return whether data_folder is a folder that is no dataset folder."""
    folder = Path(config.data_folder)
    given = (config.train_folder, config.val_folder, config.label_folder, config.mean_file)
    return (
        not any(given)
        and folder.is_dir()
        and not any((folder / name).exists() for name in _OF_DATASETS)
        and not any(old_folders.find_folder(folder, split) for split in ("train", "val"))
    )


def _convert(config: Config, interrupts: Interrupts) -> str:
    """Run the conversion. Return the converted set."""
    reading, writing = os.pipe()
    arguments = to_yaml(config), str(writing)
    process = start_program(interrupts, "preprocessing.own_images", *arguments, pass_fds=[writing])
    os.close(writing)
    with open(reading) as pipe:
        result = json.loads(pipe.read() or "{}")
    code = process.wait()
    if "error" in result:
        raise UserError(result["error"])
    if "folder" not in result:
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise PeerLost("the conversion", f"the process that converts images {how}; the same command resumes")
    return str(result["folder"])


def _hold(folder: Path) -> None:
    """Keep a converted set from being replaced while this process exists."""
    if (folder / "source.json").exists():
        with suppress(OSError):  # a file system without locks
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
