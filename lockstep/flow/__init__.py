"""Dataflow:

operations run when what they read is there, on several devices at once. docs/flow.md tells how.
"""

from lockstep.flow.arrays import Array, array, arrays, call, ones, randb, randn, zeros
from lockstep.flow.capture import CaptureError, capture
from lockstep.flow.devices import Device, cpus
from lockstep.flow.engine import Engine, dry_run, wait_all
from lockstep.flow.gpu import cuda
from lockstep.flow.groups import receive, send
from lockstep.flow.lanes import Operation, OperationError, waiting
from lockstep.flow.parallel import Loss, ParallelExecutor, Strategy
from lockstep.flow.placement import current_device, set_device
from lockstep.flow.program import Program
from lockstep.flow.recording import device
from lockstep.flow.trace import recording

__all__ = [
    "Array", "CaptureError", "Device", "Engine", "Loss", "Operation", "OperationError", "ParallelExecutor",
    "Program", "Strategy", "array", "arrays", "call", "capture", "cpus", "cuda", "current_device", "device",
    "dry_run", "ones", "randb", "randn", "receive", "recording", "send", "set_device", "wait_all",
    "waiting", "zeros",
]  # fmt: skip
