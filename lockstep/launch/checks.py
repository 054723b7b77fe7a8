"""The launcher's checks before it starts processes: everything that the user gave can be used."""

import dataclasses
import importlib.util
import resource
from pathlib import Path

from lockstep.backends.devices import loader_restarts_of
from lockstep.config import Config
from lockstep.data.classes import check_classes
from lockstep.data.dataset import Dataset, check_content, open_dataset
from lockstep.errors import UserError, nearest
from lockstep.extras import require
from lockstep.launch.commandline import Arguments, complete_config
from lockstep.launch.console import show
from lockstep.launch.datasets import with_converted_images, with_survey
from lockstep.launch.hosting import SingleHost
from lockstep.objects import SOURCE, check_available
from lockstep.runs.folder import RunFolder
from lockstep.signals import Interrupts

_OTHER_DESCRIPTORS = 128  # of the launcher, beside its pipes: files, sockets, threads
_DESCRIPTORS_PER_TRAINER = 24  # for a trainer and its loader: sentinels, control pipes, while they start


def open_all(
    arguments: Arguments, models: Path, host: SingleHost, interrupts: Interrupts
) -> tuple[Config, Dataset, RunFolder]:
    """Check everything that was given and open the run.

    Args:
        arguments: The parsed command line.
        models: The folder of network files.
        host: This host's part among several hosts.
        interrupts: The launcher's; images in data_folder are converted, which may take long.

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
        config, survey_notes = with_survey(config)
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
    return config, dataset, host.open_run(config, len(dataset.train), dataset.digest)


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
    if importlib.util.find_spec(modules[0]) is None:
        text = f"{key}: {value} needs the Python package {modules[0]}, which is not installed"
        raise UserError(f"{text}. Install it, or start in the folder that has it.")
