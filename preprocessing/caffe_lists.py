"""Caffe's lists of images, train.txt and val.txt: text files with a path and a label per line."""

from pathlib import Path

from lockstep.errors import UserError
from lockstep.files import write_bytes
from lockstep.text import one_line
from preprocessing.listing import Label, Listing, SourceImage, classes_of, require_images

Line = tuple[str, Label]


def read_names(path: Path) -> list[str]:
    """Return the name in each line, whatever its label is. Raise UserError if the file can't be read."""
    return [line.strip().rpartition(" ")[0].strip() for line in _lines_of(path)]


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error}") from error


def read_list(path: Path) -> list[tuple[str, int]]:
    """Return (name, label) of each line. Raise UserError for a line of another form."""
    lines = _lines_of(path)
    entries = []
    for number, line in enumerate(lines, 1):
        name, _, label = line.strip().rpartition(" ")  # names may contain spaces
        if not name or not label.isdecimal() or len(label) > 6:
            raise UserError(f"{path}: line {number} is not 'path label': {line[:80]!r}")
        entries.append((name.strip(), int(label)))
    return entries


def write_list(path: Path, lines: list[Line]) -> None:
    """Write a list. The classes of `task: multilabel` are separated by ';', and '-' is no class."""
    text = "".join(f"{one_line(name)} {_text_of(label)}\n" for name, label in lines)
    write_bytes(path, text.encode("utf-8", "surrogateescape"))  # file names may be any bytes


def _text_of(label: Label) -> str:
    return str(label) if isinstance(label, int) else ";".join(map(str, label)) or "-"


def list_from_files(train_list: Path, train: Path, val_list: Path, val: Path) -> Listing:
    """Return the images of two lists in their order. Their names are relative to `train` and `val`."""
    halves = []
    for path, folder in ((train_list, train), (val_list, val)):
        lines = read_list(path)
        images = [SourceImage(name, label, str(folder / name)) for name, label in lines]
        halves.append(require_images(images, path))
    lines = [(image.name, label) for half in halves for image in half for label in classes_of(image.label)]
    n_classes = 1 + max(label for _, label in lines)
    classes = class_folders(lines[: len(halves[0])], n_classes)
    return Listing(classes, classes, halves[0], halves[1])


def class_folders(lines: list[tuple[str, int]], n_classes: int) -> list[str]:
    """Return the folder of each label's images if every label has its own, else the label's number."""
    folders: dict[int, set[str]] = {label: set() for label in range(n_classes)}
    for name, label in lines:
        folders.setdefault(label, set()).add(name.rpartition("/")[0])
    names = [
        next(iter(names_of_label)) if len(names_of_label) == 1 else "" for names_of_label in folders.values()
    ]
    return (
        names if all(names) and len(set(names)) == n_classes else [str(label) for label in range(n_classes)]
    )
