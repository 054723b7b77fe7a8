"""Conversion of values of YAML and JSON to the types in a dataclass's annotations."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from lockstep.errors import UserError, nearest

T = TypeVar("T")

_UNIONS = (types.UnionType, typing.Union)  # int | str; int | Literal[...]


@dataclass(frozen=True)
class Range:
    """The limits of a number, in an annotation: least <= number <= most, and above < number < below."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None


def range_of(hint: Any) -> Range | None:
    """Return the range in an annotation: Annotated[int, Range(...)], or a union or tuple with such a part."""
    for part in (*getattr(hint, "__metadata__", ()), *typing.get_args(hint)):
        found = part if isinstance(part, Range) else range_of(part)
        if found:
            return found
    return None


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the annotated type. Raise TypeError if that would lose information."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return _convert_to_one_of(value, options)
    if origin is Literal:
        matches = isinstance(value, str) and value in options
    elif origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        return tuple(convert(item, options[0]) for item in value)
    elif origin is dict:
        if not isinstance(value, dict) or not all(type(key) in (str, int) for key in value):
            raise TypeError
        return {str(key): item for key, item in value.items()}  # {0: 10} names the class '0'
    elif hint is float:
        return _convert_to_float(value)
    else:
        matches = type(value) is hint  # not isinstance, since True is no whole number here
    if not matches:
        raise TypeError
    return value


def convert_record(mapping: Any, kind: type[T]) -> T:
    """Return a dataclass, made of a mapping of all its fields. Raise TypeError as `convert` does."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if not isinstance(mapping, dict) or mapping.keys() != fields.keys():
        raise TypeError
    return kind(**{name: convert(mapping[name], hint) for name, hint in fields.items()})


def merge_arguments(
    owner: str,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    types: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return all arguments of something that the configuration names: the given ones before the defaults.

    Args:
        owner: What has the arguments, for the message.
        defaults: The arguments with their defaults. Tuples are of numbers.
        given: Values as YAML has them.
        types: The annotations of arguments that have another type than their default.

    Raises:
        UserError: An argument is unknown or of another type; the message names it.
    """
    arguments = dict(defaults)
    for name, value in given.items():
        if name not in arguments:
            known = f"it has: {', '.join(arguments)}" if arguments else "it has none"
            raise UserError(f"{owner} has no {name}{nearest(name, arguments)} ({known})")
        default = arguments[name]
        hint = types.get(name, tuple[float, ...] if isinstance(default, tuple) else type(default))
        try:
            arguments[name] = convert(value, hint)
        except TypeError:
            raise UserError(f"{name} must be {describe(hint)}, not {value!r}") from None
    return arguments


def _convert_to_one_of(value: Any, options: tuple[Any, ...]) -> Any:
    for option in options:
        try:
            return convert(value, option)
        except TypeError:
            continue
    raise TypeError


def _convert_to_float(value: Any) -> float:
    """Return a number. Text is accepted, since YAML 1.1 reads 5e-4 (without a point) as text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise TypeError from None


def literals_of(hint: Any) -> tuple[str, ...]:
    """Return the literal texts that `convert` accepts."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return options
    if origin not in _UNIONS:
        return ()
    return tuple(literal for option in options for literal in literals_of(option))


def describe(hint: Any) -> str:
    """Describe what `convert` accepts, for a user."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return " or ".join(describe(option) for option in options)
    if origin is Literal:
        return " or ".join(repr(option) for option in options)
    if origin is tuple:
        return f"a list, each item {describe(options[0])}"
    if origin is dict:
        return "a mapping (text: value)"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text (in quotes)"}
    return names.get(hint, "null")
