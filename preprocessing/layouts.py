"""The layouts of a user's own image folder: train/ and val/, class folders only, or a table of labels."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.tasks import Task
from lockstep.errors import UserError
from preprocessing import folders
from preprocessing.label_table import find_table, list_table
from preprocessing.listing import Label, LeftOut, Listing, SourceImage, require_images, why_hidden

VALIDATION = ("val", "valid", "validation", "test")  # the first that exists is used
_SPLITS = {"train", *VALIDATION}
UNDERSTOOD = (
    "Understood are: train/<class>/ with val/<class>/ (or valid, validation, test); <class>/ alone, of which "
    "val_split becomes the validation images; labels.csv or labels.parquet with the columns path and label."
)
_N_NAMED = 5  # entries of a refused folder in the message
# Words of folder names that say which images a folder holds, and words that say no more about it.
_HALF_WORDS = {
    "train": ("train", "training", "trn"),
    "val": ("val", "valid", "validation", "validate", "dev", "devel", "development", "eval", "evaluation"),
    "test": ("test", "testing", "tst", "holdout"),
}
_OTHER_WORDS = ("set", "sets", "data", "dataset", "image", "images", "img", "imgs", "split", "folder")
_HALF_NAME = re.compile(
    rf"(.*?)\b({'|'.join(sorted(sum(_HALF_WORDS.values(), ()), key=len, reverse=True))})"
    rf"(?:{'|'.join(_OTHER_WORDS)})?\b(.*)"
)


@dataclass(frozen=True)
class _Splits:
    """The folders of the training images and of the validation images, if there are any."""

    train: Path
    val: Path | None


def list_folder(source: Path, val_split: float, task: Task) -> Listing:
    """Return the images of a folder in one of the layouts above, with their labels.

    Args:
        source: The user's folder.
        val_split: The share of images to validate on, where the layout does not say which.
        task: Whether an image has one class, or any number of them, which a table says.

    Raises:
        UserError: The folder can't be read, or its layout is another one.
    """
    left_out: list[LeftOut] = []
    table = find_table(source)
    if table:
        classes, images = list_table(table, left_out, task)
        train, val = split_by_hash(images, val_split, source)
        return Listing(classes, classes, train, val, tuple(left_out), task)
    if task != "classify":
        raise UserError(
            f"{source}: has no labels.csv or labels.parquet, which task: {task} needs: a column path, and a "
            "column of 0 and 1 for each class, or a column label with names separated by ';'."
        )
    splits = _find_splits(source)
    classes, images = _list_classes(source, splits.train, left_out)
    if splits.val is None:
        train, val = split_by_hash(images, val_split, source)
    else:
        train, val = images, _list_val(source, splits.val, classes, left_out)
    if splits.train != source:
        left_out += _others(source, splits)
    return Listing(classes, classes, train, val, tuple(left_out))


def in_validation(name: str, val_split: float) -> bool:
    """Return whether an image is one to validate on, as a function of its name only.

    The names of each class are hashed to numbers that are uniform in [0, 1), so every class gives about the
    same share, and an image that is added moves no other one.

    Args:
        name: <class>/<file>, or the path in a table.
        val_split: The share of images to validate on.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < val_split * 2**64


def split_by_hash(
    images: list[SourceImage], val_split: float, source: Path
) -> tuple[list[SourceImage], list[SourceImage]]:
    """Return the training and the validation images. Raise UserError if one of the two is empty."""
    require_images(images, source)
    val = [image for image in images if in_validation(image.name, val_split)]
    train = [image for image in images if not in_validation(image.name, val_split)]
    for missing, found in (("training", train), ("validation", val)):
        if not found:
            raise UserError(
                f"{source}: val_split {val_split:g} leaves no {missing} images of {len(images)}. "
                "Set another val_split, or put images into train/<class>/ and val/<class>/."
            )
    return train, val


def refuse(source: Path, problem: str) -> UserError:
    """Build the error for a folder in another layout, with what it holds."""
    return UserError(f"{source}: {problem}. {UNDERSTOOD} Found: {_contents(source)}.")


def _find_splits(source: Path) -> _Splits:
    """Return where the images are. Raise UserError for another layout."""
    classes = folders.class_names(source)
    if not classes:
        raise refuse(source, "holds no folders of classes and no table of labels")
    by_name = {name.casefold(): source / name for name in reversed(classes)}
    train = by_name.get("train")
    if train and folders.class_names(train):
        val = next((by_name[name] for name in VALIDATION if name in by_name), None)
        if val is None:
            _refuse_other_validation(source, classes)
        return _Splits(train, val)
    if by_name.keys() <= _SPLITS:
        raise refuse(source, f"{train.name}/ holds no class folders" if train else "has no train/")
    _refuse_other_halves(source, classes)
    return _Splits(source, None)


