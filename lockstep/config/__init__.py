"""The configuration of a run.

schema.py defines the keys. layers.py reads and merges files and command lines. checks.py, hosts.py,
rules.py and augmentation.py refuse impossible values and combinations. old_keys.py handles former names and
theano_alexnet's keys.
"""

from lockstep.config.layers import (
    COMMAND_LINE,
    Layer,
    differences,
    is_default,
    of_any_place,
    read_command_line,
    read_run,
    read_yaml,
    resolve,
    run_to_yaml,
    to_yaml,
)
from lockstep.config.old_keys import with_new_names
from lockstep.config.schema import Config

__all__ = [
    "COMMAND_LINE",
    "Config",
    "Layer",
    "differences",
    "is_default",
    "of_any_place",
    "read_command_line",
    "read_run",
    "read_yaml",
    "resolve",
    "run_to_yaml",
    "to_yaml",
    "with_new_names",
]
