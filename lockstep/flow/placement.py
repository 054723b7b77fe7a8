"""The device of each operation, and the user's line that it comes from.

Operands on other devices are copied by `arrays.bring`.
"""

import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.flow.devices import Device, cpus

_MOST_NODES = 40_000  # entries: two for each autograd function whose device is remembered
_ANY_THREAD = 0


class _ThreadContext(threading.local):
    """A thread's current device, phase, and the program that it captures."""

    def __init__(self) -> None:
        self.device: Device | None = None
        self.backward = -1  # the number of the backward inside of which this device was set
        self.last_node = -1
        self.phase: str | None = None
        self.program: Any = None


CONTEXT = _ThreadContext()
# By thread and autograd's sequence number of the forward operation, which each thread counts separately; by 0
# and that number, the newest of any thread
_nodes: OrderedDict[tuple[int, int], tuple[Device, str]] = OrderedDict()
_default: list[Device] = []
_starting = threading.RLock()


def _reset_after_fork() -> None:
    """Leave all scopes in a forked child."""
    CONTEXT.__init__()  # type: ignore[misc]
    _starting._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_reset_after_fork)


def current_device() -> Device:
    """Return the device on which this thread's results lie; by default, one CPU device with all cores."""
    if CONTEXT.device is not None:
        return CONTEXT.device
    with _starting:
        if not _default:
            _default.append(cpus(1)[0])
    return _default[0]


def place(arrays: Sequence[Any], written: Any) -> tuple[Device, str, str]:
    """Return device, user's line and phase of an operation on these arrays.

    An operation that writes an array runs on that array's device. Backward runs where its forward ran, which
    autograd's sequence number identifies, and its other operations where their first input lies. Everything
    else runs on the current device, also in a hook or a handler that sets one during backward. The line of
    backward is its forward's, too, but a hook's and a custom backward's operations have their own.

    Args:
        written: The array that it writes, or None.
    """
    number = private.backward_number()
    backward = number >= 0
    known = _forward_of(private.current_node())
    line = user_line() if known is None else user_line(private.RUN_BACKWARD) or known[1]
    if written is not None:
        device = written.place
    elif backward and CONTEXT.backward == number:
        device = current_device()
    elif known is not None:
        device = known[0]
    elif backward and arrays:
        device = arrays[0].place
    else:
        device = current_device()
    if not backward:
        _remember(device, line)
        return device, line, CONTEXT.phase or ("forward" if written is None else "update")
    return device, line, "backward"


def _forward_of(node: Any) -> tuple[Device, str] | None:
    """Return where the forward operation of an autograd function ran, and its line.

    Autograd computes backward of GPUs in threads of its own, for which the newest operation of any thread
    with this number is taken: only where several threads compute may it be another one than the function's.
    """
    if node is None:
        return None
    has_own = CONTEXT.last_node >= 0
    return _nodes.get((threading.get_ident() if has_own else _ANY_THREAD, node._sequence_nr()))


def _remember(device: Device, line: str) -> None:
    """Remember the device of this thread's newest autograd function, unless that is another operation's."""
    number = private.next_sequence_number() - 1
    if number == CONTEXT.last_node or _interrupts_recording():
        return
    CONTEXT.last_node = number
    for thread in (threading.get_ident(), _ANY_THREAD):
        if len(_nodes) >= _MOST_NODES:
            _nodes.popitem(last=False)
        _nodes[thread, number] = device, line


# By file, since equal codes may be of two files: whether it is torch's or this package's
_ours: dict[str, bool] = {}
_lines: dict[tuple[str, int], str] = {}
_FOLDERS = (private.torch_folder(), str(Path(__file__).parent))
_THE_USERS = str(Path(__file__).with_name("demo.py"))


@dataclass
class Replaced:
    """A parameter that `flow.arrays` has replaced, as it was then."""

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    array: weakref.ref[Any]
    fingerprint: Any


replaced: dict[int, Replaced] = {}  # by the parameter's id, while it exists


