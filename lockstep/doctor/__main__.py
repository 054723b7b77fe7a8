"""Tells what a user needs to know before training, and what is wrong, with the remedy.

    python -m lockstep.doctor                       files are read from a temporary file of 256 MB
    python -m lockstep.doctor data/imagenet         ... from this dataset folder
    python -m lockstep.doctor --config config_alexnet.yaml

It measures for half a minute at most, on devices that nobody else should be using meanwhile. Of a
configuration it takes devices, data_folder (train_folder) and weights_dir.

Exit code 0: nothing is wrong, and a run would train on the devices that are named. 1: something is marked
WRONG: a GPU that is here and not hidden can't be used, or does not do what it says; what was given can't be
used; a package is broken. A run may be possible all the same, on CPUs or through host memory. GPUs that the
driver keeps from each other, no GPU, and no driver are not wrong.
"""

import argparse
import sys
from pathlib import Path

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.config import COMMAND_LINE, Config, Layer
from lockstep.doctor import cards, choice, links, loading, machine, software, uploads
from lockstep.doctor.report import Report


def main() -> int:
    words = _read_command_line()
    devices.number_gpus_by_place()
    report = Report()
    report.title("Software")
    report.show_all("software", software.describe)
    config, batches = report.attempt("configuration", lambda: _read_config(words)) or (Config(), None)
    runs = Path(config.weights_dir)
    report.title("Machine")
    report.show_all("machine", lambda: machine.describe(runs))
    chosen = _choose(report, config)
    copies = None
    if devices.on_gpus(chosen):
        copies = cards.examine(report, chosen)
        links.examine(report, chosen)
        uploads.examine(report, chosen[0])
    report.title("Files")
    scratch = machine.existing(runs)
    report.attempt("files", lambda: loading.examine(report, batches, scratch, chosen, copies))
    report.title(f"{report.n_wrong} wrong: see above" if report.n_wrong else "Nothing is wrong.")
    return 1 if report.n_wrong else 0


def _read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data_folder", nargs="?", help="the dataset folder to read from (a temporary file)")
    parser.add_argument(
        "--config", help="a YAML file as train.py takes it; without, no configuration is read"
    )
    return parser.parse_args()


def _read_config(words: argparse.Namespace) -> tuple[Config, Path | None]:
    """The configuration, and the folder of the training batches where anything was given that names one."""
    layers = [configuration.read_yaml(words.config)] if words.config else []
    if words.data_folder:
        layers.append(Layer(COMMAND_LINE, {"data_folder": words.data_folder, "train_folder": None}))
    config, _ = configuration.resolve(layers)
    batches = Path(config.train_folder or Path(config.data_folder) / "train_hkl")
    return config, batches if layers else None


def _choose(report: Report, config: Config) -> tuple[str, ...]:
    report.title("Devices")
    gpus, lines = choice.find_gpus()
    chosen, reasons = choice.choose(config.devices, gpus)
    for line in lines + reasons:
        report.show(line)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
