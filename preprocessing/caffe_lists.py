"""Caffe's lists of pictures: text files with "path label" a line. theano_alexnet calls them train.txt and
val.txt."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_bytes
from preprocessing.listing import Listing, Picture, require_pictures

Line = tuple[str, int]


def read_list(path: Path) -> list[Line]:
    """(name, label) of each line. Raises UserError naming the line that is something else."""
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        name, _, label = line.strip().rpartition(" ")  # names may have spaces in them
        if not name or not label.isdecimal() or len(label) > 6:
            raise UserError(f"{path}: line {number} is not 'path label': {line[:80]!r}")
        found.append((name.strip(), int(label)))
    return found


def write_list(path: Path, lines: list[Line]) -> None:
    text = "".join(f"{name} {label}\n" for name, label in lines)
    write_bytes(path, text.encode("utf-8", "surrogateescape"))  # a file's name may be any bytes


def list_from_files(train_list: Path, train: Path, val_list: Path, val: Path) -> Listing:
    """The pictures that two lists name, in their order; names are relative to `train` and `val`."""
    halves = []
    for path, folder in ((train_list, train), (val_list, val)):
        lines = read_list(path)
        pictures = [Picture(name, label, str(folder / name)) for name, label in lines]
        halves.append(require_pictures(pictures, path))
    n_classes = 1 + max(picture.label for half in halves for picture in half)
    classes = class_folders([(picture.name, picture.label) for picture in halves[0]], n_classes)
    return Listing(classes, classes, *halves)


def class_folders(lines: list[Line], n_classes: int) -> list[str]:
    """The folder that all pictures of a label lie in, where every label has its own; else its number."""
    folders: dict[int, set[str]] = {label: set() for label in range(n_classes)}
    for name, label in lines:
        folders.setdefault(label, set()).add(name.rpartition("/")[0])
    names = [next(iter(found)) if len(found) == 1 else "" for found in folders.values()]
    return (
        names if all(names) and len(set(names)) == n_classes else [str(label) for label in range(n_classes)]
    )
