"""The source of a run: whether it changes while the run trains, and a copy of the network's for people.

The copy is in the run's folder, <run>/network/; if the file had changed when the run resumed, that of older
checkpoints is in <run>/network-until-CHECKPOINT/. No program imports it from there: a user who opens a run of
somebody else runs no code of that run's folder.
"""

import hashlib
import importlib.util
import shutil
from contextlib import suppress
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files import write_bytes
from lockstep.runs.kept import mark_for, mark_of, marks_after

FOLDER = "network"
_LIBRARIES = ("torchvision", "timm")
# The keys that name a network or a function of the user's, and what it is.
_OWN_FILES = {"model": "network", "loss": "loss", "augmentation": "augmentation", "data": "data"}


class RunSources:
    """The files of a run's network and functions as they were when it started, unless a library has them.

    The copy in the run's folder can't stand for a network: trainers may import a file that is edited before
    the copy is made, and hosts may share the folder, but not the file.

    Args:
        config: Names them.
    """

    def __init__(self, config: Config) -> None:
        paths = {key: _find_file(_modules_of(getattr(config, key) or "")) for key in _OWN_FILES}
        self._files = {key: (path, _read(path)) for key, path in paths.items()}

    def describe_change(self, *keys: str) -> str:
        """Return a line that names the first file that has changed since, else ''.

        Args:
            keys: Those whose files count; all without an argument.
        """
        for key in keys or _OWN_FILES:
            path, content = self._files[key]
            if _read(path) != content:
                return f"{path}: the file of the {_OWN_FILES[key]} has changed since the run started"
        return ""


def digest_of_source(name: str) -> str:
    """Return a digest of the file of a network or function, by its name in the configuration; '' without."""
    content = _read(_find_file(_modules_of(name)))
    return hashlib.sha256(content).hexdigest()[:16] if content is not None else ""


def keep_source(folder: Path, model: str, start: str = "") -> None:
    """Copy the file of the network that `model` names into a run's folder, unless a library has it.

    Args:
        folder: The run's folder.
        model: As in the configuration.
        start: The name of the checkpoint that the run resumes from; '' from scratch.

    Raises:
        UserError: A copy can't be written, read or removed.
    """
    modules = _modules_of(model)
    content = _read(_find_file(modules))
    if content is None:
        return
    known = _read_copy(_copy_of(_folder_of(folder, start), modules)) if start else None
    if known not in (None, content):
        _write_copy(folder / f"{FOLDER}{mark_of(start)}", modules, known)
    for mark in marks_after(folder, FOLDER, start):
        shutil.rmtree(folder / f"{FOLDER}{mark}", ignore_errors=True)
    _write_copy(folder / FOLDER, modules, content)


def changed_source(folder: Path, model: str, checkpoint: str) -> str:
    """Return a line that names the network's file if it is not the one of a checkpoint, else ''.

    Raises:
        UserError: The copy in the run's folder can't be read.
    """
    modules = _modules_of(model)
    source = _find_file(modules)
    if source is None:
        return ""
    copy = _copy_of(_folder_of(folder, checkpoint), modules)
    kept = _read_copy(copy)
    if kept is None or _read(source) in (None, kept):  # an earlier version made no copy
        return ""
    return f"{source}: the file of the network has changed since the run started (its copy: {copy})"


def check_importable(folder: Path, model: str, checkpoint: str) -> None:
    """Raise UserError if a network can't be imported here, and the run's folder has a copy of its source."""
    modules, copy = _modules_of(model), _folder_of(folder, checkpoint)
    if modules and _find_file(modules) is None and copy.is_dir():
        raise UserError(
            f"model {model}: can't be imported here. The run's folder has a copy of its source. If you trust "
            f"it, set PYTHONPATH={copy.absolute()}"
        )


def _folder_of(run: Path, checkpoint: str) -> Path:
    """Return the folder of the source that a checkpoint was trained with."""
    return run / f"{FOLDER}{mark_for(run, FOLDER, checkpoint)}"


def _read_copy(copy: Path) -> bytes | None:
    try:
        return copy.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{copy}: can't be read: {error.strerror}. Restore it, or remove it.") from error


def _write_copy(folder: Path, modules: list[str], content: bytes) -> None:
    copy = _copy_of(folder, modules)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{copy.parent}: can't be made: {error.strerror}") from error
    write_bytes(copy, content)


def _copy_of(folder: Path, modules: list[str]) -> Path:
    return Path(folder, *modules[:-1], f"{modules[-1]}.py")


def _modules_of(model: str) -> list[str]:
    """Return the module of a network by its parts, or [] if a library has it or none is named."""
    module, _, name = model.rpartition(":")
    parts = module.split(".") if module else ["models", name]
    return [] if module in _LIBRARIES or not all(part.isidentifier() for part in parts) else parts


def _read(path: Path | None) -> bytes | None:
    """Return the content of a file; None without one, or if it can't be read, which the trainers report."""
    with suppress(OSError):
        return path.read_bytes() if path else None
    return None


def _find_file(modules: list[str]) -> Path | None:
    """Return the file of a module without importing it, which would run the user's code. None for []."""
    try:
        spec = importlib.util.find_spec(modules[0]) if modules else None
    except ValueError:  # a module that a program made has no spec
        spec = None
    if spec is None:
        return None
    if len(modules) == 1:
        return Path(spec.origin) if spec.origin else None
    for place in spec.submodule_search_locations or ():
        base = Path(place, *modules[1:])
        found = [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]
        if found:
            return found[0]
    return None
