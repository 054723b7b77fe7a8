"""What a result depends on besides configuration and data, for the record. Nothing here imports torch."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import lockstep


def of_packages() -> dict[str, str]:
    """Versions by name, of Python and of what computes as far as it is installed: a CPU needs no PyCUDA."""
    found = {"lockstep": lockstep.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "pycuda"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
