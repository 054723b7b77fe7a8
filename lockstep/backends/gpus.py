"""Lists the NVIDIA GPUs of this machine by asking `nvidia-smi`, a program that comes with the driver.

Asking CUDA instead would make a CUDA context in the launcher, which takes memory on every GPU, and a call
into a driver that hangs can't be given up. A program can be.
"""

import shutil
import subprocess
from dataclasses import dataclass

from lockstep.errors import UserError
from lockstep.interrupts import die_with_parent

QUERY = "index,uuid,pci.bus_id,name,driver_version,memory.total,mig.mode.current"
ANSWER_SECONDS = 30.0  # a GPU that nobody has used for a while takes seconds to answer


@dataclass(frozen=True)
class Gpu:
    """One GPU. Its index may change with other GPUs or settings; `uuid` and `pci_bus_id` never do."""

    index: int  # nvidia-smi's number: 0 for the first one on the PCI bus
    uuid: str
    pci_bus_id: str  # domain:bus:device.function, as lspci writes it
    name: str
    driver: str
    memory_mib: int | None  # None where it shares the processor's memory
    mig: bool  # whether it is in Multi-Instance GPU mode, divided into smaller devices

    def __str__(self) -> str:
        return f"{self.name}, {self.pci_bus_id}"


def list_gpus() -> list[Gpu]:
    """All GPUs, by place on the PCI bus. Raises UserError where there is none, or no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise UserError("there is no NVIDIA driver here (no program nvidia-smi)")
    gpus = read_listing(_ask(program))
    if not gpus:
        raise UserError("nvidia-smi lists no GPU")
    return gpus


def _ask(program: str) -> str:
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            encoding="utf-8",
            errors="replace",
            preexec_fn=die_with_parent,  # noqa: PLW1509 (safe: it takes no locks)
        )
    except OSError as error:
        raise UserError(f"{program} can't be run: {error.strerror}") from error
    try:
        output, complaint = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        process.kill()  # its end is not waited for: inside a driver that hangs, not even this ends it
        raise UserError(
            f"nvidia-smi has not answered for {ANSWER_SECONDS:g} s: the driver hangs; see dmesg"
        ) from error
    if process.returncode:
        words = " ".join((output + complaint).split())[:300]  # errors may be on either
        raise UserError(f"nvidia-smi failed with exit code {process.returncode}: {words}")
    return output


def read_listing(text: str) -> list[Gpu]:
    """The GPUs in nvidia-smi's answer to QUERY: one line of seven fields for each.

    A field that the driver can't fill has brackets: [N/A], [Unknown Error]. Raises UserError where the answer
    is anything else.
    """
    return [_read_line(line) for line in text.splitlines() if line.strip()]


def _read_line(line: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    try:
        index, uuid, bus, name, driver, memory, mig = fields
        if not uuid.startswith("GPU-") or not name:
            raise ValueError
        domain, _, place = bus.partition(":")
        memory_mib = None if memory.startswith("[") else int(memory)
        bus = f"{int(domain, 16):04X}:{place}"  # nvidia-smi writes the domain with eight digits
        return Gpu(int(index), uuid, bus, name, driver, memory_mib, mig == "Enabled")
    except ValueError:
        raise UserError(f"nvidia-smi's answer is not a list of working GPUs: {line[:300]!r}") from None


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that a process may use, in the order in which CUDA numbers them: the first is cuda:0.

    setting: the value of CUDA_VISIBLE_DEVICES; None where it is not set, and all GPUs are visible. It is read
    as the CUDA programming guide says ("CUDA Environment Variables"): a list of indices or of beginnings of
    UUIDs. It ends before the first entry that names no GPU, or several; where it names a GPU twice, none is
    visible. Raises UserError for a MIG instance.
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
