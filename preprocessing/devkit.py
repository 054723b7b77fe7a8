"""ImageNet's development kit: the number and name of each wnid, and the validation images' numbers.

`meta.mat` (2010 to 2012) and `meta_clsloc.mat` (2014) hold `synsets`, a struct array with ILSVRC2012_ID (or
another year), WNID and words. After the 1,000 classes, meta.mat has the synsets above them in the tree. The
ground truth is a text file with one such number per line, in the order of the validation images' names.
"""

import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.extras import require

_ID = re.compile(r"ILSVRC\d*_ID")
_META = re.compile(r"meta(_clsloc)?\.mat")
_TRUTH = re.compile(r"(?!.*_det_).*validation_ground_truth\.txt")  # without the detection task
_LARGEST = 64 << 20  # bytes; ImageNet's have less than 2 MB
_NUMBER = re.compile(r"_(\d+)\.[^.]+$")


@dataclass(frozen=True)
class Devkit:
    """The ILSVRC numbers and names of wnids."""

    path: str
    wnids: dict[int, str]
    words: dict[str, str]


def read_meta(path: Path) -> Devkit:
    """Read meta.mat, meta_clsloc.mat or a devkit's .tar.gz. Raise UserError for another file."""
    content = _find(path, _META)
    require("reading ImageNet's devkit", "imagenet", "scipy")
    import scipy.io

    try:
        synsets = scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
        id_field = next(name for name in synsets.dtype.names if _ID.fullmatch(name))
        rows = [(int(row[id_field]), str(row["WNID"]), str(row["words"])) for row in synsets.reshape(-1)]
    except Exception as error:  # SciPy raises many types for a file of another format
        raise UserError(
            f"{path}: is not ImageNet's meta.mat or meta_clsloc.mat: {type(error).__name__}: {error}"
        ) from error
    return Devkit(str(path), {row[0]: row[1] for row in rows}, {row[1]: row[2] for row in rows})


def read_ground_truth(path: Path) -> list[int]:
    """Read the ILSVRC numbers of a text file or a devkit's .tar.gz. Raise UserError for a bad line."""
    numbers = []
    lines = _find(path, _TRUTH).decode("ascii", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"\s*\d{1,6}\s*", line, re.ASCII):
            raise UserError(f"{path}: line {number} is not a class number: {line[:40]!r}")
        numbers.append(int(line))
    return numbers


def label_flat(
    names: list[str], devkit: Devkit, truth: list[int], classes: list[str], where: str
) -> list[int]:
    """Return the labels of sorted validation images. Raise UserError if names and numbers do not fit."""
    if len(names) != len(truth):
        raise UserError(f"{where}: holds {len(names)} images, the ground truth has {len(truth)} lines")
    labels = {wnid: label for label, wnid in enumerate(classes)}
    image_labels = []
    for line, (name, number) in enumerate(zip(names, truth, strict=True), 1):
        in_name = _NUMBER.search(name)
        if in_name and int(in_name[1]) != line:
            raise UserError(
                f"{where}: image {line} in order is {name}: one before it is missing or twice there"
            )
        wnid = devkit.wnids.get(number)
        if wnid not in labels:
            raise UserError(
                f"{devkit.path}: ground truth {number} of {name} is {wnid}, "
                f"which is not among the {len(classes)} classes of the training images"
            )
        image_labels.append(labels[wnid])
    return image_labels


def _find(path: Path, pattern: re.Pattern[str]) -> bytes:
    """Return the content of a file, or of the first matching member of a .tar.gz."""
    try:
        if not path.name.endswith((".tar.gz", ".tgz", ".tar")):
            return path.read_bytes()
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if pattern.fullmatch(Path(member.name).name) else None
                if file and member.size > _LARGEST:  # a small compressed archive may claim any size
                    raise UserError(
                        f"{path}: {member.name} claims {member.size:,} bytes: no devkit has such a file"
                    )
                if file:
                    return file.read()
    except UserError:
        raise
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    except Exception as error:  # zlib.error is not an OSError
        raise UserError(f"{path}: is not a whole archive: {error}") from error
    raise UserError(f"{path}: holds no file like {pattern.pattern}")
