"""Which checkpoints stay: the newest ones, and the best by validation error."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.runs.folder import State, read_state, records


def remove_older(newest: Path, keep: int) -> None:
    """Removes checkpoints but the last `keep` and the one with the least top-1 error.

    newest: the tensors of the one that has just been written. Records of later ones are of checkpoints that
    the run passed over when it began, and no checkpoints that count. Those that can't be read stay, too.
    Raises UserError naming a file that can't be removed.
    """
    known: list[tuple[Path, State]] = []
    for record in records(newest.parent.parent):
        try:
            known.append((record.with_suffix(".safetensors"), read_state(record)))
        except UserError:
            continue  # who resumes is told
        if known[-1][0] == newest:
            break
    kept = {tensors for tensors, _ in known[-keep:]}
    errors = {path: state.val_record[-1]["error_top1"] for path, state in known if state.is_complete}
    if errors:
        kept.add(min(errors, key=lambda path: errors[path]))
    for tensors, _ in known:
        if tensors not in kept:
            _remove(tensors)


def _remove(tensors: Path) -> None:
    """The record goes last: where this is cut short the next one is here again, and nothing is forgotten."""
    for path in (tensors, tensors.with_suffix(".json")):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: can't be removed (keep): {error.strerror}") from error
