"""The answers of a network for images: the most probable classes, as text, JSON or CSV."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import UserError
from lockstep.evaluate.files import as_csv, check_place
from lockstep.files import write_bytes
from lockstep.text import one_line

FORMATS = (".csv", ".json")


class Answer(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float


def as_lines(image: Path, answers: list[Answer]) -> str:
    """Return the answers for people, one on a line."""
    lines = [f"  {answer.probability:7.2%}  {answer.name}" for answer in answers]
    return "\n".join(
        [f"{one_line(str(image))}:", *(lines or ["  no class is probable enough (--threshold)"])]
    )


def as_json(image: Path, answers: list[Answer]) -> str:
    """Return a JSON record."""
    return json.dumps(_record(str(image), answers))


def check_target(path: Path) -> None:
    """Raise UserError if answers can't be written to a new file of this name."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: is of no known format. Give a name that ends with {' or '.join(FORMATS)}.")
    check_place(path)
    if path.exists():
        raise UserError(f"{path}: already exists. Name another file.")


def write_answers(path: Path, answers: Mapping[str, list[Answer]]) -> None:
    """Write the answers for all images, best first, as CSV or JSON by the file's suffix.

    Raises:
        UserError: The file can't be written.
    """
    if path.suffix.lower() == ".csv":
        text = _as_csv(answers)
    else:
        text = json.dumps([_record(image, each) for image, each in answers.items()], indent=1) + "\n"
    write_bytes(path, text.encode("utf-8", "surrogateescape"))  # file names may be any bytes


def _record(image: str, answers: list[Answer]) -> dict[str, object]:
    found = [{"class": answer.name, "probability": answer.probability} for answer in answers]
    return {"image": image, "answers": found}


def _as_csv(answers: Mapping[str, list[Answer]]) -> str:
    """Return a row for each image: its path, then class and probability of each answer."""
    n_answers = max(map(len, answers.values()), default=0)
    numbers = range(1, n_answers + 1)
    rows = [["image", *(f"{what}_{number}" for number in numbers for what in ("class", "probability"))]]
    for image, each in answers.items():
        values = [value for name, share in each for value in (name, f"{share:.6f}")]
        rows.append([image, *values, *[""] * (2 * (n_answers - len(each)))])
    return as_csv(rows)
