"""Where an operation runs, and which line of the user's asked for it."""

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.flow.devices import Device, cpus
from lockstep.flow.engine import Engine

_MOST_NODES = 20_000  # functions of autograd whose place is remembered


class _Here(threading.local):
    def __init__(self) -> None:
        self.device: Device | None = None
        self.outer: list[Device | None] = []
        self.last_node = -1
        self.phase: str | None = None
        self.program: Any = None  # that this thread captures


_here = _Here()
_nodes: OrderedDict[int, tuple[Device, str]] = OrderedDict()  # by autograd's number of the forward operation
_own: list[Engine] = []  # the one of all devices that were given to none
_default: list[Device] = []
_starting = threading.RLock()


def current_device() -> Device:
    """Where results lie from here on, in this thread; at first, one CPU device with all cores."""
    if _here.device is not None:
        return _here.device
    with _starting:
        if not _default:
            _default.append(cpus(1)[0])
    return _default[0]


def set_device(device: Device) -> None:
    """Makes it the current one of this thread, until another is. Raises UserError for what is no device."""
    engine_of(device)
    _here.device = device


def engine_of(device: Device) -> Engine:
    """The engine that has the device; one of its own for all that were given to none."""
    engine = getattr(device, "engine", None)
    if engine is None:
        with _starting:
            if not _own or _own[0].closed:
                _own[:] = [Engine([device])]
            _own[0].add(device)
            engine = _own[0]
    return engine


def enter(device: Device) -> None:
    """Makes it the current device until `leave`."""
    engine_of(device)
    _here.outer.append(_here.device)
    _here.device = device


def leave() -> None:
    _here.device = _here.outer.pop()


def place(arrays: Sequence[Any], written: Any) -> tuple[Device, str, str]:
    """Device, the user's line, and phase for an operation on these arrays, one of which may be written.

    What writes an array runs where that is. Backward runs where its forward ran, which autograd's number of
    it tells; what it does beside that, where the gradients are. All else runs on the current device.
    """
    node = private.current_node()
    known = None if node is None else _nodes.get(node._sequence_nr())
    backward = private.in_backward()
    line = user_line() if known is None else known[1]
    if written is not None:
        device = written.place
    elif known is not None:
        device = known[0]
    elif backward and arrays:
        device = arrays[0].place
    else:
        device = current_device()
    if not backward:
        _remember(device, line)
        return device, line, _here.phase or ("forward" if written is None else "update")
    return device, line, "backward"


def _remember(device: Device, line: str) -> None:
    """The number of autograd's function, if one was made for this operation, is the newest of this thread."""
    number = private.next_sequence_number() - 1
    if number == _here.last_node:
        return
    _here.last_node = number
    if len(_nodes) >= _MOST_NODES:
        _nodes.popitem(last=False)
    _nodes[number] = device, line


_ours: dict[Any, bool] = {}  # code: whether it is torch's or this package's
_lines: dict[Any, str] = {}
_FOLDERS = (private.torch_folder(), str(Path(__file__).parent))
_THE_USERS = str(Path(__file__).with_name("demo.py"))


def user_line() -> str:
    """'file.py:12' of the innermost line that is neither torch's nor this package's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ours = _ours.get(code)
        if ours is None:
            name = code.co_filename
            ours = _ours[code] = name.startswith(_FOLDERS) and name != _THE_USERS
        if not ours:
            place = code, frame.f_lineno
            if place not in _lines:
                _lines[place] = f"{code.co_filename}:{frame.f_lineno}"
            return _lines[place]
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def capturing(program: Any) -> Iterator[None]:
    """What this thread records inside is the program's."""
    if _here.program is not None:
        raise UserError("a program can't be captured while another one is")
    _here.program = program
    try:
        yield
    finally:
        _here.program = None


def program_of(inputs: Sequence[Any]) -> Any:
    """The one that this thread captures, or, on autograd's threads, the one that its inputs belong to."""
    if _here.program is not None:
        return _here.program
    for array in inputs:
        if array.memory.program is not None:
            return array.memory.program
    return None


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """What this thread records inside is shown as this phase, but for what autograd does."""
    outer, _here.phase = _here.phase, name
    try:
        yield
    finally:
        _here.phase = outer


@contextlib.contextmanager
def on(device: Device) -> Iterator[None]:
    """The device is the current one inside."""
    enter(device)
    try:
        yield
    finally:
        leave()
