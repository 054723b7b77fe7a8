"""The NVIDIA GPUs of this machine, listed by `nvidia-smi`, a program that comes with the driver.

The launcher runs a program instead of calling CUDA, because a process that has initialised CUDA must not
fork. Where nvidia-smi is missing, as in some containers, ask_driver.py calls the driver's library and prints
the same.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.backends.ask_driver import NO_LIBRARY
from lockstep.errors import UserError
from lockstep.signals import die_with_parent

QUERY = "index,uuid,pci.bus_id,name,driver_version,memory.total,mig.mode.current,compute_mode"
NO_DRIVER = "there is no NVIDIA driver here"
ASKER = Path(__file__).resolve().parent / "ask_driver.py"
ANSWER_SECONDS = 30.0  # waking up an idle GPU takes seconds


@dataclass(frozen=True)
class Gpu:
    """One GPU. Its index may change with other GPUs or settings; `uuid` and `pci_bus_id` never do."""

    index: int  # nvidia-smi's number: 0 for the first one on the PCI bus
    uuid: str
    pci_bus_id: str  # domain:bus:device.function, as lspci writes it
    name: str
    driver: str
    memory_mib: int | None  # None for a GPU that shares the host's memory
    mig: bool  # divided into instances (Multi-Instance GPU)
    mode: str  # which processes may use it: Default (any), Exclusive_Process (one), Prohibited (none)

    def __str__(self) -> str:
        return f"{self.name}, {self.pci_bus_id}"


def list_gpus() -> list[Gpu]:
    """Return all GPUs, by place on the PCI bus.

    Raises:
        UserError: There is no GPU, or no driver.
    """
    program = shutil.which("nvidia-smi")
    if program is not None:
        name = "nvidia-smi"
        answer = _ask(name, [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    else:
        name, environment = "the driver's library", {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        answer = _ask(name, [sys.executable, "-I", str(ASKER)], environment)
        if answer.strip() == NO_LIBRARY:
            raise UserError(f"{NO_DRIVER} (no program nvidia-smi, no library libcuda.so.1)")
    gpus = read_listing(answer, name)
    if not gpus:
        raise UserError(f"{name} lists no GPU")
    return gpus


def _ask(name: str, command: list[str], environment: dict[str, str] | None = None) -> str:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            env=environment,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (nothing that other threads hold is touched)
        )
    except OSError as error:
        raise UserError(f"{command[0]} can't be run: {error.strerror}") from error
    try:
        output, errors = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()  # without waiting for its end: SIGKILL does not end a process in a hanging driver
        raise UserError(
            f"{name} has not answered for {ANSWER_SECONDS:g} s: the driver hangs; see dmesg"
        ) from error
    if process.returncode:
        text = " ".join((output + errors).split())[:300]  # nvidia-smi writes errors to either stream
        raise UserError(f"{name} failed with exit code {process.returncode}: {text}")
    return output


def read_listing(text: str, name: str = "nvidia-smi") -> list[Gpu]:
    """Return the GPUs in an answer to QUERY, which is a line of eight fields per GPU.

    The driver writes unknown values in brackets: [N/A], [Unknown Error].

    Args:
        name: The program that answered, for errors.

    Raises:
        UserError: The text is anything else.
    """
    return [_read_line(line, name) for line in text.splitlines() if line.strip()]


def _read_line(line: str, name_of_asked: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    try:
        index, uuid, bus, name, driver, memory, mig, mode = fields
        if not uuid.startswith("GPU-") or not name:
            raise ValueError
        domain, _, place = bus.partition(":")
        memory_mib = None if memory.startswith("[") else int(memory)
        bus = f"{int(domain, 16):04X}:{place}"  # nvidia-smi writes the domain with eight digits
        return Gpu(int(index), uuid, bus, name, driver, memory_mib, mig == "Enabled", mode)
    except ValueError:
        raise UserError(f"{name_of_asked}'s answer is not a list of working GPUs: {line[:300]!r}") from None


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """Return the GPUs that a process may use, in CUDA's order: the first is cuda:0.

    Args:
        setting: The value of CUDA_VISIBLE_DEVICES, or None if it is not set and all GPUs are visible. The
            CUDA programming guide ("CUDA Environment Variables") defines it: a list of indices or of
            beginnings of UUIDs. It ends before the first entry that names no GPU, or several. If it names a
            GPU twice, none is visible.

    Raises:
        UserError: It names a MIG instance.
    """
    if setting is None:
        return gpus
    shown: list[Gpu] = []
    for entry in setting.split(","):
        if entry.strip().startswith("MIG-"):
            raise UserError(
                f"CUDA_VISIBLE_DEVICES names {entry.strip()}: CUDA IPC does not work across MIG instances; "
                "name whole GPUs, with MIG turned off (nvidia-smi -i N -mig 0)"
            )
        named = [gpu for gpu in gpus if _is_named(gpu, entry.strip())]
        if len(named) != 1:
            break
        shown += named
    return shown if len(set(shown)) == len(shown) else []


def _is_named(gpu: Gpu, entry: str) -> bool:
    return entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
