"""Training from Python: `lockstep.train`, `lockstep.resume`, and the run that they return.

A run is the program that `lockstep train` starts, in its own process, so that its trainers never import
the caller's file and its results have the same bits. This package starts it, passes its events on, and reads
what it leaves in its folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.api.arguments import pass_on
from lockstep.api.launch import Callback, Launch, RunFailed
from lockstep.api.run import Run, checked_folder
from lockstep.config import read_yaml
from lockstep.errors import UserError
from lockstep.files import program_folder
from lockstep.launch.commandline import default_config
from lockstep.runs.folder import make_folder_named_by_time, newest

__all__ = ["Run", "RunFailed", "resume", "train"]


def train(
    data_folder: str | Path | None = None,
    *,
    model: str | type | Callable[..., Any] | None = None,
    train_data: Any = None,
    val_data: Any = None,
    callback: Callback | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Train a network, as `lockstep train` with the same keys does.

    Args:
        data_folder: A folder of images, or a dataset folder; None: that of the configuration.
        model: A name (docs/models.md), or an nn.Module class or a function that makes one. Either is called
            with the number of classes and `model_args`.
        train_data: A dataset instead of a folder: any object with a length and items (image, label), see
            docs/datasets.md.
        val_data: The dataset to validate on, with `train_data`.
        callback: Called with every progress and validation record, in the caller's thread. If it returns
            "stop", the run stops as after Ctrl-C.
        quiet: Show nothing.
        **keys: Any key of the configuration (docs/configuration.md).

    Returns:
        The run. After KeyboardInterrupt or a callback's "stop" its `complete` is False.

    Raises:
        UserError: A key, file, object or device cannot be used.
        RunFailed: A process of the run failed; the message names it.
        KeyboardInterrupt: It came a second time; the run has ended without saving.
    """
    _check_callback(callback)
    keys = {**keys, **({} if data_folder is None else {"data_folder": str(data_folder)})}
    passed = pass_on(keys, model, train_data, val_data)
    keys.setdefault("weights_dir", read_yaml(default_config(program_folder())).values.get("weights_dir"))
    keys["weights_dir"] = str(keys["weights_dir"] or "runs")
    if not keys.get("run_name") and not keys.get("resume_train"):
        named = make_folder_named_by_time(Path(keys["weights_dir"]), keys.get("model", "run"))
        keys["run_name"] = named.name
    elif not keys.get("run_name") and keys["resume_train"] is True:
        keys["run_name"] = newest(Path(keys["weights_dir"])).name
    return Launch(keys, passed, callback, quiet).run()


def resume(
    folder: str | Path | Run,
    *,
    model: str | type | Callable[..., Any] | None = None,
    train_data: Any = None,
    val_data: Any = None,
    callback: Callback | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Resume a run from its newest checkpoint. Results and errors as of `train`.

    Args:
        folder: The run's folder, or a Run, which also has the network and datasets that were passed to it.
        model: The network, if the run was given a class or function that cannot be imported by name.
        train_data: The dataset, if the run was given one.
        val_data: The dataset to validate on, with `train_data`.
        callback: As of `train`.
        quiet: Show nothing.
        **keys: Keys that change.
    """
    _check_callback(callback)
    place = folder.folder if isinstance(folder, Run) else checked_folder(folder)
    if not (place / "config.yaml").is_file():
        raise UserError(f"{place}: is not a run's folder: it has no config.yaml. Give the folder of a run.")
    named = Path(keys.get("weights_dir") or place.parent, str(keys.get("run_name") or place.name)).absolute()
    if named.resolve() != place.resolve():
        raise UserError(
            f"weights_dir, run_name: {named} is not {place}, the run to resume. Leave them out; to go on in "
            'a new folder, call lockstep.train with pretrained and pretrained_part="whole".'
        )
    passed = pass_on(keys, model, train_data, val_data)
    if isinstance(folder, Run):
        passed = {**folder._passed, **passed}
    keys = {**keys, "resume_train": True, "weights_dir": str(place.parent), "run_name": place.name}
    return Launch(keys, passed, callback, quiet).run()


def _check_callback(callback: Any) -> None:
    if callback is not None and not callable(callback):
        raise UserError(f"callback: must be a function of a record, not {callback!r:.100}")
