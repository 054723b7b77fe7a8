"""The parts of torch that flow uses and that are not torch's public interface. Tested with torch 2.13.0."""

import _thread
import functools
import gc
import io
import itertools
import logging
import operator
import os
import queue
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lockstep.backends.devices import on_gpus
from lockstep.errors import UserError

if torch.distributed.is_available():  # An array's first operation imports it. An interrupt or a fork in the
    import torch.distributed.tensor  # middle of that would break all later operations.

__all__ = ["DispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

NAMES_OF_ARRAYS = frozenset(("memory", "copied", "place", "wait", "tensor", "view_of_memory"))
no_torch_function = torch._C._disabled_torch_function_impl
current_node: Callable[[], Any] = torch._C._current_autograd_node  # None outside of a backward function
RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # below it, autograd's functions run
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # of this thread
DISPATCHING = "__torch_dispatch__", "find_torch_dispatch_rule"  # called when autograd's function is made


_Class = TypeVar("_Class", bound=type)

_PYTHON_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).add(
    torch._C.DispatchKey.PythonTLSSnapshot
)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that costs no more than its call, because dynamo does not wrap it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_paused: set[object] = set()  # calls during which the collection of cycles is switched off, one key for each


def pausing() -> tuple[list[Any], list[Any]]:
    """Return the C functions that switch the collection of cycles off, and those that end this pause.

    The last pause that ends, of all threads, switches the collection on again.
    """
    if not any(map(operator.call, (gc.isenabled, _paused.__len__))):  # at one moment
        return [bool, bool], [bool, bool]
    key = object()
    no_arguments = itertools.filterfalse(None, [_paused])  # the set itself, if it is empty then
    resume: Any = functools.partial(deque, itertools.starmap(gc.enable, no_arguments), 0)
    end = [functools.partial(_paused.discard, key), resume]
    return [functools.partial(_paused.add, key), gc.disable], end