def replacement_of(tensor: torch.Tensor) -> Replaced | None:
    """Return the record of a parameter in whose place an array is trained, or None."""
    known = replaced.get(id(tensor))
    return known if known is not None and known.array() is not None else None


def in_use(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor that an operation reads.

    Raises:
        UserError: It is a parameter, or a part of one, in whose place an array is trained.
    """
    known = replacement_of(tensor if tensor._base is None else tensor._base)
    if known is not None:
        raise UserError(
            f"{user_line()}: this reads the tensor that {known.name} was before it became an array: take the "
            "array from the module (for its value from before, clone it before that)"
        )
    return tensor


def user_line(inside: Any = None) -> str:
    """Return 'file.py:12' of the innermost line that is neither torch's nor this package's.

    Args:
        inside: The code of a function. Lines outside of its innermost call do not count.
    """
    frame = _users_frame(inside)
    if frame is None:
        return ""
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in _lines:
        _lines[place] = f"{place[0]}:{place[1]}"
    return _lines[place]


def _users_frame(inside: Any = None) -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is inside:
            return None
        name = frame.f_code.co_filename
        ours = _ours.get(name)
        if ours is None:
            ours = _ours[name] = name.startswith(_FOLDERS) and name != _THE_USERS
        if not ours:
            break
        frame = frame.f_back
    return frame


def _interrupts_recording() -> bool:
    """Return whether a signal handler or a finalizer computes while this thread records an operation."""
    frame = _users_frame()
    while frame is not None:
        code = frame.f_code
        if code.co_name in private.DISPATCHING and code.co_filename.startswith(_FOLDERS):
            return True
        frame = frame.f_back
    return False


def is_called_by(function: Any) -> bool:
    """Return whether a function of Python is among those that this thread is in."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


class capturing(private.Scope):  # noqa: N801
    """A scope in which everything that this thread records belongs to a program, which its end closes.

    No garbage is collected inside: what a finalizer writes would belong to the program, and happen in each
    run instead of now.

    torch's cache of weights that autocast has converted is emptied before and after it: a program that
    read an earlier conversion would never see an update, and a later operation none of the program's.
    """

    def __init__(self, program: Any) -> None:
        self.value = program

    def calls(self) -> tuple[list[Any], list[Any]]:
        if CONTEXT.program is not None:
            raise UserError("a program can't be captured while another one is")
        pause, resume = private.pausing()
        end = [
            partial(setattr, CONTEXT, "program", None),
            partial(setattr, self.value, "is_open", False),
            torch.clear_autocast_cache,
            *resume,
        ]
        return [*pause, torch.clear_autocast_cache, partial(setattr, CONTEXT, "program", self.value)], end


def program_of(inputs: Sequence[Any]) -> Any:
    """Return the program that this thread captures, or on autograd's threads, the one of the inputs."""
    if CONTEXT.program is not None:
        return CONTEXT.program
    for array in inputs:
        if array.memory.program is not None:
            return array.memory.program
    return None


def note_place(array: Any) -> None:
    """Tell the program that this thread captures, if any, that an array gets other memory or a new shape."""
    if CONTEXT.program is not None:
        CONTEXT.program.note_place(array)


class phase(private.Scope):  # noqa: N801
    """A scope that shows what this thread records as this phase, except for backward."""

    def __init__(self, name: str) -> None:
        self.value = name

    def calls(self) -> tuple[list[Any], list[Any]]:
        outer = CONTEXT.phase
        return [partial(setattr, CONTEXT, "phase", self.value)], [partial(setattr, CONTEXT, "phase", outer)]


class CurrentDevice(private.Scope):
    """The scope of a current device."""

    def __init__(self, device: Device) -> None:
        self.value = device

    def calls(self) -> tuple[list[Any], list[Any]]:
        set_device, set_backward = (partial(setattr, CONTEXT, name) for name in ("device", "backward"))
        begin = [partial(set_device, self.value), partial(set_backward, private.backward_number())]
        end = [partial(set_device, CONTEXT.device), partial(set_backward, CONTEXT.backward)]
        return begin, end
