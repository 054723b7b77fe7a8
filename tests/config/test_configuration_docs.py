"""docs/configuration.md lists every key with its type and default; config.yaml those that people set."""

import dataclasses
import re
import typing
from typing import Any, Literal

import pytest
import yaml
from conftest import ROOT, make_config

from lockstep.config import Config, is_default
from lockstep.config.augmentation import CROP_ARGS, crop_args_of
from lockstep.config.layers import shipped

_HINTS = typing.get_type_hints(Config)
_ROW = re.compile(r"^\| `(\w+)` \|.*", re.MULTILINE)


def _type(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in options)
    if origin is tuple:
        return f"list of {_type(options[0])}"
    if origin is dict:
        return "mapping"
    if options:
        return ", ".join(_type(option) for option in options)
    return "`null`" if hint is type(None) else f"{hint.__name__}"


def _yaml(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return "`{}`".format(yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[0])


def row_start(key: str) -> str:
    """Return the start of a key's row in docs/configuration.md, up to the meaning."""
    default = _yaml(getattr(Config(), key))
    set_by_file = _yaml(getattr(shipped(), key))
    second = "" if default == set_by_file else f" (config.yaml: {set_by_file})"
    return f"| `{key}` | {_type(_HINTS[key])} | {default}{second} |"


def test_the_reference_lists_every_key_once_with_its_type_and_default() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = {found[1]: found[0] for found in _ROW.finditer(text)}
    assert set(rows) == set(_HINTS) and len(_ROW.findall(text)) == len(_HINTS)
    for key, row in rows.items():
        assert row.startswith(row_start(key)) and len(row) > len(row_start(key)) + 10, row_start(key)


def test_the_ranges_of_a_crop_can_be_copied_from_the_reference() -> None:
    (row,) = re.findall(r"^\| `crop_args` .*", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    printed = {name: yaml.safe_load(text) for name, text in re.findall(r"`(\w+)` (\[.*?\])", row)}
    crop_args = crop_args_of(make_config(crop="random_resized", crop_args=printed))
    assert printed.keys() == crop_args.keys() == CROP_ARGS["random_resized"].keys()
    for name, default in CROP_ARGS["random_resized"].items():
        assert crop_args[name] == pytest.approx(default, abs=1e-3), name


def test_config_yaml_explains_the_keys_that_people_set() -> None:
    text = (ROOT / "config.yaml").read_text()
    values = yaml.safe_load(text)
    assert set(values) <= set(_HINTS) and 35 <= len(values) <= 50
    for key in values:
        assert re.search(rf"^{key}: .*  # \S", text, re.MULTILINE), f"{key} has no explanation"


def test_a_default_is_what_config_yaml_says_and_else_the_schema() -> None:
    values = yaml.safe_load((ROOT / "config.yaml").read_text())
    assert "n_slots" not in values and is_default("n_slots", Config().n_slots)
    assert values["n_epochs"] != Config().n_epochs and is_default("n_epochs", values["n_epochs"])
    assert not is_default("n_epochs", Config().n_epochs)
    for field in dataclasses.fields(Config):
        assert is_default(field.name, getattr(shipped(), field.name))
