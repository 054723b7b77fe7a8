"""Layers of a configuration: config.yaml, then the spec, then the command line; the later one wins.

An unknown key, a value of the wrong type, a key given twice in one file and an impossible combination each
raise a `UserError` that names the file and the key. The rules of `yaml.safe_load` apply: nothing in a YAML
file is ever executed. But `1e-8` is a number, as in YAML 1.2.
"""

import dataclasses
import functools
import math
import os
import re
import typing
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lockstep.config.checks import check
from lockstep.config.hosts import NETWORK_KEYS, OWN_KEYS, SEVERAL_HOSTS_KEYS
from lockstep.config.old_keys import RENAMED, did_you_mean, suggestion, translate, with_new_names
from lockstep.config.schema import Config
from lockstep.errors import UserError, nearest
from lockstep.files import program_folder
from lockstep.typed import convert, describe, literals_of

COMMAND_LINE = "command line"
SHIPPED = program_folder() / "config.yaml"  # the defaults that users see
# PyYAML lets the errors of int(), float() and date() through for tags like !!int x, and recursion for deep
# nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, OverflowError, RecursionError)
DATASET_PATHS = ("data_folder", "train_folder", "val_folder", "label_folder", "mean_file")
# Keys of a start of a run and of its host, which a run's config.yaml does not bring to another start.
_OF_A_START = ("load_epoch", "n_hosts", *OWN_KEYS)
_MOST_VALUES = 100_000  # in a file, with its aliases expanded


@dataclass(frozen=True)
class Layer:
    """The keys that one source sets: a file, or the command line."""

    source: str
    values: Mapping[str, Any]
    notices: tuple[str, ...] = ()  # for the user, about how the source was read


class _UniqueKeyLoader(yaml.SafeLoader):
    """A `yaml.SafeLoader` that refuses a key given twice."""

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
        if number.bit_length() > 10_000:  # Python refuses to print it
            problem = "a whole number of thousands of digits"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return number


class Dumper(yaml.SafeDumper):
    """A `yaml.SafeDumper` of what Lockstep reads: texts that look like numbers are quoted."""


