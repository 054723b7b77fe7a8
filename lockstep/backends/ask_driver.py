"""A program that lists the GPUs as nvidia-smi would, by the driver's library, where nvidia-smi is missing.

`gpus.py` runs it as a process, which it can kill: a hanging driver blocks its caller, and a process that has
initialised CUDA keeps it initialised. It prints a line per GPU with the fields of `gpus.QUERY`, or one line
on standard error with exit status 1. It uses the standard library only.
"""

import ctypes
import sys
import uuid
from pathlib import Path

VERSION = Path("/proc/driver/nvidia/version")
NO_LIBRARY = "there is no libcuda.so.1"
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_MODES = {0: "Default", 2: "Prohibited", 3: "Exclusive_Process"}  # CUcomputemode


def main() -> None:
    """Print one line for each GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        print(NO_LIBRARY)
        return
    number = ctypes.c_int()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(number))
    for index in range(number.value):
        print(", ".join(_fields(driver, index)))


def _fields(driver: ctypes.CDLL, index: int) -> list[str]:
    device, mode = ctypes.c_int(), ctypes.c_int()
    n_bytes = ctypes.c_size_t()
    name, bus, own = (ctypes.create_string_buffer(size) for size in (128, 32, 16))
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    _call(driver, "cuDeviceGetName", name, len(name), device)
    _call(driver, "cuDeviceGetPCIBusId", bus, len(bus), device)
    _call(driver, "cuDeviceGetUuid_v2", own, device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(n_bytes), device)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, device)
    text = name.value.decode()
    mig = "Enabled" if " MIG " in text else "Disabled"
    memory = str(n_bytes.value >> 20)
    identity = [str(index), f"GPU-{uuid.UUID(bytes=own.raw)}", bus.value.decode(), text.replace(",", " ")]
    return [*identity, _version(driver), memory, mig, _MODES.get(mode.value, "Default")]


def _version(driver: ctypes.CDLL) -> str:
    """Return the driver's version if the kernel module shows it, else the version of its CUDA."""
    if VERSION.exists():
        words = VERSION.read_text().split()
        return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "unknown")
    cuda = ctypes.c_int()
    _call(driver, "cuDriverGetVersion", ctypes.byref(cuda))
    return f"for CUDA {cuda.value // 1000}.{cuda.value % 1000 // 10}"


def _call(driver: ctypes.CDLL, function: str, *arguments: object) -> None:
    result = getattr(driver, function)(*arguments)
    if result:
        sys.exit(f"{function} of libcuda.so.1 failed with CUDA error {result}")


if __name__ == "__main__":
    main()