def plainly(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call one of torch's C functions with all modes and subclasses switched off.

    While they are off, an operation on arrays would read memory that does not exist. So no line of Python
    may run then, neither a signal handler's nor a finalizer's: a loop in C calls nothing but C functions, as
    one step of the interpreter. (From Python 3.12 on, finalizers of cycles run between steps only.)
    """
    functions, dispatch = torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_PYTHON_KEYS)
    begin, end = pausing() if sys.version_info < (3, 12) else ([bool, bool], [bool, bool])
    call = functools.partial(function, *arguments, **keywords)
    end = [*(functools.partial(guard.__exit__, None, None, None) for guard in (dispatch, functions)), *end]
    try:
        begin += [functions.__enter__, dispatch.__enter__]
        _, _, _, _, returned, *_ = map(operator.call, [*begin, call, *end])
    except BaseException:
        _, _, _, _ = map(operator.call, end)
        raise
    return returned


def call_all(calls: Sequence[Callable[[], Any]]) -> None:
    """Call C functions one after another, as one step: no signal handler runs between them."""
    deque(map(operator.call, calls), 0)


class Scope(io.IOBase):
    """A context manager that a signal handler's exception cannot leave half entered or half exited.

    A handler runs between any two lines of Python, also before the first line of an `__exit__`. So the calls
    that begin and end a scope are C functions only, called by a loop in C. `io.IOBase.__exit__` is a C
    function as well, which only calls `close`.
    """

    closed = True  # a scope that is dropped before it begins has nothing to close

    value: Any = None  # what `with` gives to the name behind `as`

    def calls(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the C functions to call when the scope begins, and those to call when it ends."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        if "close" in vars(self):
            raise UserError("a scope can be entered once: call flow.device again for another `with`")
        begin, end = self.calls()
        closing: Any = functools.partial(deque, map(operator.call, end), 0)  # calling it again does nothing
        begin = [functools.partial(setattr, self, "close", closing), *begin]
        try:
            deque(map(operator.call, begin), 0)  # a handler may raise behind it, so `return` is inside
            return self.value
        except BaseException:
            self.close()
            raise


_pop_dispatch = functools.partial(torch._C._pop_torch_dispatch_stack, None)
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def mode_calls(dispatch: TorchDispatchMode, function: TorchFunctionMode) -> tuple[list[Any], list[Any]]:
    """Return the calls that switch two modes on in this thread, and those that switch them off again.

    They do what `__enter__` and `__exit__` of torch's modes do, for use in a `Scope`, and set the modes'
    `ended`: an interrupted function of torch may have taken a mode off the stack, and put it back afterwards.
    """
    while torch._C._len_torch_function_stack() and getattr(_top_function_mode(), "ended", False):
        torch._C._pop_torch_function_stack()
    set_flag = functools.partial(setattr, _python_dispatch)
    skip_compiled = torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals
    before = [(name, getattr(_python_dispatch, name)) for name in _MODE_FLAGS]
    begin = [functools.partial(set_flag, name, True) for name in _MODE_FLAGS]
    begin += [
        functools.partial(skip_compiled, True),
        functools.partial(torch._C._push_on_torch_dispatch_stack, dispatch),
        functools.partial(torch._C._push_on_torch_function_stack, function),
    ]
    end: list[Any] = [functools.partial(setattr, mode, "ended", True) for mode in (function, dispatch)]
    end += [_removal(torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack)]
    end += [_removal(torch._C._len_torch_dispatch_stack, _pop_dispatch)]
    end += [functools.partial(skip_compiled, before[-1][1])]
    end += [functools.partial(set_flag, name, value) for name, value in before]
    return begin, end


def _top_function_mode() -> Any:
    return torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)


def _removal(length: Callable[[], int], pop: Callable[[], Any]) -> Callable[[], Any]:
    """Return a C function that pops what a stack then has above its present height, which may be nothing."""
    above = map(operator.sub, map(operator.call, [length]), [length()])
    no_arguments = itertools.chain.from_iterable(map(itertools.repeat, [()], above))
    return functools.partial(deque, itertools.starmap(pop, no_arguments), 0)


class without_modes(Scope):  # noqa: N801
    """A scope in which no mode of this thread sees operations on ordinary tensors."""

    def calls(self) -> tuple[list[Any], list[Any]]:
        modes, no_functions = active_modes(), torch._C.DisableTorchFunction()
        end = [functools.partial(torch._C._push_on_torch_dispatch_stack, mode) for mode in modes]
        leave = functools.partial(no_functions.__exit__, None, None, None)
        return [no_functions.__enter__, *[_pop_dispatch] * len(modes)], [*end, leave]


class _RefusingRandom(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._refuse = refuse

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self._refuse()
        return func(*args, **kwargs)


class refusing_random(Scope):  # noqa: N801
    """A scope of a worker that calls `refuse` for an operation that draws from torch's own generator.

    It leaves torch's flags alone, which all threads share.
    """

    def __init__(self, refuse: Callable[[], NoReturn]) -> None:
        self._mode = _RefusingRandom(refuse)

    def calls(self) -> tuple[list[Any], list[Any]]:
        return [functools.partial(torch._C._push_on_torch_dispatch_stack, self._mode)], [_pop_dispatch]


class no_grad(Scope):  # noqa: N801
    """torch.no_grad, whose end no signal handler can skip. The calls avoid the Python code of a mode."""

    def calls(self) -> tuple[list[Any], list[Any]]:
        return self._setting(False), self._setting(torch.is_grad_enabled())

    def _setting(self, enabled: bool) -> list[Any]:
        functions = torch._C.DisableTorchFunction()
        leave = functools.partial(functions.__exit__, None, None, None)
        return [functions.__enter__, functools.partial(torch._C._set_grad_enabled, enabled), leave]


class inference_mode(Scope):  # noqa: N801
    """torch.inference_mode(mode), whose end no signal handler can skip."""

    def __init__(self, mode: bool) -> None:
        self.value = mode

    def calls(self) -> tuple[list[Any], list[Any]]:
        guard = torch._C._InferenceMode(self.value)
        return [guard.__enter__], [functools.partial(guard.__exit__, None, None, None)]


def active_modes() -> list[Any]:
    """Return the modes that would see an operation of this thread now, without one that is handling it."""
    return [torch._C._get_dispatch_stack_at(n) for n in range(torch._C._len_torch_dispatch_stack())]


def make_wrapper(
    kind: type,
    size: Any,
    stride: Any,
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    layout: torch.layout,
) -> Any:
    """Return a tensor of a subclass, without memory."""
    make: Any = torch.Tensor._make_wrapper_subclass
    if layout is not torch.strided:
        return make(kind, size, dtype=dtype, layout=layout, device=device)
    made = make(kind, size, strides=stride, storage_offset=offset, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(made)  # torch's C++ would read address 0
    return made


def as_parameter(tensor: torch.Tensor) -> torch.Tensor:
    """Mark the tensor as an nn.Parameter for modules and optimizers, and return it."""
    tensor._is_param = True
    return tensor


def marks(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a user has given to a tensor.

    Raises:
        UserError: One has a name that arrays use.
    """
    is_array = hasattr(type(tensor), "view_of_memory")
    given = {name: value for name, value in vars(tensor).items() if name != "_is_param"}
    if is_array:
        return {name: value for name, value in given.items() if name not in NAMES_OF_ARRAYS}
    for name in given:
        check_mark(name)
    return given


def check_mark(name: str) -> None:
    """Refuse an attribute that a user gives to a tensor under a name that arrays use themselves.

    Raises:
        UserError: It has such a name.
    """
    if name in NAMES_OF_ARRAYS:
        raise UserError(f"a tensor's attribute {name!r} has a name that arrays use themselves: rename it")


class _Refusing:
    """A descriptor that refuses assignments. Reading looks into the instance, as if it were not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set__(self, _array: Any, _value: Any) -> None:
        check_mark(self._name)


def refusing_marks(kind: _Class) -> _Class:
    """Let a class of arrays refuse attributes under the names that arrays use themselves.

    A `__setattr__` of Python would do, but torch's C++ sets attributes as well (`_backward_hooks`, by an
    operation in place), and a signal handler's exception in it becomes a SystemError there.
    """
    for name in NAMES_OF_ARRAYS:
        own, refuse = vars(kind).get(name), _Refusing(name)
        if isinstance(own, property):
            own = own.setter(refuse.__set__)
        elif own is not None:  # a method: all of C, as reading it was before
            own = property(functools.partial(types.MethodType, own), refuse.__set__, doc=own.__doc__)
        setattr(kind, name, refuse if own is None else own)
    return kind


def numpy_result(array: torch.Tensor, result: Any, *_: Any) -> torch.Tensor:
    """Return the result of a NumPy function of an array as an ordinary tensor, as torch does.

    Raises:
        UserError: The array's gradient would be lost. An ordinary tensor refuses to be read then, which an
            array does not.
    """
    if array.requires_grad and torch.is_grad_enabled():
        raise UserError(
            "NumPy would lose the gradient of an array: make the other operand a tensor "
            "(torch.from_numpy), or give it array.detach()"
        )
    return torch.Tensor.__array_wrap__(array, result)  # type: ignore[no-untyped-call,no-any-return]


def set_data(tensor: torch.Tensor, value: Any) -> None:
    """Do `tensor.data = value` on a subclass that overrides `data`, and give it the value's memory.

    It is one step: after an interrupt in between, the tensor would have another memory's shape and dtype.
    """
    data: Any = getattr(torch._C.TensorBase, "data")  # noqa: B009
    memory = functools.partial(vars(tensor).__setitem__, "memory", value.memory)
    plainly(deque, map(operator.call, [functools.partial(data.__set__, tensor, value), memory]), 0)


def is_traced() -> bool:
    """Return whether torch traces this thread's operations, as make_fx does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def backward_number() -> int:
    """Return the number of the backward that this thread works for, or -1 outside of any."""
    return torch._C._current_graph_task_id()


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch's random operations use on a device."""
    if on_gpus([device]):
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


