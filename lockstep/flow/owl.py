"""The names of Minerva's Python interface, owl, for what its document shows.

Minerva: Wang et al. 2014, "Minerva: a scalable and highly efficient training platform for deep learning", and
its wiki's page "Feature Highlight: Multi GPU Training". A device is the number that creating it returns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.errors import UserError
from lockstep.flow import devices, engine, gpu, placement
from lockstep.flow.arrays import Array, array, ones, randb, randn, zeros
from lockstep.flow.devices import Device

__all__ = [
    "accumulate", "create_cpu_device", "create_gpu_device", "from_numpy", "ones", "randb", "randn",
    "set_device", "to_numpy", "wait_for_all", "zeros",
]  # fmt: skip

_created: list[Device] = []


def create_cpu_device() -> int:
    """A device of all the cores that this process may use; several share them. Returns its number."""
    return _create(devices.cpus(1)[0], f"cpu:{len(_created)}")


def create_gpu_device(which: int) -> int:
    """GPU `which`. Returns the device's number. Raises UserError, in one line, where it can't be used."""
    return _create(gpu.cuda(which), f"cuda:{which}")


def _create(device: Device, name: str) -> int:
    device.name = name
    placement.engine_of(device)
    _created.append(device)
    return len(_created) - 1


def set_device(number: int) -> None:
    """What follows runs on this device, until another is set. Raises UserError for a number not created."""
    if not 0 <= number < len(_created):
        raise UserError(f"owl.set_device: there is no device {number}; {len(_created)} have been created")
    placement.set_device(_created[number])


def from_numpy(data: Any) -> Array:
    """A copy, float32 as all of Minerva's arrays."""
    return array(np.asarray(data, dtype=np.float32))


def to_numpy(value: Array) -> np.ndarray:
    """A copy, once the value is there."""
    return value.numpy()


def accumulate(gradients: Sequence[Any]) -> Any:
    """The sum, in order, on the current device. gradients: of each part; arrays, or lists of them."""
    first = gradients[0]
    if isinstance(first, list | tuple):
        return [accumulate(parts) for parts in zip(*gradients, strict=True)]
    total = first
    with placement.phase("merge"):
        for gradient in gradients[1:]:
            total = total + gradient
    return total


def wait_for_all() -> None:
    """Until everything has run. Raises OperationError for failures that nobody has seen."""
    engine.wait_all()
