"""The names of Minerva's Python interface, owl, as its document uses them.

Minerva: Wang et al. 2014, "Minerva: a scalable and highly efficient training platform for deep learning",
and its wiki's page "Feature Highlight: Multi GPU Training". A device is the number that creating it returns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.flow import devices, engine, gpu, placement
from lockstep.flow.arrays import Array
from lockstep.flow.creation import array, ones, randb, randn, zeros
from lockstep.flow.devices import Device

__all__ = [
    "accumulate", "create_cpu_device", "create_gpu_device", "from_numpy", "ones", "randb", "randn",
    "set_device", "to_numpy", "wait_for_all", "zeros",
]  # fmt: skip

_created: list[Device] = []


def create_cpu_device() -> int:
    """Create a device of all cores that this process may use, and return its number.

    Several such devices share the cores.
    """
    return _create(devices.cpus(1)[0], f"cpu:{len(_created)}")


def create_gpu_device(which: int) -> int:
    """Create a device for GPU `which`, and return its number. Raises UserError if it cannot be used."""
    return _create(gpu.cuda(which), f"cuda:{which}")


def _create(device: Device, name: str) -> int:
    device.name = name
    engine.engine_of(device)
    _created.append(device)
    return len(_created) - 1


def set_device(number: int) -> None:
    """Run what follows on this device, until another is set. Raises UserError for an unknown number."""
    if not 0 <= number < len(_created):
        raise UserError(f"owl.set_device: there is no device {number}; {len(_created)} have been created")
    engine.set_device(_created[number])


def from_numpy(data: Any) -> Array:
    """Return a copy as float32, which all of Minerva's arrays are."""
    return array(np.asarray(data, dtype=np.float32, order="C"))  # torch takes no negative strides


def to_numpy(value: Array) -> np.ndarray:
    """Return a copy, once the value is computed."""
    return value.numpy()


def accumulate(gradients: Sequence[Any]) -> Any:
    """Return the sum of arrays, or of lists of arrays, in order, on the current device."""
    first = gradients[0]
    if isinstance(first, list | tuple):
        return [accumulate(parts) for parts in zip(*gradients, strict=True)]
    total = first
    with placement.phase("merge"):
        for gradient in gradients[1:]:
            total = total + gradient
    return total


def wait_for_all() -> None:
    """Block until everything has run. Raises OperationError for failures that were not reported yet."""
    engine.wait_all()
