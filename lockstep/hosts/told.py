"""What another host tells, looked at before it is used: it may come from another version, or a stranger."""

import dataclasses
from typing import Any, TypeVar

from lockstep.errors import UserError
from lockstep.typed import convert

T = TypeVar("T")


def as_type(value: Any, hint: Any, host: int, key: str) -> Any:
    """The value as the type that `hint` says. Raises UserError naming the host and what it has told."""
    try:
        return convert(value, hint)
    except TypeError:
        raise refusal(host, key, value) from None


def as_record(kind: type[T], value: Any, host: int, key: str) -> T:
    """A dataclass of plain values, of a mapping of its fields. Raises as `as_type` does."""
    told = as_type(value, dict[str, Any], host, key)
    fields = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if told.keys() != fields.keys():
        raise refusal(host, key, value)
    return kind(**{name: as_type(told[name], hint, host, key) for name, hint in fields.items()})


def refusal(host: int, key: str, value: Any) -> UserError:
    """That what a host has told is nothing that this version of Lockstep tells."""
    text = f"host {host}: what it has told as its {key} is not of this version of Lockstep"
    return UserError(f"{text}: {one_line(value)}; all hosts need the same version")


def one_line(value: Any, longest: int = 200) -> str:
    """For a line of ours: what somebody else may have made long, or of several lines."""
    words = " ".join(str(value).split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in words[:longest])
    return printable + ("..." if len(words) > longest else "")