_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _UniqueKeyLoader.construct_yaml_int)
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$", re.ASCII)
for _each in (_UniqueKeyLoader, Dumper):  # YAML 1.1 asks for a point and a sign: 1.0e-8
    _each.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def _load(text: str) -> Any:
    """Return the value of a YAML text. Raise one of _YAML_ERRORS, also if aliases make it huge or endless."""
    loader = _UniqueKeyLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}) > _MOST_VALUES:
            raise yaml.YAMLError(f"with its aliases expanded it holds more than {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node with aliases expanded: inf for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        pairs = isinstance(node, yaml.MappingNode)
        below = [part for pair in parts for part in pair] if pairs else parts
        known[id(node)] = 1 + sum(_count_values(part, known) for part in below)
    return known[id(node)]


def read_yaml(path: str | Path) -> Layer:
    """Read the keys in a YAML file.

    Raises:
        UserError: The file is missing, not YAML or not a mapping.
    """
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
    """Read a run's config.yaml without the keys of its hosts, and without the checkpoint that it began with.

    Args:
        path: The run's config.yaml. It may hold the names that keys had in version 0.1.
        hosts: The number of hosts of the run that uses the keys. `network` and `network_dtype` are kept only
            for several hosts.

    Raises:
        UserError: The file is missing, empty, not YAML or not a mapping.
    """
    layer = read_yaml(path)
    if not layer.values:  # else the run would continue with the defaults
        raise UserError(f"{path}: holds no keys, so the run's settings are not known: restore or remove it")
    return of_any_place(Layer(layer.source, with_new_names(layer.values)), hosts)


def of_any_place(layer: Layer, hosts: int = 1) -> Layer:
    """Return a run's settings without the keys of its hosts, and without the checkpoint that it began with.

    Args:
        layer: A run's settings.
        hosts: As for `read_run`.
    """
    return _without(layer, {*_OF_A_START, *(() if hosts > 1 else NETWORK_KEYS)})


def of_this_start(layer: Layer) -> Layer:
    """Return the keys of config.yaml that count even where a run's own file replaces it."""
    return Layer(layer.source, {key: layer.values[key] for key in _OF_A_START if key in layer.values})


def for_one_host(layer: Layer) -> Layer:
    """Return a layer without the keys that are for several hosts only."""
    return _without(layer, SEVERAL_HOSTS_KEYS)


def _without(layer: Layer, keys: Collection[str]) -> Layer:
    values = {key: value for key, value in layer.values.items() if key not in keys}
    return dataclasses.replace(layer, values=values)


def read_command_line(arguments: list[str]) -> Layer:
    """Read arguments such as 'learning_rate=0.02' and 'run_name=2026-11-28', whose values are YAML or text.

    Raises:
        UserError: An argument is not of the form key=value, or a value that is no text is not YAML.
    """
    values: dict[str, Any] = {}
    notices: list[str] = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if argument.startswith("-"):
            raise UserError(f"{COMMAND_LINE}: unknown option {key}{_as_key(key, text)}")
        if not equals or not key:
            remedy = f". Write data_folder={argument}" if os.path.isdir(argument) else ""
            raise UserError(f"{COMMAND_LINE}: {argument!r} is not of the form key=value{remedy}")
        if key in values:
            notices.append(f"{COMMAND_LINE}: {key} is given twice: the last one counts, {argument}")
        values[key] = _read_value(key, text)
    return Layer(COMMAND_LINE, values, tuple(notices))


def _read_value(key: str, text: str) -> Any:
    """Return the value of `key`. A key of texts takes all but lists, mappings, null and quotes as it is."""
    is_text = typing.get_type_hints(Config).get(key) in (str, str | None)
    try:
        value = _load(text)
    except _YAML_ERRORS as error:
        if is_text:  # the brackets of an IPv6 address begin a list in YAML
            return text
        raise UserError(f"{COMMAND_LINE}: {f'{key}={text}'!r}: the value can't be read") from error
    is_plain = not text.lstrip().startswith(("'", '"')) and not isinstance(value, list | dict | None)
    return text.strip() if is_text and is_plain else value


def _as_key(option: str, text: str) -> str:
    """Return how to write an unknown option as a key, or ''."""
    name = option.lstrip("-").replace("-", "_")
    if name in RENAMED:
        return f": {name} is now {RENAMED[name]} (write '{RENAMED[name]}={text or '...'}', without dashes)"
    known = [field.name for field in dataclasses.fields(Config)]
    key = name if name in known else suggestion(name, known)
    return f" (did you mean '{key}={text or '...'}', without dashes?)" if key else ""


def resolve(layers: list[Layer]) -> tuple[Config, list[str]]:
    """Merge layers into a checked configuration.

    Args:
        layers: The sources of keys; a later layer wins.

    Returns:
        The configuration, and warnings to print about obsolete keys and keys given twice.

    Raises:
        UserError: A key is unknown or has a former name, or a value can't work. The message names its source.
    """
    hints = typing.get_type_hints(Config)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notices: list[str] = []
    for layer in layers:
        notices += layer.notices
        translated = translate(layer.source, layer.values, notices)
        _forget_datasets(layer.source, translated, values)
        for key, value in translated.items():
            if key in RENAMED:
                raise UserError(f"{layer.source}: {key} is now {RENAMED[key]}")
            if key not in hints:
                raise UserError(f"{layer.source}: unknown key '{key}'{did_you_mean(key, hints)}")
            values[key] = _checked(layer.source, key, value, hints[key])
            sources[key] = layer.source
    config = Config(**values)
    check(config, sources)
    return config, notices


def _forget_datasets(source: str, values: Mapping[str, Any], earlier: dict[str, Any]) -> None:
    """Remove the dataset of earlier layers if a layer names another: `data`, or the paths inside a folder.

    Args:
        source: The name of the layer.
        values: Its keys and values.
        earlier: The keys and values of the layers before it, which are changed.

    Raises:
        UserError: The layer sets a path that belongs to a dataset folder, but no folder.
    """
    paths = [key for key in DATASET_PATHS if values.get(key) is not None]
    if "data_folder" in paths:
        earlier |= dict.fromkeys(DATASET_PATHS)
    if earlier.get("data") is None or values.get("data") is not None:
        return
    if "data" in values or "data_folder" in paths or "train_folder" in paths:
        earlier |= {"data": None, "item_size": None}
    elif paths:
        raise UserError(
            f"{source}: {paths[0]} is for dataset folders, not for `data`: leave it out, or set data_folder"
        )


def with_order(keys: dict[str, Any]) -> dict[str, Any]:
    """Return keys to compare: several `learning_rates` as pairs, because the last one that matches counts."""
    rates = keys["learning_rates"]
    return keys if len(rates) < 2 else {**keys, "learning_rates": [list(pair) for pair in rates.items()]}


def with_absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values with absolute paths of the dataset.

    The copy in a run's folder then holds for every working directory.
    """
    paths = {key: values[key] for key in (*DATASET_PATHS, "cache_folder") if isinstance(values.get(key), str)}
    return {**values, **{key: str(Path(value).absolute()) for key, value in paths.items()}}


def to_yaml(config: Config) -> str:
    """Return the whole configuration as YAML. `--config` reads it back to the same Config."""
    plain = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False)


def run_to_yaml(config: Config) -> str:
    """Return the content of a run's config.yaml, with which `--config` begins a new run.

    It leaves out whether and where this start of the run has resumed, since the new run would do so, too.
    """
    return to_yaml(dataclasses.replace(config, resume_train=False, load_epoch="latest"))


@functools.cache
def shipped() -> Config:
    """Return the configuration of the program's config.yaml, or the schema's if that file is missing."""
    return resolve([read_yaml(SHIPPED)] if SHIPPED.exists() else [])[0]


def is_default(key: str, value: Any) -> bool:
    """Return whether a value is the default: that of config.yaml if it has the key, else the schema's.

    Args:
        key: The name of a key.
        value: Its value as in Config or as in YAML, where tuples are lists.
    """
    default = getattr(shipped(), key, None)
    as_yaml = [list(each) if isinstance(each, tuple) else each for each in (value, default)]
    return as_yaml[0] == as_yaml[1]


def differences(config: Config) -> dict[str, Any]:
    """Return the keys, with their values, that do not have their default."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {key: value for key, value in values.items() if not is_default(key, value)}


def _checked(source: str, key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except TypeError:
        meant = nearest(value, literals_of(hint)) if isinstance(value, str) else ""
        raise UserError(f"{source}: {key} must be {describe(hint)}, not {value!r}{meant}") from None
