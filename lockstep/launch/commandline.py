"""Parsing of the command line, and of the files that it names, into one checked configuration."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.config import COMMAND_LINE, Config, Layer
from lockstep.config.hosts import torchrun_keys
from lockstep.config.layers import for_one_host, of_this_start, with_absolute_paths
from lockstep.config.rules import settle
from lockstep.errors import UserError
from lockstep.files import refusing_unusable_paths, working_directory
from lockstep.launch.console import show
from lockstep.programs import make_parser
from lockstep.runs import folder as runfolder
from lockstep.runs.checkpoint_files import records

_PLACE = ("weights_dir", "run_name")  # the keys that name a run's folder


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    Attributes:
        config: The configuration so far. A run to resume may still have to come from another host.
        notes: Lines for the user.
        overrides: The layers above the configuration file, lowest first: its keys that a run to resume does
            not replace, the spec, torchrun's variables, the command line.
        names_config: Whether the command line names a configuration file.
    """

    config: Config
    notes: list[str]
    overrides: list[Layer]
    names_config: bool


@refusing_unusable_paths()
def parse_arguments(description: str, standard: Path, command: str | None = None) -> Arguments:
    """Parse the command line, the files that it names, and torchrun's variables.

    Args:
        description: The program's help text.
        standard: The configuration file if the command line names none.
        command: What the help text calls the program; None: the script's name.

    Raises:
        UserError: A key, value or file can't be used.
    """
    parser = make_parser(description, command)
    parser.add_argument(
        "--config", help="YAML file: what to train (config.yaml; with resume_train=True the run's)"
    )
    parser.add_argument(
        "--spec", help="YAML file: where to train: devices, batch_size (all usable GPUs, else CPUs)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key of the files")
    arguments, unknown = parser.parse_known_intermixed_args()
    working_directory()  # paths are relative to it
    overrides = configuration.read_command_line([*unknown, *arguments.overrides])
    layers = [configuration.read_yaml(arguments.spec)] if arguments.spec else []
    by_torchrun = torchrun_keys(os.environ, overrides.values)
    layers += [Layer("torchrun", by_torchrun), overrides]
    base = configuration.read_yaml(arguments.config or default_config(standard.parent))
    layers.insert(0, of_this_start(base))
    if by_torchrun.get("n_hosts") == 1:  # the same command may have been for several, which are lost
        base, *layers = map(for_one_host, (base, *layers))
    if overrides.values.get("resume_train") and not arguments.config:
        base = _of_run_to_resume(base, layers)
    config, notes = configuration.resolve([base, *layers])
    if "load_epoch" in overrides.values and not config.resume_train:
        raise UserError(
            f"load_epoch={config.load_epoch} selects a checkpoint to resume from: it needs resume_train=True"
        )
    if config.resume_train == "auto" and runfolder.await_end(config):
        show("note: waited for the run that was ending in this folder", "stdout")
    return Arguments(config, notes, layers, bool(arguments.config))


def default_config(folder: Path) -> Path:
    """Return config.yaml of the current folder (made by `lockstep init`), else that of `folder`."""
    project = Path("config.yaml")
    return project if project.exists() else folder / "config.yaml"


def _of_run_to_resume(base: Layer, layers: Sequence[Layer]) -> Layer:
    """Return the configuration of the run to resume, or `base` if this host has no checkpoint of it.

    Its place is that of the folder that is found. The folder's config.yaml may name another place: the folder
    was copied or moved, or its run has begun with an older checkpoint of the run of that name.
    """
    places = [
        Layer(layer.source, {key: layer.values[key] for key in _PLACE if key in layer.values})
        for layer in layers
    ]
    config, _ = configuration.resolve([base, *places])
    try:
        folder = runfolder.folder_to_resume(config)
    except UserError:
        return base
    saved = folder / "config.yaml"
    if not (saved.exists() and records(folder)):
        return base
    run = configuration.read_run(saved)
    return Layer(run.source, {**run.values, **_place_of(folder)})


def _place_of(folder: Path) -> dict[str, str]:
    """Return the keys that name a run's folder."""
    return dict(zip(_PLACE, (str(folder.parent), folder.name), strict=True))


def complete_config(arguments: Arguments) -> tuple[Config, list[str]]:
    """Add the settings of a run to resume, the devices, and what depends on them.

    Returns:
        The complete configuration, and notes for the user.

    Raises:
        UserError: A value or device can't be used.
    """
    config, notes, overrides = arguments.config, arguments.notes, list(arguments.overrides)
    if config.resume_train == "auto":
        config = dataclasses.replace(config, resume_train=runfolder.has_checkpoint(config))
        overrides.append(Layer(COMMAND_LINE, {"resume_train": config.resume_train}))
    if overrides[-1].values.get("resume_train") and not arguments.names_config:
        config, notes = _with_settings_of_run(config, notes, overrides)
    chosen = devices.normalise(config.devices)
    if chosen:
        devices.check(chosen)
    else:
        chosen, reason = devices.choose()
        notes.append(f"devices: {', '.join(chosen)}; {reason}")
    n_readers = config.read_threads or (1 if config.data else devices.count_readers(chosen))
    config = dataclasses.replace(config, devices=chosen, read_threads=n_readers)
    if config.cpu_threads is None and config.logical_ranks:
        config = dataclasses.replace(config, cpu_threads=_threads_for_equal_bits(config, notes))
    config, more_notes = settle(Config(**with_absolute_paths(dataclasses.asdict(config))))
    notes += more_notes
    devices.check_keys(config)
    devices.check_sharing(config)
    return config, [*notes, *devices.notices(chosen), *devices.notices_of_keys(config)]


def _threads_for_equal_bits(config: Config, notes: list[str]) -> int:
    """Return the default of `cpu_threads` with `logical_ranks`, and add a note if it leaves cores unused.

    Bits depend on it, so it must not depend on the number of devices.
    """
    n_cores, n_trainers = devices.count_cores(), len(config.devices)
    n_threads = max(1, n_cores // (config.logical_ranks or 1))
    if not devices.on_gpus(config.devices) and n_threads * n_trainers < n_cores:
        notes.append(
            f"cpu_threads: {n_threads}, so that up to {config.logical_ranks} trainers compute the same bits; "
            f"now {n_threads * n_trainers} of {n_cores} cores are used. A larger cpu_threads is faster, "
            "and must then be the same in all runs that are to be equal"
        )
    return n_threads


def _with_settings_of_run(
    config: Config, notes: list[str], overrides: list[Layer]
) -> tuple[Config, list[str]]:
    """Return the configuration of the run to resume, overridden by the command line."""
    folder = runfolder.folder_to_resume(config)
    saved = folder / "config.yaml"
    if not saved.exists():  # killed before the file was written, or the file was removed
        other = "" if records(folder) else ", or start it anew under this run_name"
        raise UserError(
            f"{folder}: has no config.yaml, so its settings are not known: "
            f"--config FILE resumes it with others{other}"
        )
    place = Layer(COMMAND_LINE, _place_of(folder))
    config, notes = configuration.resolve([configuration.read_run(saved, config.n_hosts), *overrides, place])
    return config, [*notes, f"resuming with the configuration in {saved}"]
