"""What a result depends on besides configuration and data, for the record. Nothing here imports torch."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import lockstep


def of_packages(devices: tuple[str, ...]) -> dict[str, str]:
    """Versions by name, of Python and of what computes; PyCUDA's where `devices` are GPUs."""
    found = {"lockstep": lockstep.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy") if "cpu" in devices else ("torch", "numpy", "pycuda"):
        with suppress(PackageNotFoundError):  # there, but put there without an installer
            found[package] = version(package)
    return found
