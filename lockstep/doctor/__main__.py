"""Check the machine before training, and name a remedy for each problem.

    python -m lockstep.doctor                       reads a temporary file of 256 MB
    python -m lockstep.doctor data/imagenet         reads this dataset folder
    python -m lockstep.doctor --config config_alexnet.yaml
    python -m lockstep.doctor --run runs/try1       measures nothing: which trainer did the others wait for?

It measures for half a minute at most. The devices should not be in use meanwhile. Of a configuration it reads
devices, data_folder (train_folder) and weights_dir, and with logical_ranks what decides on their memory.

Exit code 0: nothing is wrong, and a run would train on the named devices. 1: something is marked WRONG: a
visible GPU can't be used or computes wrong results, an argument can't be used, or a package is broken. A run
may still be possible, on CPUs or through host memory. It is not wrong to have no GPU or no driver, or GPUs
whose driver denies access to each other.
"""

import argparse
import signal
import sys
from pathlib import Path

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.config import COMMAND_LINE, Config, Layer
from lockstep.doctor import cards, links, loading, machine, partial_sums, uploads, waiting
from lockstep.doctor.report import Report
from lockstep.programs import make_parser, reports_errors
from lockstep.text import handle_closed_pipe


@reports_errors("lockstep.doctor", interrupted="stopped as asked")
def main() -> int:
    """Run the program and return its exit code."""
    arguments = _read_command_line()
    devices.number_gpus_by_place()
    report = Report()
    if arguments.run:
        return _examine_run(report, arguments.run)
    report.title("Software")
    report.show_all("software", machine.describe_software)
    config, batches = report.attempt("configuration", lambda: _read_config(arguments)) or (Config(), None)
    runs = Path(config.weights_dir)
    report.title("Machine")
    report.show_all("machine", lambda: machine.describe_machine(runs))
    chosen = _choose(report, config)
    report.show_all("logical ranks", lambda: partial_sums.describe(config, chosen))
    copies = None
    if gpus := devices.gpus_among(chosen):
        copies = cards.examine(report, gpus)
        links.examine(report, gpus)
        uploads.examine(report, gpus[0])
    report.title("Files")
    scratch = machine.existing(runs)
    report.attempt("files", lambda: loading.examine(report, batches, scratch, chosen, copies))
    report.title("If a trainer is slower than the others: the usual causes, by what progress lines name")
    report.show_all("causes", waiting.causes)
    report.title(f"{report.n_wrong} wrong: see above" if report.n_wrong else "Nothing is wrong.")
    return 1 if report.n_wrong else 0


def _read_command_line() -> argparse.Namespace:
    parser = make_parser(__doc__, globals().get("COMMAND", "python -m lockstep.doctor"))
    parser.add_argument("data_folder", nargs="?", help="the dataset folder to read from (a temporary file)")
    parser.add_argument(
        "--config", help="a YAML file as train.py takes it; without, no configuration is read"
    )
    parser.add_argument("--run", type=Path, help="a run's folder: name the trainer that the others wait for")
    return parser.parse_args()


def _examine_run(report: Report, run: Path) -> int:
    report.title(f"Who waits for whom in {run}")
    report.show_all("the run", lambda: waiting.examine_run(run))
    return 1 if report.n_wrong else 0


def _read_config(arguments: argparse.Namespace) -> tuple[Config, Path | None]:
    """Return the configuration, and the folder of the training batches if an argument names one."""
    layers = [configuration.read_yaml(arguments.config)] if arguments.config else []
    if arguments.data_folder:
        layers.append(Layer(COMMAND_LINE, {"data_folder": arguments.data_folder, "train_folder": None}))
    config, _ = configuration.resolve(layers)
    batches = Path(config.train_folder or Path(config.data_folder) / "train_hkl")
    return config, batches if layers else None


def _choose(report: Report, config: Config) -> tuple[str, ...]:
    report.title("Devices")
    gpus, lines = machine.find_gpus()
    chosen, reasons = machine.choose_devices(config.devices, gpus)
    for line in lines + reasons:
        report.show(line)
    return chosen


if __name__ == "__main__":
    handle_closed_pipe()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # temporary files are removed
    sys.exit(main())
