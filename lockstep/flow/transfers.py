"""Brings arrays into the memory of the device where an operation runs."""

from functools import partial
from typing import Any

import torch

from lockstep.flow import placement
from lockstep.flow.arrays import Array, Storage, from_tensor, run
from lockstep.flow.devices import Device
from lockstep.flow.instructions import Instruction
from lockstep.flow.recipes import Slot


def bring(tensor: torch.Tensor, device: Device) -> Array:
    """The array, or its copy in the device's memory, one for each version. Ordinary tensors are copied."""
    if type(tensor) is not Array:
        return from_tensor(tensor, device)
    source = tensor.memory
    if source.device.memory == device.memory:
        return tensor
    program = placement.program_of([tensor])
    copies, version = (source.copies, source.version) if program is None else program.copies_of(source)
    known = copies.get(device.memory)
    if known is None or known[0] != version:
        known = copies[device.memory] = version, _copy(source, device, program)
    copy = known[1].memory
    if source.cell.layout is None:
        return known[1]
    return Array(copy, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _copy(source: Storage, device: Device, program: Any) -> Array:
    """Of all of a memory."""
    layout = source.cell.layout
    target = Storage(device, layout, source.name, program)
    step = Instruction("copy", partial(_move, source.device, device), device, "communication")
    step.template, step.views = [Slot(0)], [None]
    step.line, step.phase = placement.user_line(), "copy"
    memories: tuple[Any, ...] = ([source], [], [target])
    _ = run(step, *memories) if program is None else program.add(step, *memories)
    size, stride, dtype = layout or (torch.Size(()), None, torch.float32)
    return Array(target, size, stride, 0, dtype)


def _move(source: Device, target: Device, value: torch.Tensor) -> torch.Tensor:
    direct = "host" in (source.memory, target.memory) or target.reaches(source, value.dtype)
    return target.put(value if direct else source.fetch(value))
