"""Measure a trained network's top-1 and top-5 error and its loss on all validation images.

    python validate.py runs/try1                              the newest checkpoint, on its own dataset
    python validate.py runs/try1 --epoch best                 the best checkpoint, by the key `monitor`
    python validate.py runs/try1 --epoch 12 --ten-crops       the checkpoint of an epoch, ten views per image
    python validate.py runs/try1 --json result.json --csv classes.csv      all metrics, by class, too
    python validate.py runs/try1 data_folder=data/other devices='[cuda:0, cuda:1]' batch_size=256

key=value overrides the run's configuration. The result depends on devices and batch size by rounding only.

Exit code: 0 success; 2 an argument or file can't be used; 130 Ctrl-C, 143 SIGTERM or SIGHUP; 1 anything else,
and the last line says which process failed, how, and what it was doing.
"""

from lockstep.signals import Interrupts
from lockstep.text import handle_closed_pipe

if __name__ == "__main__":
    handle_closed_pipe()
    interrupts = Interrupts()
    interrupts.install("stopped as asked")  # now: the imports below take a second

import argparse
import dataclasses
import sys
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from lockstep import config as configuration
from lockstep.backends import devices
from lockstep.comm.group import World
from lockstep.comm.messages import Predictions, WarningMessage
from lockstep.config import Config
from lockstep.config.tasks import is_multilabel
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.evaluate.data import open_data
from lockstep.evaluate.evaluation import Evaluation, LabelEvaluation
from lockstep.evaluate.files import check_place, write_csv, write_json
from lockstep.files import refusing_unusable_paths
from lockstep.launch.children import ExitStatus
from lockstep.launch.console import show
from lockstep.launch.processes import run_trainers
from lockstep.launch.template import Template
from lockstep.loading.reader import N_VIEWS
from lockstep.programs import make_parser
from lockstep.runs import checkpoint_files
from lockstep.runs.folder import notes_on_dataset
from lockstep.runs.metrics import ClassMetrics
from lockstep.runs.multilabel import LabelMetrics
from lockstep.runs.network_source import changed_source, check_importable
from lockstep.runs.plan import RunPlan
from lockstep.runs.state import Checkpoint
from lockstep.trainer.validation import FEW_CLASSES

N_WORST = 10  # classes to list
# Where the data is now. All other keys are a checkpoint's own: the run may have been resumed with others.
_OF_PLACE = ("data_folder", "data")


def main(interrupts: Interrupts) -> int:
    """Run the program and return its exit code."""
    try:
        arguments = parse_arguments()
        for path in filter(None, (arguments.json, arguments.csv)):
            check_place(path)
        config, checkpoint = open_checkpoint(arguments.run, arguments.epoch, arguments.overrides)
        own_mean = any(override.startswith("mean_file=") for override in arguments.overrides)
        dataset, notes = open_data(config, arguments.run, checkpoint.path.stem, own_mean)
        for note in [*notes, *notes_on_dataset(config, dataset.digest, checkpoint)]:
            show(f"note: {note}", "stderr")
        n_views = N_VIEWS if arguments.ten_crops else 1
        evaluation = new_evaluation(config, dataset)
        n_images = len(dataset.val)
        exit_status = evaluate(evaluation, config, checkpoint, n_images, n_views, own_mean, interrupts)
        if exit_status.code:
            show(f"{exit_status.traceback}lockstep: {exit_status.message or 'stopped as asked'}", "stderr")
            return exit_status.code
        report(evaluation, checkpoint, config, dataset, n_views)
        write_files(evaluation, checkpoint, config, dataset, arguments)
        return 0
    except UserError as error:
        show(f"lockstep: {error}", "stderr")
        return 2


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, globals().get("COMMAND"))
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    checkpoint_files.add_epoch(parser)
    parser.add_argument(
        "--ten-crops", action="store_true", help="average the predictions for ten views of each image"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all metrics and the confusion matrix"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row of metrics per class")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="override the run's configuration"
    )
    return parser.parse_intermixed_args()


@refusing_unusable_paths()
def open_checkpoint(folder: Path, epoch: int | str, overrides: list[str]) -> tuple[Config, Checkpoint]:
    """Return a run's configuration, with devices of this machine, and one of its checkpoints.

    Args:
        folder: The run's folder.
        epoch: The checkpoint's epoch, 'best' or 'latest'.
        overrides: Settings as key=value.

    Raises:
        UserError: There is no such run or checkpoint, or an override can't be used.
    """
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: is not a run's folder: it has no config.yaml")
    checkpoint, notes = checkpoint_files.find_checkpoint(folder, epoch)
    layer = configuration.read_command_line(overrides)
    own, run = configuration.of_any_place(checkpoint.settings), configuration.read_run(folder / "config.yaml")
    place = configuration.Layer(run.source, {key: run.values[key] for key in _OF_PLACE if key in run.values})
    config, more_notes = configuration.resolve([own, place, layer])
    check_importable(folder, config.model, checkpoint.state.name)
    changed = changed_source(folder, config.model, checkpoint.state.name)
    for note in filter(None, [*notes, *more_notes, changed]):
        show(f"note: {note}", "stderr")
    chosen = devices.normalise(config.devices) if "devices" in layer.values else ()
    if chosen:
        devices.check(chosen)
    else:
        chosen, _ = devices.choose()
    return dataclasses.replace(config, devices=chosen), checkpoint


