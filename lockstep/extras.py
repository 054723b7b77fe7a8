"""Packages that only some features need, and the command that installs them."""

import importlib.util
import shlex

from lockstep.errors import UserError
from lockstep.files import program_folder


def require(feature: str, extra: str, *packages: str) -> None:
    """Check that the packages of a feature are installed.

    Args:
        feature: What needs them, for the message.
        extra: The extra of pyproject.toml that has them.
        packages: The names under which they are imported.

    Raises:
        UserError: One is missing. The message has the command that installs it.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{feature} needs {', '.join(missing)}. Install: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra and keeps the torch that is installed."""
    folder = program_folder()
    if (folder / "pyproject.toml").exists():
        place = shlex.quote(str(folder))
        return f"python -m pip install -c {place}/constraints.txt -e '{folder}[{extra}]'"
    return f"python -m pip install 'lockstep[{extra}]'"
