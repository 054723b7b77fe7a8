"""The configuration of a run.

schema.py has the keys, layers.py reads and merges files and command lines, checks.py says what can't be, and
old_keys.py knows theano_alexnet's names.
"""

from lockstep.config.layers import (
    COMMAND_LINE,
    Layer,
    read_command_line,
    read_run,
    read_yaml,
    resolve,
    to_yaml,
)
from lockstep.config.schema import Config

__all__ = [
    "COMMAND_LINE",
    "Config",
    "Layer",
    "read_command_line",
    "read_run",
    "read_yaml",
    "resolve",
    "to_yaml",
]
