"""ImageNet's development kit: which wnid has which number and words, and the validation pictures' numbers.

`meta.mat` (2010 to 2012) and `meta_clsloc.mat` (2014) hold `synsets`, a struct array with ILSVRC2012_ID (or
another year), WNID and words; meta.mat goes on after the 1,000 classes with the synsets above them in the
tree. The ground truth is a text file with one such number a line, in the order of the validation pictures'
names.
"""

import io
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import scipy.io

from lockstep.errors import UserError

_ID = re.compile(r"ILSVRC\d*_ID")
_META = re.compile(r"meta(_clsloc)?\.mat")
_TRUTH = re.compile(r"(?!.*_det_).*validation_ground_truth\.txt")  # not that of the detection task
_LARGEST = 64 << 20  # bytes; those of ImageNet have less than 2 MB
_NUMBER = re.compile(r"_(\d+)\.[^.]+$")


@dataclass(frozen=True)
class Devkit:
    """ILSVRC numbers and words of wnids."""

    path: str
    wnids: dict[int, str]
    words: dict[str, str]


def read_meta(path: Path) -> Devkit:
    """From meta.mat or meta_clsloc.mat, or a devkit's .tar.gz. Raises UserError where it is no such thing."""
    content = _find(path, _META)
    try:
        synsets = scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
        id_field = next(name for name in synsets.dtype.names if _ID.fullmatch(name))
        rows = [(int(row[id_field]), str(row["WNID"]), str(row["words"])) for row in synsets.reshape(-1)]
    except Exception as error:  # whatever SciPy meets in a file that is something else
        raise UserError(
            f"{path}: is not ImageNet's meta.mat or meta_clsloc.mat: {type(error).__name__}: {error}"
        ) from error
    return Devkit(str(path), {row[0]: row[1] for row in rows}, {row[1]: row[2] for row in rows})


def read_ground_truth(path: Path) -> list[int]:
    """ILSVRC numbers from the text file, or a devkit's .tar.gz. Raises UserError naming a bad line."""
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
    """The labels of sorted validation pictures. Raises UserError where names and numbers do not fit."""
    if len(names) != len(truth):
        raise UserError(f"{where}: holds {len(names)} pictures, the ground truth has {len(truth)} lines")
    labels = {wnid: label for label, wnid in enumerate(classes)}
    found = []
    for line, (name, number) in enumerate(zip(names, truth, strict=True), 1):
        in_name = _NUMBER.search(name)
        if in_name and int(in_name[1]) != line:
            raise UserError(
                f"{where}: picture {line} in order is {name}: one before it is missing or twice there"
            )
        wnid = devkit.wnids.get(number)
        if wnid not in labels:
            raise UserError(
                f"{devkit.path}: ground truth {number} of {name} is {wnid}, "
                f"which is not among the {len(classes)} classes of the training pictures"
            )
        found.append(labels[wnid])
    return found


def _find(path: Path, wanted: re.Pattern[str]) -> bytes:
    """The content of a file, or of the first member of a .tar.gz whose name is wanted."""
    try:
        if not path.name.endswith((".tar.gz", ".tgz", ".tar")):
            return path.read_bytes()
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member) if wanted.fullmatch(Path(member.name).name) else None
                if file and member.size > _LARGEST:  # of a compressed archive, a few bytes may claim any size
                    raise UserError(
                        f"{path}: {member.name} claims {member.size:,} bytes: no devkit has such a file"
                    )
                if file:
                    return file.read()
    except UserError:
        raise
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise UserError(f"{path}: can't be read: {error}") from error
    except Exception as error:  # zlib.error is no OSError
        raise UserError(f"{path}: is not a whole archive: {error}") from error
    raise UserError(f"{path}: holds no file like {wanted.pattern}")