class _Quiet(threading.local):
    """A thread's state: while it predicts shapes, torch does not log errors.

    Attributes:
        serves: Whether it is the thread that predicts for all.
    """

    predicting = serves = False


_quiet = _Quiet()
_fake_lock = threading.RLock()


class _Predictor:
    """The thread that predicts shapes."""

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runs = False


# It logs shapes that do not fit as errors, besides raising them.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _quiet.predicting)


def predict(function: Callable[[], Any]) -> Any:
    """Return function(); tensors made in it have shapes, strides and dtypes, but no values.

    It runs in its own thread: an exception from a signal handler would leave the mode switched on in this
    one, and the handler itself would make tensors without values.
    """
    if _quiet.serves:  # a finalizer in that thread
        return _predict(function)
    results: list[Any] = []
    done = threading.Lock()
    done.acquire()
    _Predictor.requests.put((function, results, done))
    while not results:
        if not _Predictor.runs:  # threading.Thread fails if a handler raises while it starts a thread
            _thread.start_new_thread(_serve, ())
        done.acquire(timeout=0.2)
    value, error = results[0]
    if error is not None:
        raise error
    return value


def schema_name(function: Any) -> str:
    """Return an operation's name, such as 'aten::add', or '' of a function that is none of torch's."""
    return getattr(getattr(function, "_schema", None), "name", "")


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the format that torch's kernels see in a tensor's strides."""
    return suggest_memory_format(tensor)


def serves() -> bool:
    """Return whether this thread predicts for all others, so that it must not wait for them."""
    return _quiet.serves


def _serve() -> None:
    _Predictor.runs = _quiet.serves = True
    while True:
        function, results, done = _Predictor.requests.get()
        try:
            results.append((_predict(function), None))
        except BaseException as error:
            results.append((None, error))
        done.release()
        del function, results, done


def _predict(function: Callable[[], Any]) -> Any:
    """Return function() in the mode that predicts. Its kernels switch subclasses off, as `plainly` does."""
    with _fake_lock:
        outer, _quiet.predicting = _quiet.predicting, True
        pause, resume = pausing()
        call_all(pause)
        try:
            with _fake_mode(), torch.no_grad():
                return function()
        finally:
            call_all(resume)
            _quiet.predicting = outer


def _reset_after_fork() -> None:
    """Prepare the predictor in a forked child, where its thread does not exist."""
    _fake_lock._at_fork_reinit()  # type: ignore[attr-defined]
    _Predictor.requests = queue.SimpleQueue()  # the lock of the old one may be held
    _Predictor.runs = False
    _quiet.predicting = _quiet.serves = False
    _fake_mode.cache_clear()  # the thread may have been inside a kernel, which the mode remembers
    if _paused:  # by threads that do not exist here
        _paused.clear()
        gc.enable()


os.register_at_fork(after_in_child=_reset_after_fork)


@functools.cache
def _fake_mode() -> Any:
    """Return the mode that predicts shapes. Its import is slow, and the engine itself does not need it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    mode.cache_enabled = False  # recipes remember what it predicts; torch's cache would keep every shape
    return mode


def depends_on_values(error: Exception) -> bool:
    """Return whether `predict` raised this error because the shapes depend on values."""
    from torch._subclasses import fake_tensor

    return isinstance(
        error,
        fake_tensor.DataDependentOutputException
        | fake_tensor.DynamicOutputShapeException
        | fake_tensor.UnsupportedOperatorException
        | NotImplementedError,
    )


def torch_folder() -> str:
    """Return the folder of torch's Python files."""
    return str(torch.__path__[0])
