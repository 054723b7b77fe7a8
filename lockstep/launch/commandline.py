"""From the words on the command line and the files they name to one checked configuration."""

import argparse
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.config import COMMAND_LINE, Config, Layer
from lockstep.config.rules import settle
from lockstep.errors import UserError
from lockstep.hosts import torchrun
from lockstep.runs import folder as runfolder


@dataclass(frozen=True)
class Words:
    """What was given: layers with those above the configuration file apart, and what they come to."""

    config: Config  # before it is known what a run to resume was started with
    notices: list[str]
    above: list[Layer]
    names_config: bool


def load_config(description: str, standard: Path) -> tuple[Config, list[str]]:
    """The configuration with its devices settled, and notices for the user.

    standard: the configuration file where none is named. Raises UserError for whatever can't be used.
    """
    return settle_config(read_words(description, standard))


def read_words(description: str, standard: Path) -> Words:
    """Reads the command line and the files that it names, and what torchrun says. Raises UserError."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", help="YAML file: what to train (config.yaml; with resume_train=True the run's)"
    )
    parser.add_argument(
        "--spec", help="YAML file: where to train: devices, batch_size (all usable GPUs, else CPUs)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override any key of the files")
    words = parser.parse_intermixed_args()
    overrides = configuration.read_command_line(words.overrides)
    above = [configuration.read_yaml(words.spec)] if words.spec else []
    above.append(Layer(torchrun.SOURCE, torchrun.keys(os.environ, overrides.values)))
    above.append(overrides)
    config, notices = configuration.resolve([configuration.read_yaml(words.config or standard), *above])
    if "load_epoch" in overrides.values and not config.resume_train:
        raise UserError(f"load_epoch={config.load_epoch} is where a run goes on: it needs resume_train=True")
    return Words(config, notices, above, bool(words.config))


def settle_config(words: Words) -> tuple[Config, list[str]]:
    """The rest of load_config: what a run to resume was started with, and devices. Raises UserError."""
    config, notices, above = words.config, words.notices, list(words.above)
    if config.resume_train == "auto":
        config = dataclasses.replace(config, resume_train=runfolder.has_checkpoint(config))
        above.append(Layer(COMMAND_LINE, {"resume_train": config.resume_train}))
    if above[-1].values.get("resume_train") and not words.names_config:
        config, notices = _as_it_was(config, notices, above)
    chosen = devices.normalise(config.devices)
    if chosen:
        devices.check(chosen)
    else:
        chosen, reason = devices.choose()
        notices.append(f"devices: {', '.join(chosen)}; {reason}")
    config = dataclasses.replace(config, devices=chosen)
    config, said = settle(config)
    notices += said
    devices.check_keys(config)
    devices.check_sharing(config)
    return config, [*notices, *devices.notices(chosen), *devices.notices_of_keys(config)]


def _as_it_was(config: Config, notices: list[str], above: list[Layer]) -> tuple[Config, list[str]]:
    """The configuration that the run to resume was started with, under what is given now.

    Raises UserError where there is no such run, or its folder has no configuration.
    """
    folder = runfolder.folder_to_resume(config)
    saved = folder / "config.yaml"
    if not saved.exists():  # killed before it came so far, or taken away
        raise UserError(
            f"{folder}: has no config.yaml, so what it trained with is not known: "
            "--config FILE resumes it with another, or start it anew under this run_name"
        )
    place = Layer(COMMAND_LINE, {"weights_dir": str(folder.parent), "run_name": folder.name})
    config, notices = configuration.resolve([configuration.read_run(saved, config.hosts), *above, place])
    return config, [*notices, f"going on with the configuration in {saved}"]
