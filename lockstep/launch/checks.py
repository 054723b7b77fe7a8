"""Checks and preparation of a run before its processes start: everything that the user gave can be used.

A folder of images that `data_folder` names is converted by preprocessing/own_images.py, in its own process:
the launcher imports no torch. That process ends with the launcher, and its work is resumed by the next run.
Datasets that are Python objects (`data`) are surveyed in their own process, too.
"""

import dataclasses
import fcntl
import importlib.util
import json
import os
import resource
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from lockstep.backends.devices import loader_restarts_of
from lockstep.comm.pipes import Pipe
from lockstep.config import Config, to_yaml
from lockstep.data import old_folders
from lockstep.data.classes import check_classes
from lockstep.data.dataset import Dataset, check_content, open_dataset
from lockstep.data.survey import Survey, make_survey, publish
from lockstep.errors import NothingToTrain, PeerLost, PeerProblem, UserError, nearest
from lockstep.extras import require
from lockstep.files import program_folder, refusing_unusable_paths
from lockstep.launch.commandline import Arguments, complete_config
from lockstep.launch.console import show
from lockstep.launch.hosting import SingleHost
from lockstep.launch.processes import Processes
from lockstep.launch.status import StatusBoard
from lockstep.launch.subprocesses import start_program
from lockstep.launch.template import Template
from lockstep.objects import SOURCE, check_available
from lockstep.runs.folder import RunFolder
from lockstep.signals import Interrupts

_OTHER_DESCRIPTORS = 128  # of the launcher, beside its pipes: files, sockets, threads
_DESCRIPTORS_PER_TRAINER = 24  # for a trainer and its loader: sentinels, control pipes, while they start
_OF_DATASETS = ("manifest.json", "train_hkl", "val_hkl", "labels/train_labels.npy", "misc/img_mean.npy")
_SURVEY = "the survey of the datasets"


@refusing_unusable_paths()
def open_all(
    arguments: Arguments, models: Path, host: SingleHost, interrupts: Interrupts, template: Template | None
) -> tuple[Config, Dataset, RunFolder]:
    """Check everything that was given and open the run.

    Args:
        arguments: The parsed command line.
        models: The folder of network files.
        host: This host's part among several hosts.
        interrupts: The launcher's; images in data_folder are converted, which may take long.
        template: Forks the process that looks at the items of datasets; without it that is spawned.

    Returns:
        The complete configuration, the dataset, and the run with its folder.

    Raises:
        UserError: Something can't be used.
        HostFailed: Another host has failed.
    """
    checkpoint_notes = host.bring_checkpoint(arguments.config)
    config, notes = complete_config(arguments)
    for note in [*checkpoint_notes, *notes]:
        show(f"note: {note}", "stdout")
    check_descriptors(config)
    check_model(config, models)
    if config.report:
        require(f"report: {str(config.report).lower()}", "report", "matplotlib")
    if config.tensorboard:
        require("tensorboard: true", "tensorboard", "tensorboard")
    if config.data is None:
        config = with_converted_images(config, interrupts)
    else:
        check_data(config.data)
        show("reading some items of the datasets", "stdout")
        config, survey_notes = with_survey(config, template)
        for note in survey_notes:
            show(f"note: {note}", "stdout")
    dataset = open_dataset(config)
    config = _with_channels(config, dataset)
    names = dataset.description.class_names
    check_classes(config, dataset.train, names)
    if config.check_sums:
        check_content(dataset)
    for note in host.agree(config, dataset):
        show(f"note: {note}", "stdout")
    try:
        return config, dataset, host.open_run(config, len(dataset.train), dataset.digest, names)
    except NothingToTrain as error:
        if arguments.config.resume_train == "auto":  # the same command again: no failure
            error.code = 0
        raise


def _with_channels(config: Config, dataset: Dataset) -> Config:
    """Return the configuration with the images' channels, if they are not the usual three."""
    n_channels = dataset.image_shape[2]
    if config.n_channels not in (None, n_channels):
        raise UserError(f"n_channels: is {config.n_channels}, and images have {n_channels}. Leave it out.")
    return config if n_channels == 3 else dataclasses.replace(config, n_channels=n_channels)


def check_descriptors(config: Config) -> None:
    """Raise the limit of open files to what the run needs, by an estimate on the high side.

    Raises:
        UserError: The hard limit is lower.
    """
    n_trainers, n_restarts = len(config.devices), loader_restarts_of(config)
    n_starts = 1 + n_restarts
    needed = (
        _OTHER_DESCRIPTORS + n_trainers * (n_starts + n_trainers + _DESCRIPTORS_PER_TRAINER) + 2 * n_starts
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        fewer = "use fewer devices, or " if n_trainers > 1 else ""
        advice = "lower loader_restarts, or " if n_restarts else fewer
        raise UserError(
            f"{n_trainers} trainers with loader_restarts: {n_restarts} need up to {needed:,} "
            f"open files, the limit is {hard:,}: {advice}raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_model(config: Config, folder: Path) -> None:
    """Check that the network exists, without importing it.

    Args:
        folder: The folder of models/<model>.py.

    Raises:
        UserError: The file, or the package named by `model`, does not exist.
    """
    package, colon, name = config.model.rpartition(":")
    if package == SOURCE:
        check_available("model", name)
    elif colon:
        _check_package("model", config.model)
    elif not name.isidentifier() or importlib.util.find_spec(f"models.{name}") is None:
        existing = sorted(path.stem for path in folder.glob("[!_]*.py"))
        raise UserError(
            f"model: there is no models/{name}.py{nearest(name, existing)} "
            f"(there are: {', '.join(existing)}; or torchvision:NAME, timm:NAME, package.module:NAME)"
        )


def check_data(data: str) -> None:
    """Check that the module of the key `data` exists, or that the caller has passed datasets."""
    package, _, name = data.rpartition(":")
    if package == SOURCE:
        check_available("data", name)
    else:
        _check_package("data", data)


def _check_package(key: str, value: str) -> None:
    package, _, name = value.rpartition(":")
    modules = package.split(".")
    if not all(module.isidentifier() for module in modules) or not name:
        raise UserError(f"{key}: {value!r} is not of the form package.module:Name")
    spec = importlib.util.find_spec(modules[0])
    if spec is None:
        text = f"{key}: {value} needs the Python package {modules[0]}, which is not installed"
        raise UserError(f"{text}. Install it, or start in the folder that has it.")
    own = program_folder() / modules[0]
    place = program_folder().joinpath(*modules)
    if spec.origin == str(own / "__init__.py") and not (place.is_dir() or place.with_suffix(".py").exists()):
        text = f"Lockstep has a package {modules[0]} of its own, without {'.'.join(modules[1:])}"
        raise UserError(f"{key}: {value}: {text}. It hides a package of yours: rename that one.")


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


def with_survey(config: Config, template: Template | None) -> tuple[Config, list[str]]:
    """Survey the datasets of `data` and publish the result to the run's processes.

    Returns:
        The configuration with `item_size` and `n_channels`, so that a resumed run has the same images, and
        notes for the user.

    Raises:
        UserError: A dataset or the network can't be used.
        PeerProblem: The process of the survey failed.
    """
    surveys: list[Survey] = []
    with Processes(config.timeout, template=template) as processes:
        processes.start(_SURVEY, "lockstep.launch.checks:run_survey", (config,))
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
