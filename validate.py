"""Says how good a trained network is: top-1 and top-5 error and loss over all validation images, each once.

    python validate.py runs/try1                              its newest checkpoint, on its own dataset
    python validate.py runs/try1 --epoch 12 --ten-crops       the checkpoint of an epoch, ten views an image
    python validate.py runs/try1 data_folder=data/other devices='[cuda:0, cuda:1]' batch_size=256

key=value overrides the run's configuration. The result does not depend on devices or batch size, but for
rounding.

Exit code: 0 it is measured; 2 something given was wrong; 130 Ctrl-C, 143 SIGTERM; 1 anything else, and the
last line says who failed, how, and at what.
"""

from lockstep.interrupts import Interrupts

if __name__ == "__main__":
    interrupts = Interrupts()
    interrupts.install("stopped as asked")  # now: the imports below take a second

import argparse
import dataclasses
import sys
from pathlib import Path

from tqdm import tqdm

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.comm.group import World
from lockstep.comm.messages import Notice, Predictions
from lockstep.config import Config
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.errors import UserError
from lockstep.evaluate.evaluation import Evaluation
from lockstep.launch.console import show
from lockstep.launch.processes import Ending, Processes
from lockstep.loading.reader import N_VIEWS
from lockstep.runs import folder as runfolder
from lockstep.runs.folder import Checkpoint
from lockstep.runs.plan import Plan

N_WORST = 10  # classes that are listed


def main(interrupts: Interrupts) -> int:
    try:
        words = read_words()
        config, checkpoint = open_checkpoint(words.run, words.epoch, words.overrides)
        dataset = open_dataset(config)
        n_views = N_VIEWS if words.ten_crops else 1
        evaluation, ending = evaluate(config, checkpoint, len(dataset.val), n_views, interrupts)
        if ending.code:
            show(f"{ending.traceback}lockstep: {ending.message or 'stopped as asked'}", "stderr")
            return ending.code
        report(evaluation, checkpoint, config, dataset, n_views)
        return 0
    except UserError as error:
        show(f"lockstep: {error}", "stderr")
        return 2


def read_words() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--epoch", type=int, help="the checkpoint of this epoch (default: the newest whole one)"
    )
    parser.add_argument(
        "--ten-crops", action="store_true", help="average the answers to ten views of an image"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override the run's configuration")
    return parser.parse_intermixed_args()


def open_checkpoint(folder: Path, epoch: int | None, overrides: list[str]) -> tuple[Config, Checkpoint]:
    """A run's configuration, with devices of today, and one of its checkpoints.

    Raises UserError where there is no such run or checkpoint.
    """
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: is not a run's folder: it has no config.yaml")
    checkpoint, notices = runfolder.find_checkpoint(folder, "latest" if epoch is None else epoch)
    given = configuration.read_command_line(overrides)
    config, more = configuration.resolve([configuration.read_run(folder / "config.yaml"), given])
    for notice in [*notices, *more]:
        show(f"note: {notice}", "stderr")
    chosen = devices.normalise(config.devices) if "devices" in given.values else ()
    if chosen:
        devices.check(chosen)
    else:
        chosen, _ = devices.choose()
    return dataclasses.replace(config, devices=chosen), checkpoint


def evaluate(
    config: Config, checkpoint: Checkpoint, n_images: int, n_views: int, interrupts: Interrupts
) -> tuple[Evaluation, Ending]:
    """Runs a trainer process per device over the validation images."""
    evaluation = Evaluation(n_images)
    plan = Plan(config, checkpoint.path.parent.parent, checkpoint.path)
    with (
        tqdm(total=n_images, unit=" images", disable=None, leave=False) as bar,
        Processes(config.wait_deadline, interrupts) as processes,
    ):

        def on_message(message: object) -> None:
            if isinstance(message, Predictions):
                evaluation.take(message)
                bar.update(len(message.labels))
            elif isinstance(message, Notice):
                show(f"note: {message.text}", "stderr")

        for world in World.on_one_host(len(config.devices)):
            arguments = (plan, world, n_views)
            name, speaks = f"trainer {world.rank}", world.rank == 0
            processes.start(name, "lockstep.evaluate.evaluation:run_validator", arguments, speaks)
        ending = processes.watch(on_message)
    return evaluation, ending


def report(
    evaluation: Evaluation, checkpoint: Checkpoint, config: Config, dataset: Dataset, n_views: int
) -> None:
    """Prints the result, and the classes that are most often taken for others."""
    found = evaluation.summary()
    views = "the middle of each" if n_views == 1 else f"{n_views} views of each"
    show(
        f"{checkpoint.path}: error {found['error_top1']:.2%} top-1, {found['error_top5']:.2%} top-5, "
        f"loss {found['loss']:.4f} on {len(dataset.val):,} images of {config.data_folder} ({views})",
        "stdout",
    )
    names = dataset.class_names
    worst = evaluation.worst(N_WORST)
    if worst:
        show("classes with the largest error, and what they are most often taken for:", "stdout")
    for each in worst:
        show(
            f"  {each.error:6.1%} of {each.n_images:5,}  {names[each.label]}: "
            f"{names[each.mistaken_for]} ({each.n_mistaken})",
            "stdout",
        )


if __name__ == "__main__":
    sys.exit(main(interrupts))
