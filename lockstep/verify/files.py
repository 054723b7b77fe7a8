"""A run's files and data, compared with its receipts. Each problem is a line that names the file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from lockstep.config import Config
from lockstep.data.dataset import open_dataset
from lockstep.data.manifest import NAME, differing, read_manifest
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.runs.checkpoint_files import read_state, records, verify_checksum
from lockstep.runs.receipts import NAME as RECEIPTS
from lockstep.runs.receipts import Basis, Receipt, digest_of_config, digests_of_data
from lockstep.runs.retention import is_regular


def check_config(folder: Path, receipts: Sequence[Receipt]) -> Iterator[str]:
    """Yield a problem if config.yaml is not that of the last receipt."""
    path = folder / "config.yaml"
    if _digest(path) != receipts[-1].config:
        yield f"{path}: is not the configuration that receipt {receipts[-1].number} is of"


def check_checkpoints(
    folder: Path, receipts: Sequence[Receipt], config: Config | None, notes: list[str]
) -> Iterator[str]:
    """Yield the checkpoints that are not those of their receipts.

    Args:
        folder: The run's folder.
        receipts: In the order of the file; the last one of a checkpoint counts.
        config: The run's, or None if it can't be read.
        notes: Gets a line for each checkpoint from before the receipts, and one for missing checkpoints that
            may have been removed.
    """
    newest = {receipt.checkpoint: receipt for receipt in receipts if receipt.checkpoint}
    retained, unknown = _retained(folder, receipts, config) if config else (set(), set())
    for name, receipt in newest.items():
        for suffix, expected in ((".json", receipt.record), (".safetensors", receipt.state)):
            path = folder / "checkpoints" / (name + suffix)
            if not path.exists():
                if name in retained:
                    yield f"{path}: is missing, and receipt {receipt.number} is of it"
            elif _digest(path) != expected:
                yield f"{path}: is not the file that receipt {receipt.number} is of"
    notes += _missing_of(folder, [name for name in newest if name in unknown])
    for path in records(folder):
        if path.stem not in newest:
            yield from _check_without_receipt(path, receipts[0], notes)


def _retained(folder: Path, receipts: Sequence[Receipt], config: Config) -> tuple[set[str], set[str]]:
    """Return the checkpoints that the run has not removed itself, and those of which it is unknown, by name.

    A run with `keep_checkpoints` removes all but its newest ones, also those of its earlier parts with other
    settings. Every run removes those that it saved only because they were the best so far. If that leaves no
    checkpoint of a part, its `keep_checkpoints` is unknown.

    Args:
        config: That of the last part.
    """
    parts = {**_configs_of_parts(folder), receipts[-1].config: config}
    retained: set[str] = set()
    unknown: set[str] = set()
    n_left = len(receipts)  # of the newest checkpoints, those that no later one has removed
    for place, receipt in enumerate(reversed([each for each in receipts if each.checkpoint])):
        own = parts.get(receipt.config)
        if own and own.keep_checkpoints is not None:
            n_left = min(n_left, place + own.keep_checkpoints)
        if place >= n_left:
            break
        if own is None or unknown:
            unknown.add(receipt.checkpoint)
        elif "_at_" in receipt.checkpoint or is_regular(receipt.epoch, own.snapshot_freq, own.n_epochs):
            retained.add(receipt.checkpoint)
    return retained, unknown - retained


def _missing_of(folder: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield a note if some of these checkpoints, which the run may have removed itself, are missing."""
    place = folder / "checkpoints"
    missing = [
        name
        for name in names
        if not all((place / (name + suffix)).exists() for suffix in (".json", ".safetensors"))
    ]
    if missing:
        yield (
            f"{place}: {len(missing)} checkpoint(s) up to {missing[-1]} are missing. The run may have "
            "removed them: no checkpoint is left that has the keep_checkpoints of their part of the run"
        )


def _configs_of_parts(folder: Path) -> dict[str, Config]:
    """Return the configurations that a run was begun and resumed with, by digest, from its checkpoints."""
    found: dict[str, Config] = {}
    for path in records(folder):
        with suppress(UserError, TypeError):  # a damaged record, which gets a line of its own
            config = Config(**read_state(path).config)
            found[digest_of_config(config)] = config
    return found


def _check_without_receipt(record: Path, first: Receipt, notes: list[str]) -> Iterator[str]:
    """Yield a problem of a checkpoint that has no receipt, unless the receipts began after it.

    A host whose disk was lost gets a checkpoint from another host, and then begins its receipts. A run that
    is resumed with `logical_ranks` begins them, too.

    Args:
        record: The checkpoint's JSON file.
        first: The first receipt.
        notes: Gets a line for a whole checkpoint from before the receipts.
    """
    try:
        state = verify_checksum(record).state
    except UserError as error:
        yield f"{error}, and it has no receipt"
        return
    moment, begin = (
        (each.epoch + 1, 0) if each.position >= state.n_samples else (each.epoch, each.position)
        for each in (state, first)
    )
    is_older = moment <= begin and not first.begins_run
    if is_older and state.name == record.stem:
        path = record.with_suffix(".safetensors")
        notes.append(f"{path}: is older than the receipts. Only its own checksum was checked, which is right")
    else:
        yield (
            f"{record}: has no receipt. A run that was killed while it saved this adds one when it resumes. "
            f"Otherwise {RECEIPTS} lacks receipts at its end, or this part of the run had no logical_ranks"
        )


def check_states(receipts: Sequence[Receipt]) -> Iterator[str]:
    """Yield receipts that have another state than an earlier one of the same step, settings and data."""
    seen: dict[tuple[int, Basis], Receipt] = {}
    for receipt in receipts:
        first = seen.setdefault((receipt.step, receipt.basis), receipt)
        if first.state != receipt.state:
            yield f"receipt {receipt.number}: has another state of step {receipt.step} than {first.number}"
    for one, other in pairwise(receipts):
        if other.kind == "start" and other.state not in {each.state for each in receipts[: other.number]}:
            yield f"receipt {other.number}: begins with a state that no receipt before it has"
        if other.kind not in ("start", "recovery") and other.step < one.step:
            yield f"receipt {other.number}: is of step {other.step}, before that of {one.number}"


def check_data(
    config: Config, receipt: Receipt, on_total: Callable[[int], object], on_done: Callable[[str], object]
) -> Iterator[str]:
    """Yield the files of the dataset that are not those of a receipt.

    Args:
        config: The run's, with the paths of the dataset.
        receipt: The last one.
        on_total: Called with the number of files.
        on_done: Called with each file's name when it has been read.

    Raises:
        UserError: There is no dataset; the message asks for `data_folder=`. Or a file of it is damaged.
    """
    folder = Path(config.data_folder)
    if not config.data and not folder.is_dir():
        raise UserError(f"{folder}: there is no such dataset. Name the folder: data_folder=FOLDER")
    path = folder / NAME
    if receipt.manifest:
        if _digest(path) != receipt.manifest:
            yield f"{path}: is not the manifest that receipt {receipt.number} is of"
        manifest = read_manifest(folder)
        if manifest is None:
            return
        sums = manifest.checksums()
        on_total(len(sums))
        for name in differing(folder, sums, on_done):
            is_there = (folder / name).exists()
            what = "does not have the manifest's checksum" if is_there else "is missing"
            yield f"{folder / name}: {what}"
    elif digests_of_data(open_dataset(config))[1] != receipt.labels:
        yield f"{config.data or folder}: has other labels or another mean than receipt {receipt.number}"


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file; '' if it can't be read."""
    try:
        return checksum(path)
    except OSError:
        return ""
