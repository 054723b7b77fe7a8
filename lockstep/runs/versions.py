"""Versions that a result depends on besides configuration and data. Nothing here imports torch."""

import functools
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import lockstep


@functools.cache
def of_packages() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that compute, by name."""
    installed = {"lockstep": lockstep.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "pycuda"):
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
