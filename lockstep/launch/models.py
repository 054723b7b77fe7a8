"""Whether the network that a configuration names is there, found out without importing it."""

import importlib.util
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import UserError, nearest


def check_model(config: Config, folder: Path) -> None:
    """Raises UserError where models/<model>.py, or the package named, is not there. folder: of models."""
    source, colon, name = config.model.rpartition(":")
    if colon:
        words = [*source.split("."), name]
        if not all(word.isidentifier() for word in words[:-1]) or not name:
            raise UserError(f"model: {config.model!r} is not of the form package.module:Name")
        if importlib.util.find_spec(words[0]) is None:
            raise UserError(
                f"model: {config.model} needs the Python package {words[0]}, which is not installed"
            )
    elif not name.isidentifier() or importlib.util.find_spec(f"models.{name}") is None:
        there = sorted(path.stem for path in folder.glob("[!_]*.py"))
        raise UserError(
            f"model: there is no models/{name}.py{nearest(name, there)} (there are: {', '.join(there)}; "
            "or torchvision:NAME, timm:NAME, package.module:NAME)"
        )