def _refuse_other_halves(source: Path, names: list[str]) -> None:
    """Raise UserError if folders are halves of the images by their names, such as Training/ and Testing/.

    A class may have such a name if its folder holds its images, and only one of several classes has.
    """
    halves = _halves(names)
    if not halves:
        return
    nested = [name for name in halves if folders.class_names(source / name)]
    if nested or len(halves) == len(names) or len(set(halves.values())) > 1:
        named = " and ".join(f"{name}/" for name in [*halves][:_N_NAMED])
        is_one = len(halves) == 1
        raise refuse(
            source,
            f"{named} would be {'a class' if is_one else 'classes'}, and by name {'is' if is_one else 'are'} "
            "for training or validation. Rename such folders to train and val. If they are classes, give "
            "them other names, or write labels.csv",
        )


def _refuse_other_validation(source: Path, names: list[str]) -> None:
    """Raise UserError if the images beside train/ are for validation by their folder's name, such as dev/."""
    for name, kind in _halves(names).items():
        if kind != "train" and folders.class_names(source / name):
            raise refuse(
                source,
                f"{name}/ is for validation by its name, and would not be used. Rename it to val, or move it "
                "away to validate on val_split of train/",
            )


def _halves(names: list[str]) -> dict[str, str]:
    """Return the folders whose names are those of halves, with what they hold: train, val or test.

    A name has a word for it and no other, as Test or train_set, or the same others as that of another half,
    as flowers_train and flowers_test.
    """
    parsed = {name: half for name in names if (half := _half_of(name))}
    kinds: dict[str, set[str]] = {}
    for kind, rest in parsed.values():
        kinds.setdefault(rest, set()).add(kind)
    return {name: kind for name, (kind, rest) in parsed.items() if not rest or len(kinds[rest]) > 1}


def _half_of(name: str) -> tuple[str, str] | None:
    """Return which half a name has a word for, and the other words; None without such a word."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+", " ", name).casefold()
    found = _HALF_NAME.fullmatch(words)
    if not found:
        return None
    kind = next(kind for kind, its_words in _HALF_WORDS.items() if found[2] in its_words)
    rest = [word for word in f"{found[1]} {found[3]}".split() if word not in _OTHER_WORDS]
    return kind, " ".join(rest)


def _list_classes(source: Path, train: Path, left_out: list[LeftOut]) -> tuple[list[str], list[SourceImage]]:
    """Return the classes that have images, and their images."""
    names = folders.find_classes(train)
    try:
        images = folders.list_class_folders(train, names, left_out)
    except UserError as error:
        raise refuse(source, _relative(source, str(error))) from error
    present = {image.label for image in images}
    left_out += [
        LeftOut(f"{train}/{name}", "a folder without images")
        for label, name in enumerate(names)
        if label not in present
    ]
    used = [label for label in range(len(names)) if label in present]
    new_label: dict[Label, Label] = {label: place for place, label in enumerate(used)}
    classes = [names[label] for label in used]
    return classes, [image._replace(label=new_label[image.label]) for image in images]


def _list_val(source: Path, val: Path, classes: list[str], left_out: list[LeftOut]) -> list[SourceImage]:
    try:
        return folders.list_class_folders(val, classes, left_out)
    except UserError as error:
        raise refuse(source, _relative(source, str(error))) from error


def _relative(source: Path, text: str) -> str:
    """Return a message about a file in `source` without the path of `source`."""
    return text.removeprefix(f"{source}/").removeprefix(f"{source}: ")


def _others(source: Path, splits: _Splits) -> list[LeftOut]:
    """Return what lies beside the folders of training and validation images."""
    used = [path.name for path in (splits.train, splits.val) if path]
    return [
        LeftOut(str(path), why_hidden(path.name) or f"not in {' or '.join(used)}")
        for path in sorted(source.iterdir())
        if path.name not in used
    ]


def _contents(source: Path) -> str:
    """Return what a folder holds, in a few words."""
    entries = sorted(path for path in source.iterdir() if not why_hidden(path.name))
    inside = [path.name + "/" for path in entries if path.is_dir()]
    files = [path.name for path in entries if not path.is_dir()]
    parts = [
        f"{len(names):,} {kind} ({', '.join(names[:_N_NAMED])}{', ...' if len(names) > _N_NAMED else ''})"
        for kind, names in (("folders", inside), ("files", files))
        if names
    ]
    return " and ".join(parts) or "nothing"
