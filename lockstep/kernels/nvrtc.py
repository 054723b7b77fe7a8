"""NVRTC, the CUDA compiler in a library, by ctypes (nvrtc.h, and NVIDIA's NVRTC guide, chapter 3).

It needs no GPU, no driver, and no file of the toolkit except libnvrtc-builtins, which lies beside it.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError

MAJORS = range(20, 11, -1)  # 12 is the oldest that torch supports; higher ones cover future releases


def find() -> ctypes.CDLL | None:
    """Return the first NVRTC that can be opened, or None."""
    for place in _places():
        try:
            library = ctypes.CDLL(place)
            # Load the builtins first: NVRTC would not find them in the wheels of some versions (13.0), whose
            # libnvrtc has no run path.
            folder = Path(place).parent
            for builtins in folder.glob("libnvrtc-builtins.so.*") if folder.is_absolute() else ():
                ctypes.CDLL(str(builtins))
        except OSError:
            continue  # no such library, or a file for another machine
        return library
    return None


def _places() -> Iterator[str]:
    """Yield candidates: files in NVIDIA's wheels and in the toolkit, then names for the dynamic loader.

    The newest of several comes first, because pip can leave the NVRTC of an older torch behind.
    """
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    globs = [(folder, "nvidia/*/lib/libnvrtc.so.*") for folder in sys.path]
    globs += [(home, "lib64/libnvrtc.so.*") for home in homes]
    for folder, pattern in globs:
        files = sorted(Path(folder).glob(pattern), key=lambda path: path.name, reverse=True)
        yield from map(str, files)
    yield from (f"libnvrtc.so.{major}" for major in MAJORS)


def compile_cubin(library: ctypes.CDLL, source: Path, options: list[str]) -> bytes:
    """Return the cubin of a .cu file. `options` name the folder of the files that it includes.

    Raises:
        UserError: NVRTC cannot compile it; the message has NVRTC's log.
    """
    program, encoded = ctypes.c_void_p(), [option.encode() for option in options]
    text, name = source.read_bytes(), source.name.encode()
    _call(library, "nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)):
            log = _fetch(library, program, "ProgramLog").rstrip(b"\n\0").decode(errors="replace")
            raise UserError(f"{library._name} can't compile {source.name} with {options[0]}: {log}")
        return _fetch(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(library, f"nvrtcGet{what}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    _call(library, f"nvrtcGet{what}", program, buffer)
    return buffer.raw


def _call(library: ctypes.CDLL, function: str, *arguments: object) -> None:
    result = getattr(library, function)(*arguments)
    if result:
        raise UserError(f"{library._name}: {function} failed with nvrtcResult {result}")
