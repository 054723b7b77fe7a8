"""Preparation of a run's data before its processes start: images are converted, objects surveyed.

A folder of images that `data_folder` names is converted by preprocessing/own_images.py, in its own process:
the launcher imports no torch. That process ends with the launcher, and its work is resumed by the next run.
Datasets that are Python objects (`data`) are surveyed in their own process, too.
"""

import dataclasses
import fcntl
import json
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from lockstep.comm.pipes import Pipe
from lockstep.config import Config, to_yaml
from lockstep.data import old_folders
from lockstep.data.survey import Survey, make_survey, publish
from lockstep.errors import PeerLost, PeerProblem, UserError
from lockstep.launch.processes import Processes
from lockstep.launch.status import StatusBoard
from lockstep.launch.subprocesses import start_program
from lockstep.signals import Interrupts

_OF_DATASETS = ("manifest.json", "train_hkl", "val_hkl", "labels/train_labels.npy", "misc/img_mean.npy")
_SURVEY = "the survey of the datasets"


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
        config = dataclasses.replace(config, data_folder=_convert(config))
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


def _convert(config: Config) -> str:
    """Run the conversion. Return the converted set."""
    reading, writing = os.pipe()
    arguments = to_yaml(config), str(writing)
    process = start_program("preprocessing.own_images", *arguments, pass_fds=[writing])
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


def with_survey(config: Config) -> tuple[Config, list[str]]:
    """Survey the datasets of `data` and publish the result to the run's processes.

    Returns:
        The configuration with `item_size` and `n_channels`, so that a resumed run has the same images, and
        notes for the user.

    Raises:
        UserError: A dataset or the network can't be used.
        PeerProblem: The process of the survey failed.
    """
    surveys: list[Survey] = []
    with Processes(config.timeout) as processes:
        processes.start(_SURVEY, "lockstep.launch.datasets:run_survey", (config,))
        exit_status = processes.watch(surveys.append)
    if exit_status.code == UserError.code:
        raise UserError(exit_status.message.removeprefix(f"{_SURVEY}: "))
    if exit_status.code:
        raise PeerProblem(_SURVEY, f"{exit_status.traceback}{exit_status.message}")
    (survey,) = surveys
    publish(survey)
    rows, columns, n_channels = survey.image_shape
    return dataclasses.replace(config, item_size=(rows, columns), n_channels=n_channels), list(survey.notes)


def run_survey(control: Pipe, board: StatusBoard, config: Config) -> None:
    """Send the launcher the survey. The network is made only if its size is needed."""
    if config.item_size is None:  # imports torch now, when the launcher grants time for imports
        import_module("lockstep.network.build")

    def input_size(n_channels: int, n_classes: int) -> tuple[int, int]:
        from lockstep.network.build import build_model, input_spec_of, sides_of

        if config.input_size is not None:
            return sides_of(config.input_size)
        board.say("building the network, whose size decides that of the images")
        with_channels = dataclasses.replace(config, n_channels=n_channels)
        return input_spec_of(build_model(with_channels, n_classes), with_channels).size

    board.say("loading the datasets")
    control.send(make_survey(config, input_size, board.say))
