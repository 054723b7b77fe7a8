"""Configurations in layers: config.yaml, then the spec, then the command line; the later one wins.

A key that is not, a value of the wrong type, a key given twice in one file and an impossible combination are
each a `UserError` that names the file and the key. `yaml.safe_load` rules apply: nothing in a YAML file is
ever executed.
"""

import dataclasses
import math
import typing
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.checks import check
from lockstep.config.old_keys import translate
from lockstep.config.schema import Config
from lockstep.errors import UserError, nearest
from lockstep.typed import convert, describe, words_of

COMMAND_LINE = "command line"
# PyYAML lets the errors of int(), float() and date() through for tags like !!int x, and recursion for deep
# nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, OverflowError, RecursionError)
_OF_HOSTS = {"hosts", "host", "meeting_point", "address"}
_MOST_VALUES = 100_000  # in a file, its aliases followed
# What there is not, and what does it (docs/decisions.md, "The exchange").
_INSTEAD = {("rule", "momenta"): ": take gradients, which is the same step with less work"}


@dataclass(frozen=True)
class Layer:
    """Where some keys came from (a file's name or 'command line') and what they are."""

    source: str
    values: Mapping[str, Any]


class _UniqueKeyLoader(yaml.SafeLoader):
    """safe_load, but a key given twice is an error instead of a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        counts = Counter(key for key in keys if isinstance(key, Hashable))
        twice = sorted(str(key) for key, count in counts.items() if count > 1)
        if twice:
            problem = f"key given twice: {', '.join(twice)}"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        if number.bit_length() > 10_000:  # Python doesn't even print it
            problem = "a whole number of thousands of digits"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return number


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)


def _load(text: str) -> Any:
    """What a text in YAML says. Raises one of _YAML_ERRORS, also where aliases make it huge or endless."""
    loader = _UniqueKeyLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"with its aliases followed it holds more than {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Of a node and all below it, aliases followed; infinite where it is within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        pairs = isinstance(node, yaml.MappingNode)
        below = [part for pair in parts for part in pair] if pairs else parts
        known[id(node)] = 1 + sum(_count_values(part, known) for part in below)
    return known[id(node)]


def read_yaml(path: str | Path) -> Layer:
    """Reads one YAML file of keys. Raises UserError where it is missing, not YAML or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text file in UTF-8") from error
    try:
        values = _load(text)
    except _YAML_ERRORS as error:
        raise UserError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: must hold 'key: value' lines")
    return Layer(str(path), values)


def read_run(path: Path, hosts: int = 1) -> Layer:
    """A run's config.yaml, without what says on which hosts it was. hosts: on how many it is to be now.

    Raises UserError as `read_yaml` does.
    """
    layer = read_yaml(path)
    dropped = _OF_HOSTS if hosts > 1 else _OF_HOSTS | {"network", "wire"}
    return Layer(layer.source, {key: value for key, value in layer.values.items() if key not in dropped})


def read_command_line(words: list[str]) -> Layer:
    """Turns ['learning_rate=0.02', ...] into a layer; values are read as YAML."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{COMMAND_LINE}: {word!r} is not of the form key=value")
        if key in values:
            raise UserError(f"{COMMAND_LINE}: {key} is given twice")
        try:
            values[key] = _load(text)
        except _YAML_ERRORS as error:
            if key == "meeting_point":  # an address of IPv6: its brackets begin a list in YAML
                values[key] = text
                continue
            raise UserError(f"{COMMAND_LINE}: {word!r}: the value can't be read") from error
    return Layer(COMMAND_LINE, values)


def resolve(layers: list[Layer]) -> tuple[Config, list[str]]:
    """Merges the layers (the last wins) into a checked Config, and notices to print about old keys."""
    hints = typing.get_type_hints(Config)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notices: list[str] = []
    for layer in layers:
        for key, value in translate(layer.source, layer.values, notices).items():
            if key not in hints:
                raise UserError(f"{layer.source}: unknown key '{key}'{nearest(key, hints)}")
            values[key] = _checked(layer.source, key, value, hints[key])
            sources[key] = layer.source
    config = Config(**values)
    check(config, sources)
    return config, notices


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads back to the same Config."""
    plain = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(plain, sort_keys=False)


def _checked(source: str, key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except TypeError:
        meant = ""
        if isinstance(value, str):
            meant = _INSTEAD.get((key, value)) or nearest(value, words_of(hint))
        raise UserError(f"{source}: {key} must be {describe(hint)}, not {value!r}{meant}") from None
