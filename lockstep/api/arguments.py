"""The arguments of `lockstep.train` as keys of the configuration, and the objects that no key can name."""

import importlib.util
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lockstep import objects
from lockstep.config.layers import DATASET_PATHS, Dumper
from lockstep.errors import UserError
from lockstep.launch import child_main
from lockstep.objects import Kind


def pass_on(keys: dict[str, Any], model: Any, train_data: Any, val_data: Any) -> dict[Kind, Any]:
    """Set the keys `model` and `data`. Return the objects that they do not name.

    Raises:
        UserError: An argument can't be used, or this is a process that multiprocessing started.
    """
    if multiprocessing.parent_process() is not None or child_main.NAME in os.environ:
        raise UserError(
            "lockstep.train: called in a child process, perhaps by a module that the run's processes import. "
            'Call it in the main program, and in a module below `if __name__ == "__main__":`.'
        )
    passed: dict[Kind, Any] = {}
    if model is not None and not isinstance(model, str):
        is_network = hasattr(model, "state_dict") and not isinstance(model, type)
        if is_network or not callable(model):
            raise UserError(
                f"model: must be a name, or a class or function that makes a network, not {model!r:.100}"
            )
        keys["model"] = _import_name_of(model)
        if keys["model"] is None:
            keys["model"], passed["model"] = f"{objects.SOURCE}:{_plain_name_of(model)}", model
    elif model is not None:
        keys["model"] = model
    if (train_data is None) != (val_data is None):
        raise UserError("train_data and val_data: one is missing. Give both.")
    if train_data is not None:
        if other := [key for key in ("data", *DATASET_PATHS) if keys.get(key) is not None]:
            raise UserError(f"train_data: given beside another dataset's {other[0]}. Give one of them.")
        keys["data"], passed["data"] = f"{objects.SOURCE}:datasets", (train_data, val_data)
    return passed


def _import_name_of(value: Any) -> str | None:
    """Return 'module:Name' for a class or function that can be imported by that name, else None."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if module in ("", "__main__") or getattr(sys.modules.get(module), name, None) is not value:
        return None
    try:
        return f"{module}:{name}" if importlib.util.find_spec(module) else None
    except (ImportError, ValueError):  # a module that some program made
        return None


def _plain_name_of(value: Any) -> str:
    """Return a name of letters, digits and _ for messages and folders."""
    return re.sub(r"\W", "", str(getattr(value, "__qualname__", "")).rpartition(".")[2]) or "model"


def as_yaml(key: str, value: Any) -> str:
    """Return a key's value as the command line takes it: YAML on one line."""
    try:
        text = yaml.dump(
            _plain(value), Dumper=Dumper, default_flow_style=True, sort_keys=False, width=float("inf")
        )
    except yaml.YAMLError:
        advice = ". Pass datasets as train_data and val_data" if key == "data" else ""
        raise UserError(
            f"{key}: must be a text, a number, a list or a mapping of these, not {value!r}{advice}"
        ) from None
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    """Return a value with the lists, texts and numbers of Python, also inside of lists and mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
