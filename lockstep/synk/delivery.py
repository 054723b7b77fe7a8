"""Delivery of graphs and closures to the ranks.

The source is pickled, never a compiled function. Pickling a graph as a whole would recurse as deep as the
graph, so its nodes are pickled one by one in topological order by one pickler, which keeps its memo. Shared
variables are pickled as numbers and arrays out of band, and all bytes lie in one block. Optimizers, which
torch's own pickling leaves incomplete, are pickled in full, and hooks are refused.
"""

import functools
import io
import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
import numpy as np

from lockstep.errors import warn
from lockstep.synk import bindings, imported, settings
from lockstep.synk.blocks import ArrayLocation, arrange
from lockstep.synk.context import CommandStep, RankContext
from lockstep.synk.slots import find_memory
from lockstep.synk.team import Team

# Names of the program's own module, which ranks can't import. The others are those of a child that
# multiprocessing has spawned, and of runpy.run_path.
_PROGRAM = ("__main__", "__mp_main__", "<run_path>")

Imports = Sequence[tuple[ModuleType, Any]]  # modules that ranks import, each with its spec


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that replaces a shared variable by its number and that of its part, e.g. a parameter.

    Args:
        slots: Addresses of the shared variables' slots, with their names.

    Attributes:
        copies: The pickled objects that are not shared, but could be later, by id.
        used: The ids of the pickled parts of shared variables.
        imports: The modules of users that ranks import for the pickled objects, by name.
    """

    def __init__(self, file: io.BytesIO, buffers: list[Any], team: Team, slots: dict[range, str]) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._team, self._registry, self._slots = team, team.registry, slots
        self._kinds, self._with_settings = settings.kinds(), dict[int, Any]()
        self._shared_tensors: dict[int, Any] = {}
        self._with_hooks = (sys.modules["torch"].Tensor, *self._kinds) if self._kinds else ()
        self._storage_kind = sys.modules["torch"].storage.TypedStorage if self._kinds else ()
        self._storages: dict[Any, Any] = {}  # by memory and dtype
        self._cells: dict[int, Any] = {}  # of the copies, by the id of the function's cell
        self._shareable = _shareable_kinds()
        self.copies: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.used: set[int] = set()
        self._checked: set[int] = set()  # the ids of modules, by `check_modules`
        self.imports: dict[str, tuple[ModuleType, Any]] = {}

    def persistent_id(self, obj: Any) -> tuple[int, int] | None:
        if issubclass(type(obj), self._kinds):
            self._with_settings[id(obj)] = obj
        if issubclass(type(obj), self._with_hooks):
            _check_hooks(obj, self._registry.name_of(obj))
        label = self._registry.label(obj)
        if label is not None:
            self.used.add(id(obj))
            if settings.is_tensor(obj):
                self._shared_tensors[id(obj)] = obj
        elif issubclass(type(obj), self._shareable):
            self.copies[id(obj)] = obj
        return label

    def reducer_override(self, obj: Any) -> Any:
        """Pickle optimizers in full, and refuse a function or class that uses state of an imported module.

        Raises:
            TypeError: Each rank would import other state.
        """
        if isinstance(obj, self._storage_kind):
            return self._reduce_storage(obj)
        if isinstance(obj, functools._lru_cache_wrapper) and _can_not_import(obj):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):  # has a lock
            return _cached_property, (type(obj), obj.func, obj.attrname)
        if isinstance(obj, ModuleType):  # cloudpickle knows the type itself, not torch.backends' own classes
            self._check_import(obj.__name__)
            return self.dispatch_table[ModuleType](obj)
        if isinstance(obj, np.ndarray):
            self._check_memory("an array", obj.ctypes.data, "copy()")
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType | type):
            if reduced is NotImplemented:
                self._check_import(obj.__module__)
            elif isinstance(obj, FunctionType):
                _check_results(obj)
                for module in imported.import_names(obj):
                    self._check_import(module)
            name = imported.find_state(obj, self._is_state, by_value=reduced is not NotImplemented)
            if name:
                raise TypeError(
                    f"{obj.__qualname__} uses {name}, and each rank would import another one. Define the "
                    "function in the program, with what it uses, or call cloudpickle.register_pickle_by_value"
                    f"({name.rpartition('.')[0]}) before distribute()"
                )
        return _reduce_optimizer(obj) if reduced is NotImplemented else reduced

    def _function_getnewargs(self, function: FunctionType) -> tuple[Any, ...]:
        """Return cloudpickle's arguments of a copy, with one cell for a variable of several functions."""
        *others, cells = super()._function_getnewargs(function)
        if cells is not None:
            pairs = zip(function.__closure__ or (), cells, strict=True)
            cells = tuple(self._cells.setdefault(id(cell), copy) for cell, copy in pairs)
        return *others, cells

    def _check_import(self, module: str) -> None:
        """Raise TypeError if a module of a user was reloaded after ranks have imported it."""
        is_library = imported.is_library(module)  # its reload, e.g. of logging, brings no other code
        if is_library or module not in sys.modules or imported.is_pickled(sys.modules[module]):
            return
        note_imports(self._team, [module])
        self.imports[module] = sys.modules[module], _spec_of(sys.modules[module])
        if self._team.imported[module] is not _spec_of(sys.modules[module]):
            raise TypeError(
                f"{module} was reloaded, and ranks have imported its former version. Call close() and "
                f"fork(), or cloudpickle.register_pickle_by_value({module}) before distribute()"
            )

    def _reduce_storage(self, obj: Any) -> Any:
        """Pickle the memory of tensors once, since views of one tensor remain views on the ranks."""
        self._check_memory("a tensor", obj._data_ptr(), "clone()")
        first = self._storages.setdefault((obj._cdata, obj.dtype), obj)
        return NotImplemented if first is obj else (_same, (first,))

    def _check_memory(self, what: str, address: int, copy: str) -> None:
        """Raise TypeError for the memory of a shared variable. A view of it would be a copy on the ranks."""
        name = next((name for slot, name in self._slots.items() if address in slot), None)
        if name:
            raise TypeError(
                f"{what} is a view of {name!r}, of which ranks would have a copy. Make the view in the "
                f"callable, or {copy} it"
            )

    def _is_state(self, obj: Any) -> bool:
        """Return whether ranks must receive an object instead of importing it, for `imported.find_state`."""
        if imported.is_a(obj, FunctionType, type):
            self._check_import(obj.__module__)
        elif imported.is_a(obj, ModuleType):
            self._check_import(obj.__name__)
        return issubclass(type(obj), self._kinds) or self._registry.label(obj) is not None

    def check_modules(self) -> None:
        """Raise TypeError if pickling a module has left out a shared tensor: ranks would have another one."""
        for obj in self._with_settings.values():
            layers = [] if settings.is_optimizer(obj) or id(obj) in self._checked else obj.modules()
            self._checked.add(id(obj))
            for layer in layers:
                for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                    if id(tensor) not in self.used and self._registry.label(tensor) is not None:
                        raise TypeError(
                            f"the __reduce__ or __getstate__ of {type(obj).__name__} leaves out the shared "
                            f"{name!r} of {type(layer).__name__}, and ranks would have another one. Remove "
                            "the method, or let it keep the tensors"
                        )

    def warn_of_unshared(self) -> None:
        """Warn of parameters of optimizers that each rank would train by itself."""
        for obj in filter(settings.is_optimizer, self._with_settings.values()):
            params = [param for group in obj.param_groups for param in group["params"]]
            unshared = [p for p in params if p.requires_grad and self._registry.label(p) is None]
            if unshared:
                warn(
                    f"distribute(): {len(unshared)} of {len(params)} parameters of the optimizer "
                    f"{type(obj).__name__} are not shared, one of shape {tuple(unshared[0].shape)} for "
                    "instance. Each rank would train a copy, which no collective reaches. Call synk.share "
                    "before"
                )

    def explain(self, error: BaseException) -> str:
        """Return the text of an error of `dump`, which names the attribute of an optimizer that caused it."""
        text = _text(error)
        for obj in self.with_settings():
            name = self._find_unpicklable(obj)
            if name is not None:
                kind = type(obj).__name__
                return (
                    f"attribute {name!r} of the optimizer {kind} can't be pickled: {text}. Delete it before "
                    f"distribute(), or give {kind} a __getstate__ that leaves it out"
                )
        return text

    def find_cause(self, function: Any, error: BaseException) -> str | None:
        """Return the name of the global, or attribute of a method's object, that `dump` can't pickle."""
        text = _text(error)
        if isinstance(function, MethodType):
            for name, value in getattr(function.__self__, "__dict__", {}).items():
                if self._failure(function.__self__, value) == text:
                    return f"self.{name}"
            function = function.__func__
        if not isinstance(function, FunctionType):
            return None
        used = imported.find_globals(function)
        failed = (name for name, value in used if self._failure(function, value) == text)
        return next(failed, "").rpartition(".")[2] or None

    def _find_unpicklable(self, obj: Any) -> str | None:
        """Return the name of the attribute of an optimizer that fails first; None if torch pickles it."""
        reduced = _reduce_optimizer(obj)
        if reduced is NotImplemented:
            return None
        failed = (name for name, value in reduced[2].items() if self._failure(obj, value))
        name = next(failed, None)
        return None if name in obj.__getstate__() else name

    def _failure(self, owner: Any, value: Any) -> str | None:
        """Return why an attribute of an object can't be pickled, or None; it may refer to the object."""
        pickler = _Pickler(io.BytesIO(), [], self._team, self._slots)
        pickler.memo = {id(owner): (0, owner)}
        try:
            pickler.dump(value)
        except BaseException as error:  # whatever a user's __reduce__ raises
            return _text(error)
        return None

    def with_settings(self) -> list[Any]:
        """Return the pickled objects that have settings."""
        modules_and_optimizers = list(self._with_settings.values())
        shared_tensors = list(self._shared_tensors.values())
        return modules_and_optimizers + settings.outside(shared_tensors, modules_and_optimizers)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whatever a user's __str__ raises
        return type(error).__name__


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Iterable[Any], context: RankContext) -> None:
        super().__init__(file, buffers=buffers)
        self._context = context

    def persistent_load(self, label: tuple[int, int]) -> Any:
        number, part = label
        return self._context.shareds[number].parts[part]


