"""A dataflow engine: operations run on several devices as soon as their inputs are ready.

docs/flow.md is the user's guide.
"""

from lockstep.flow.arrays import Array
from lockstep.flow.capture import CaptureError, capture
from lockstep.flow.collectives import receive, send
from lockstep.flow.creation import array, arrays, device, ones, randb, randn, zeros
from lockstep.flow.devices import Device, cpus
from lockstep.flow.engine import Engine, dry_run, set_device, wait_all
from lockstep.flow.gpu import cuda
from lockstep.flow.lanes import Operation, OperationError, waiting
from lockstep.flow.operations import call
from lockstep.flow.parallel import Loss, ParallelExecutor, Strategy
from lockstep.flow.placement import current_device
from lockstep.flow.program import CapturedProgram
from lockstep.flow.trace import recording

__all__ = [
    "Array", "CaptureError", "CapturedProgram", "Device", "Engine", "Loss", "Operation", "OperationError",
    "ParallelExecutor", "Strategy", "array", "arrays", "call", "capture", "cpus", "cuda", "current_device",
    "device", "dry_run", "ones", "randb", "randn", "receive", "recording", "send", "set_device", "wait_all",
    "waiting", "zeros",
]  # fmt: skip
