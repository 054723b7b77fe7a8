"""The checkpoints in a run's folder: which there are, and whether each is whole, by its checksum.

A run that resumes looks here for its checkpoint. Nothing here needs torch.
"""

import argparse
import errno
import json
import os
import re
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

from lockstep.config import with_new_names
from lockstep.errors import UserError
from lockstep.files import checksum, write_text
from lockstep.runs.metrics import best_epoch, cost_of
from lockstep.runs.state import Checkpoint, State, position_of

# Temporary files of a checkpoint that is being written, or received from another host.
_TEMPORARY = re.compile(
    r"\.(epoch_\d+(_at_\d+)?\.(safetensors\.tmp|safetensors\.json|json\.tmp)|latest\.tmp)"
)


def is_record(path: Path) -> bool:
    """Return whether a file is named as the JSON file of a checkpoint."""
    return path.suffix == ".json" and position_of(path.stem) is not None


def records(folder: Path) -> list[Path]:
    """Return the JSON files of all checkpoints, oldest position first."""
    paths = (folder / "checkpoints").glob("*.json")
    found = [(position, path) for path in paths if (position := position_of(path.stem))]
    return [path for _, path in sorted(found)]


def add_epoch(parser: argparse.ArgumentParser) -> None:
    """Add the option --epoch, whose value `find_checkpoint` takes."""

    def epoch(text: str) -> int | str:  # argparse names this function when it refuses a value
        return text if text in ("latest", "best") else int(text)

    text = "the checkpoint to use: an epoch, best (by `monitor`) or latest (the newest whole one)"
    parser.add_argument("--epoch", type=epoch, default="latest", help=text)


def find_checkpoint(folder: Path, load_epoch: int | str) -> tuple[Checkpoint, list[str]]:
    """Find the checkpoint of an epoch, or the newest valid one.

    Args:
        load_epoch: The epoch, 'latest', or 'best': the validated one with the best `monitor`.

    Returns:
        The checkpoint, and notes on damaged ones that were passed over.

    Raises:
        UserError: There is no such checkpoint, or the requested one is damaged.
    """
    check_epoch(load_epoch)
    if isinstance(load_epoch, int):
        path = folder / "checkpoints" / f"epoch_{load_epoch:04d}.json"
        if not path.exists():
            existing = ", ".join(record.stem for record in records(folder)) or "none"
            raise UserError(f"{folder}: has no checkpoint of epoch {load_epoch} (there are: {existing})")
        return verify_checksum(path), []
    notes: list[str] = []
    if load_epoch == "best":
        return _find_best(folder)
    for path in reversed(records(folder)):
        try:
            return verify_checksum(path), notes
        except UserError as error:
            notes.append(f"passing over a checkpoint: {error}")
    place = folder / "checkpoints"
    if os.path.isdir(place) and not os.access(place, os.R_OK | os.X_OK):  # glob() finds nothing there
        raise UserError(f"{place}: can't be read: {os.strerror(errno.EACCES)}")
    if not os.path.lexists(place):
        raise UserError(f"{folder}: is not a run's folder: it has no folder checkpoints")
    raise UserError("; ".join([f"{folder}: has no whole checkpoint", *notes]))


def check_epoch(epoch: object) -> None:
    """Raise UserError if `epoch` can't name a checkpoint."""
    is_number = isinstance(epoch, int) and not isinstance(epoch, bool)
    if not (is_number or epoch in ("latest", "best")):
        raise UserError(f"epoch: {epoch!r} is not the number of an epoch, 'best' or 'latest'")


def _find_best(folder: Path) -> tuple[Checkpoint, list[str]]:
    """Return the best whole checkpoint by `monitor`, and notes on damaged ones and on a better epoch."""
    newest, _ = find_checkpoint(folder, "latest")
    monitor = newest.state.monitor
    best = best_epoch(newest.state.val_record, monitor)
    notes: list[str] = []
    costs: list[tuple[float, Path]] = []
    for path in records(folder):
        try:
            state = read_state(path)
        except UserError as error:
            notes.append(f"passing over a checkpoint: {error}")
            continue
        if state.is_validated and state.val_record[-1].get(monitor) is not None:
            costs.append((cost_of(state.val_record[-1], monitor), path))
    for _, path in sorted(costs, key=lambda item: item[0]):
        try:
            found = verify_checksum(path)
        except UserError as error:
            notes.append(f"passing over a checkpoint: {error}")
            continue
        if found.state.epoch != best:
            notes.append(f"{folder}: epoch {best} was better than {found.state.epoch}, and has no checkpoint")
        return found, notes
    raise UserError(
        "; ".join([f"{folder}: has no whole checkpoint of an epoch with a validated {monitor}", *notes])
    )


def verify_checksum(record: Path) -> Checkpoint:
    """Read one checkpoint by its JSON file and verify the checksum of its tensors.

    Raises:
        UserError: A file is damaged; the message names it.
    """
    state = read_state(record)
    tensors = record.with_suffix(".safetensors")
    try:
        sha256 = checksum(tensors)
    except OSError as error:
        raise UserError(f"{tensors}: can't be read: {error.strerror}") from error
    if sha256 != state.sha256:
        raise UserError(f"{tensors}: is damaged or half written: its checksum is not the recorded one")
    return Checkpoint(tensors, state)


def read_state(record: Path) -> State:
    """Read a checkpoint's JSON file. Raise UserError if it is damaged."""
    try:
        content = dict(json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{record}: is not a whole checkpoint record: {error}") from error
    needed = {field.name for field in fields(State) if field.default is MISSING}
    missing = sorted(needed - content.keys())
    unknown = sorted(content.keys() - {field.name for field in fields(State)})
    if missing or unknown:
        problems = [
            f"{verb} {', '.join(keys)}" for verb, keys in (("lacks", missing), ("has", unknown)) if keys
        ]
        raise UserError(f"{record}: is not a checkpoint record of this version: it {' and '.join(problems)}")
    state = State(**content)
    if not state.is_well_formed():
        raise UserError(f"{record}: is not a checkpoint record: a value has the wrong type")
    return replace(state, config=with_new_names(state.config))


def record(tensors: Path, state: State) -> None:
    """Write the JSON file of a checkpoint whose tensors are written, and point `latest` at it."""
    write_text(tensors.with_suffix(".json"), json.dumps(asdict(state), indent=1))
    write_text(tensors.with_name("latest"), tensors.stem + "\n")


def remove_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote: temporary files, tensors without a record.

    The caller holds the run's lock, and none of the run's processes is alive. Other files in the folder (a
    notebook's .ipynb_checkpoints, say) stay.

    Raises:
        OSError: A file can't be removed.
    """
    for path in (folder / "checkpoints").glob("*"):
        is_tensors = path.suffix == ".safetensors" and position_of(path.stem)
        is_unrecorded = is_tensors and not path.with_suffix(".json").exists()
        if (is_unrecorded or _TEMPORARY.fullmatch(path.name)) and path.is_file():
            path.unlink(missing_ok=True)
