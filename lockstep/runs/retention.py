"""The checkpoints that stay in a run's folder: the regular ones and the best one."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.runs.checkpoint_files import read_state, records
from lockstep.runs.metrics import best_of
from lockstep.runs.state import State


def is_regular(epoch: int, snapshot_freq: int, n_epochs: int) -> bool:
    """Return whether a complete epoch is saved whatever its error is."""
    return epoch % snapshot_freq == 0 or epoch == n_epochs


def remove_superseded(newest: Path) -> None:
    """Remove checkpoints that were saved as the best so far and are not the best saved one any more.

    Args:
        newest: The tensors of the checkpoint that has just been written.

    Raises:
        UserError: A file can't be removed.
    """
    known = _known(newest)
    best = _best(known)
    for tensors, state in known:
        if state.only_best and tensors != best:
            _remove_checkpoint(tensors)


def remove_older(newest: Path, keep_checkpoints: int) -> None:
    """Remove all checkpoints but the newest ones and the best one, by `monitor`.

    Checkpoints newer than `newest` were passed over when the run resumed; they are neither counted nor
    removed. Records that can't be read stay, too: resuming reports them.

    Args:
        newest: The tensors of the checkpoint that has just been written.
        keep_checkpoints: How many of the newest checkpoints stay.

    Raises:
        UserError: A file can't be removed.
    """
    known = _known(newest)
    retained = {_best(known), *(tensors for tensors, _ in known[-keep_checkpoints:])}
    for tensors, _ in known:
        if tensors not in retained:
            _remove_checkpoint(tensors)


def _known(newest: Path) -> list[tuple[Path, State]]:
    """Return the tensors and the state of every checkpoint that can be read, up to `newest`."""
    known: list[tuple[Path, State]] = []
    for record in records(newest.parent.parent):
        try:
            known.append((record.with_suffix(".safetensors"), read_state(record)))
        except UserError:
            continue
        if known[-1][0] == newest:
            break
    return known


def _best(known: list[tuple[Path, State]]) -> Path | None:
    """Return the tensors of the best one by the newest one's `monitor`; None if none has that value.

    The best epoch may have no checkpoint: `monitor` was another one then, or somebody removed it.
    """
    validated = [(path, state.val_record[-1]) for path, state in known if state.is_validated]
    best = best_of([entry for _, entry in validated], known[-1][1].monitor) if known else None
    return next((path for path, entry in validated if entry is best), None)


def _remove_checkpoint(tensors: Path) -> None:
    """Remove a checkpoint, its record last: if this is interrupted, the next call finds the record again."""
    for path in (tensors, tensors.with_suffix(".json")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: can't be removed (keep_checkpoints): {error.strerror}") from error