def _shareable_kinds() -> tuple[type, ...]:
    """Return the classes of tensors and of PyTensor's shared variables, of those that are imported."""
    kinds = (("torch", "Tensor"), ("pytensor.compile.sharedvalue", "SharedVariable"))
    return tuple(getattr(sys.modules[module], kind) for module, kind in kinds if module in sys.modules)


def find_copy(team: Team, function: Any, copies: Mapping[int, Any]) -> str | None:
    """Return the name of a variable that a callable uses and that was shared after it was sent, or None.

    Args:
        function: The callable.
        copies: What was pickled as a copy, with this callable or others.
    """
    shared = [obj for obj in copies.values() if team.registry.label(obj) is not None]
    if not shared:
        return None
    pickler = _Pickler(io.BytesIO(), [], team, {})
    with suppress(Exception):  # what can't be pickled any more is not searched
        pickler.dump(function)
    return next((team.registry.name_of(obj) for obj in shared if id(obj) in pickler.used), None)


def pack(
    team: Team, pieces: Iterable[tuple[str, Any]]
) -> tuple["DeliverPrograms", WeakValueDictionary[int, Any], Imports]:
    """Pickle objects one after another into a new block.

    Args:
        pieces: A description for error messages, and the object.

    Returns:
        The step, for `find_copy` the objects of which it has copies, and for `check_imports` the modules of
        users that ranks import.

    Raises:
        TypeError: An object cannot be pickled.
    """
    for module in {*_PROGRAM[1:]} & sys.modules.keys():  # cloudpickle knows the first itself
        cloudpickle.register_pickle_by_value(sys.modules[module])
    file = io.BytesIO()
    buffers: list[Any] = []
    pickler = _Pickler(file, buffers, team, find_memory(team))
    for what, piece in pieces:
        try:
            pickler.dump(piece)
            pickler.check_modules()
        except BaseException as error:  # whatever a user's __reduce__ raises
            name = None
            with suppress(Exception):  # whatever a user's object raises where it is asked for its class
                name = pickler.find_cause(getattr(piece, "function", piece), error)
            used = f": {name!r}, which it uses," if name else ""
            raise TypeError(f"{what}{used} can't go to the ranks: {pickler.explain(error)}") from error
    pickler.warn_of_unshared()
    number = 0
    if objects := pickler.with_settings():
        number = next(team.numbers)
        pickler.dump(settings.receive)
        pickler.dump((number, objects))
        label = team.registry.label
        team.context.settings.add(number, objects, lambda parameter: label(parameter) is not None)
    raw = [np.frombuffer(file.getbuffer(), np.uint8)]
    raw += [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    offsets, n_bytes = arrange(len(part) for part in raw)
    block = team.allocate(n_bytes, "functions")
    locations = []
    for part, offset in zip(raw, offsets, strict=True):
        locations.append(ArrayLocation(block, "|u1", (len(part),), offset))
        team.context.blocks.array(locations[-1])[:] = part
    arguments = tuple(getattr(sys, "argv", ()))
    step = DeliverPrograms(locations[0], tuple(locations[1:]), number, _module_path(), arguments)
    return step, pickler.copies, list(pickler.imports.values())


def _module_path() -> tuple[str, ...]:
    """Return the module path. A worker's '' is the working directory of fork(), so add the current one."""
    path = list(sys.path)
    with suppress(OSError, ValueError):  # the directory was removed, or the path has no ''
        path.insert(path.index("") + 1, os.getcwd())
    return tuple(path)


def note_imports(team: Team, names: Iterable[str]) -> None:
    """Record the modules that ranks have imported, as this process has them now."""
    for name in names:
        if name in sys.modules:
            team.imported.setdefault(name, _spec_of(sys.modules[name]))


def check_imports(imports: Imports, what: str) -> None:
    """Raise RuntimeError if a module that a function uses was reloaded after distribute().

    Args:
        imports: From `pack`.
        what: The function, for the message.
    """
    for module, spec in imports:
        if _spec_of(module) is not spec:
            raise RuntimeError(
                f"{what}: {module.__name__} was reloaded after this function was distributed, and ranks have "
                "its former version. Call close() and fork(), and create the function again"
            )


def _spec_of(module: ModuleType) -> Any:
    return getattr(module, "__spec__", None)


def _can_not_import(function: Any) -> bool:
    """Return whether ranks receive a function by value instead of importing it."""
    # A cached partial has no name.
    is_inner, module = "<locals>" in getattr(function, "__qualname__", "<locals>"), function.__module__
    return is_inner or module in _PROGRAM or imported.is_pickled(sys.modules.get(module))


def _same(obj: Any) -> Any:
    return obj


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(kind: type[functools.cached_property[Any]], function: Any, name: str | None) -> Any:
    made = kind(function)
    made.attrname = name
    return made


def unpack(context: RankContext, pickles: ArrayLocation, buffers: tuple[ArrayLocation, ...]) -> Iterator[Any]:
    """Yield the objects one after another. Their arrays are copies: every rank may write to its own."""
    file = io.BytesIO(context.blocks.array(pickles).tobytes())
    unpickler = _Unpickler(file, [context.blocks.array(location).copy() for location in buffers], context)
    while file.tell() < pickles.shape[0]:
        yield unpickler.load()


@dataclass(frozen=True)
class DeliverPrograms(CommandStep):
    """Step: the workers build the pickled programs.

    Each program is preceded by a function, receive(context, objects), which builds it from the next objects.

    Attributes:
        settings: Number of the group of objects with settings (settings.py); 0 if there are none.
        path: The caller's module path, which the program may have changed since fork().
        arguments: The caller's sys.argv: a module that ranks import may read it.
    """

    pickles: ArrayLocation
    buffers: tuple[ArrayLocation, ...]
    settings: int
    path: tuple[str, ...]
    arguments: tuple[str, ...]

    def blocks(self) -> Iterable[int]:
        return (self.pickles.block,)

    def run(self, context: RankContext) -> tuple[str, ...]:
        """Return the names of the modules that this rank has imported; those of the caller are no matter."""
        if not context.is_caller:
            sys.path[:] = self.path
            sys.argv[:] = self.arguments
            objects = unpack(context, self.pickles, self.buffers)
            for receive in objects:
                receive(context, objects)
        return () if context.is_caller else imported.loaded_modules()


def _check_results(function: FunctionType) -> None:
    name = bindings.find_result(function)
    if name:
        raise TypeError(
            f"{name!r} is the result of an operation with gradients, and ranks would have its values alone. "
            "Compute it in the callable, or detach() it"
        )


def _check_hooks(obj: Any, shared: str | None) -> None:
    """Raise TypeError for a hook of a tensor or a step, which torch does not pickle.

    Args:
        obj: A tensor, module or optimizer.
        shared: Name of the shared variable to which the tensor belongs, for the message.
    """
    for what, hooked in _find_hooks(obj, shared):
        if hooked:
            raise TypeError(
                f"{what} has hooks, which only this process would run. Do in the callable what they do, or "
                "register them there"
            )


def _find_hooks(obj: Any, shared: str | None) -> Iterator[tuple[str, Any]]:
    """Yield pairs for an optimizer, a tensor, or each parameter of a module: a description, and its hooks."""
    name = type(obj).__name__
    if settings.is_optimizer(obj):
        kinds_of_hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        yield f"the optimizer {name}", any(getattr(obj, kind, None) for kind in kinds_of_hooks)
    elif hasattr(obj, "named_parameters"):
        for parameter, tensor in obj.named_parameters():
            yield f"parameter {parameter!r} of {name}", _hooks_of(tensor)
    else:
        owner = f" in {shared!r}" if shared else ""
        yield f"a tensor of shape {tuple(obj.shape)}{owner}", _hooks_of(obj)


def _hooks_of(tensor: Any) -> Any:
    """Return the hooks of a tensor, or an empty value."""
    return tensor._backward_hooks or tensor._post_accumulate_grad_hooks


def _reduce_optimizer(obj: Any) -> Any:
    """Return the reduction with which a pickler pickles all attributes of an optimizer.

    torch pickles the parameter groups and the state only, and LBFGS, for instance, needs more. The `step` of
    a scheduler is left out: it counts the steps of the caller's optimizer.

    Returns:
        A tuple as of `__reduce_ex__`, or NotImplemented for other objects and for an optimizer whose class
        has its own `__getstate__`.
    """
    if not settings.is_optimizer(obj):
        return NotImplemented
    if type(obj).__getstate__ is not sys.modules["torch"].optim.Optimizer.__getstate__:
        return NotImplemented
    reduced = obj.__reduce_ex__(5)
    if len(reduced) < 3 or not isinstance(reduced[2], dict):
        return NotImplemented
    others = {
        name: value
        for name, value in vars(obj).items()
        if not name.endswith("_hooks") and getattr(value, "_wrapped_by_lr_sched", False) is not True
    }
    return (*reduced[:2], {**others, **reduced[2]}, *reduced[3:])