def new_evaluation(config: Config, dataset: Dataset) -> Evaluation | LabelEvaluation:
    """Return an evaluation without predictions."""
    if is_multilabel(config):
        return LabelEvaluation(len(dataset.val), dataset.n_classes, config.threshold)
    return Evaluation(len(dataset.val))


def evaluate(
    evaluation: Evaluation | LabelEvaluation,
    config: Config,
    checkpoint: Checkpoint,
    n_images: int,
    n_views: int,
    own_mean: bool,
    interrupts: Interrupts,
) -> ExitStatus:
    """Measure the validation images with one process per device."""
    plan = RunPlan(config, checkpoint.path.parent.parent, checkpoint.path)
    with (
        closing(Template(["lockstep.evaluate.evaluation"])) as template,
        tqdm(total=n_images, unit=" images", disable=None, leave=False) as bar,
    ):

        def on_message(message: object) -> None:
            if isinstance(message, Predictions):
                evaluation.take(message)
                bar.update(len(message.labels))
            elif isinstance(message, WarningMessage):
                show(f"note: {message.text}", "stderr")

        entry = "lockstep.evaluate.evaluation:run_validator"
        arguments = [(plan, world, n_views, own_mean) for world in World.on_one_host(len(config.devices))]
        return run_trainers(template, config.timeout, interrupts, entry, arguments, on_message)


def report(
    evaluation: Evaluation | LabelEvaluation,
    checkpoint: Checkpoint,
    config: Config,
    dataset: Dataset,
    n_views: int,
) -> None:
    """Print the result, and the classes with the largest errors."""
    summary = evaluation.summary()
    views = "the middle of each" if n_views == 1 else f"{n_views} views of each"
    if isinstance(evaluation, LabelEvaluation):
        where = f"{len(dataset.val):,} images of {config.data or config.data_folder} ({views})"
        report_labels(evaluation.metrics(), summary["loss"], config.threshold, checkpoint, dataset, where)
        return
    top5 = f", {summary['error_top5']:.2%} top-5" if dataset.n_classes > FEW_CLASSES else ""
    data = config.data or config.data_folder
    means = evaluation.counts(dataset.n_classes).by_class().means()
    show(
        f"{checkpoint.path}: error {summary['error_top1']:.2%} top-1{top5}, "
        f"loss {summary['loss']:.4f} on {len(dataset.val):,} images of {data} ({views})",
        "stdout",
    )
    show(
        f"macro F1 {means['macro_f1']:.2%}, balanced accuracy {means['balanced_accuracy']:.2%}, weighted F1 "
        f"{means['weighted_f1']:.2%}",
        "stdout",
    )
    names = dataset.class_names
    worst = evaluation.worst(N_WORST)
    if worst:
        show("classes with the largest error, and the class most often predicted instead:", "stdout")
    for row in worst:
        show(
            f"  {row.error:6.1%} of {row.n_images:5,}  {names[row.label]}: "
            f"{names[row.mistaken_for]} ({row.n_mistaken})",
            "stdout",
        )


def report_labels(
    metrics: LabelMetrics,
    loss: float,
    threshold: float,
    checkpoint: Checkpoint,
    dataset: Dataset,
    where: str,
) -> None:
    """Print the result with several classes per image, and the classes with the least average precision."""
    means, columns = metrics.means(), metrics.columns()
    show(
        f"{checkpoint.path}: mean average precision {means['mean_average_precision']:.2%}, "
        f"loss {loss:.4f} on {where}",
        "stdout",
    )
    show(
        f"at a threshold of {threshold:g}: macro F1 {means['macro_f1']:.2%}, micro F1 "
        f"{means['micro_f1']:.2%}, {means['label_error']:.2%} of the decisions are wrong",
        "stdout",
    )
    rows = zip(
        dataset.class_names, *(columns[name] for name in ("support", "average_precision", "f1")), strict=True
    )
    worst = sorted((row for row in rows if row[1]), key=lambda row: row[2])[:N_WORST]
    show("classes with the least average precision, and their F1:", "stdout")
    for name, support, precision, f1 in worst:
        show(f"  {precision:6.1%} of {support:5,} images  {name}: F1 {f1:.1%}", "stdout")


def write_files(
    evaluation: Evaluation | LabelEvaluation,
    checkpoint: Checkpoint,
    config: Config,
    dataset: Dataset,
    arguments: argparse.Namespace,
) -> None:
    """Write the files that the command line names."""
    names, counts = dataset.description.class_names, None
    facts = {"checkpoint": str(checkpoint.path), "n_images": len(dataset.val), **evaluation.summary()}
    metrics: ClassMetrics | LabelMetrics
    if isinstance(evaluation, LabelEvaluation):
        metrics = evaluation.metrics()
        facts["threshold"] = config.threshold
    else:
        counts = evaluation.counts(dataset.n_classes)
        metrics = counts.by_class()
        if dataset.n_classes <= FEW_CLASSES:
            del facts["error_top5"]
    if arguments.json:
        write_json(arguments.json, facts, metrics, names, counts)
    if arguments.csv:
        write_csv(arguments.csv, metrics, names)


if __name__ == "__main__":
    sys.exit(main(interrupts))
