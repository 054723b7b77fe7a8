"""Detection of variables, attributes and entries that name other objects than when ranks received them.

A program that lets one of them name another object changes this process's copy of the callable only. The
ranks would compute with the former object, and their results would differ without an error.
"""

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache, partial, partialmethod
from itertools import chain
from types import (
    BuiltinFunctionType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any

import numpy as np

from lockstep.errors import warn
from lockstep.synk import imported, settings
from lockstep.synk.imported import is_a

Read = Callable[[], Any]

_MOST_ENTRIES = 100  # a longer container has data rather than what a callable chooses by name
_MOST_BINDINGS = 1000  # each call reads all of them
_CONTAINERS: tuple[Any, ...] = (list, tuple, dict, deque)
_KEYS = (str, int, float, bytes, NoneType, tuple, Enum, type)
_NOTHING = object()
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, MethodType, BuiltinFunctionType)
_NAMESPACES = (Namespace, SimpleNamespace)  # library classes whose attributes are the user's
_CACHED = type(lru_cache(lambda: None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, _CACHED)
_CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
# Special methods that a callable hardly executes for its results. A dataclass compares all of its fields.
_QUIET = {*_CONSTRUCTORS, "__repr__", "__str__", "__hash__", "__del__", "__reduce__", "__reduce_ex__"}
_QUIET |= {"__getstate__", "__setstate__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(slots=True)
class Binding:
    """A variable, an attribute or an entry of a container.

    Attributes:
        name: For messages, e.g. "self.optimizer".
        read: Returns what it names now, or None if it is gone.
        value: What it names on the other ranks.
        has_warned: Whether the user was warned that the two differ.
    """

    name: str
    read: Read
    value: Any
    has_warned: bool = False


@dataclass(slots=True)
class Uses:
    """The bindings of a callable.

    Attributes:
        read: Those that it reads: its variables, and the attributes and entries that it reaches.
        assigned: Those that it assigns and does not read. Another callable may.
    """

    read: list[Binding] = field(default_factory=list)
    assigned: list[Binding] = field(default_factory=list)
    _before: list[Any] = field(default_factory=list, init=False)  # what they name before a call

    def check(self, what: str) -> None:
        """Compare what bindings name now with what the other ranks have. Another value warns once.

        Args:
            what: The function, for the message.

        Raises:
            ValueError: One of them names another module, optimizer, function or class than it did.
        """
        values = [binding.read() for binding in self.read]
        for binding, value in zip(self.read, values, strict=True):
            if value is not binding.value and not _is_same(value, binding.value):
                _tell(binding, value, what)
        self._before = values + [binding.read() for binding in self.assigned]

    def accept(self) -> None:
        """Take over what the callable has changed itself since `check`, which it did on all ranks."""
        for binding, before in zip(chain(self.read, self.assigned), self._before, strict=False):
            value = binding.read()
            if value is not before:
                binding.value = value
        self._before = []


class Bindings:
    """The bindings of the callables that one distribute() has sent, which share what they change."""

    def __init__(self, is_shared: Callable[[Any], bool] = lambda parameter: False) -> None:
        self._found: dict[Any, Binding] = {}
        self._is_shared = is_shared

    def find(self, function: Any) -> Uses:
        """Return the bindings of a callable."""
        search = _Search(function, _Names(), self._is_shared)
        while not search.names.contain(more := _names_in(search.functions)):
            search = _Search(function, search.names.join(more), self._is_shared)  # finds more methods
        assigned = {key: binding for key, binding in search.assigned.items() if key not in search.found}
        return Uses(self._shared(search.found), self._shared(assigned))

    def _shared(self, bindings: dict[Any, Binding]) -> list[Binding]:
        return [self._found.setdefault(key, binding) for key, binding in bindings.items()]


def find_result(function: FunctionType) -> str | None:
    """Return the name of a variable that is the result of an operation with gradients, or None.

    A copy of the result does not know from which parameters it was computed.
    """
    if "torch" not in sys.modules:
        return None
    tensor = sys.modules["torch"].Tensor
    names = imported.global_names(function)
    variables = [each for _, each in _variables(function, names) if is_a(each.value, tensor)]
    return next((each.name for each in variables if each.value.grad_fn), None)


def _tell(binding: Binding, value: Any, what: str) -> None:
    kind = type(value)
    changed = f"{what}: {binding.name!r} is another {kind.__name__} than at distribute(), which other ranks"
    again = "create this function again, and call distribute()"
    if is_a(value, *settings.kinds(), *_FUNCTIONS, type, ModuleType):
        raise ValueError(f"{changed} lack: {again}")
    if not binding.has_warned:
        warn(f"{changed} have not seen: pass it as an input, or {again}")
        binding.has_warned = True  # but not where the warning is an error


def _is_same(value: Any, former: Any) -> bool:
    """Return whether two values are equal, as those of a statement that is executed again."""
    kind = type(value)
    if value is former or kind is not type(former):
        return value is former
    if kind is FunctionType:
        return _is_same_function(value, former)
    if kind is _CACHED:
        return _is_same(value.__wrapped__, former.__wrapped__)
    if kind is tuple:
        return len(value) == len(former) and all(map(_is_same, value, former))
    is_plain = kind in _PLAIN or issubclass(kind, np.generic) or str(kind) == "<class 'torch.device'>"
    return is_plain and bool(value == former)


def _is_same_function(value: FunctionType, former: FunctionType) -> bool:
    own = value.__closure__, value.__kwdefaults__, value.__dict__ or None
    has_only_code = own == (None, None, None) and value.__globals__ is former.__globals__
    has_defaults = _is_same(value.__defaults__, former.__defaults__)
    return has_only_code and has_defaults and bool(value.__code__ == former.__code__)


@dataclass(frozen=True)
class _Names:
    """The names of attributes in functions: those that they read, only call as methods, and assign."""

    read: frozenset[str] = frozenset({"__call__", "forward"})  # executed without being named
    called: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()

    def join(self, more: "_Names") -> "_Names":
        return _Names(self.read | more.read, self.called | more.called, self.assigned | more.assigned)

    def contain(self, more: "_Names") -> bool:
        return self.join(more) == self


def _names_in(functions: list[FunctionType]) -> _Names:
    read, called, assigned = set[str](), set[str](), set[str]()
    for function in functions:
        only_called = imported.called_attributes(function)
        read |= imported.attribute_names(function) - only_called
        called |= only_called
        assigned |= imported.assigned_attributes(function)
    return _Names().join(_Names(frozenset(read), frozenset(called), frozenset(assigned)))


class _Search:
    """The objects that a callable reaches by the names of attributes, with its bindings.

    Attributes:
        names: The names.
        functions: The functions that it reaches, without those of libraries.
        found, assigned: The bindings that it reads and assigns, by the object that has them and their name
            there.
    """

    def __init__(self, first: Any, names: _Names, is_shared: Callable[[Any], bool]) -> None:
        self.names, self._is_shared = names, is_shared
        self._names = names.read | names.called | names.assigned
        self._of_classes: dict[int, frozenset[str]] = {}  # the names, by the class's id
        self.functions: list[FunctionType] = []
        self.found: dict[Any, Binding] = {}
        self.assigned: dict[Any, Binding] = {}
        seen: dict[int, Any] = {}
        pending = deque([("self", first)])  # near objects first, since the number of bindings is limited
        while pending and len(self.found) < _MOST_BINDINGS:
            name, thing = pending.popleft()
            if id(thing) in seen:
                continue
            seen[id(thing)] = thing
            pending += _parts(thing)
            for key, binding in chain(self._layers(name, thing), self._uses(name, thing)):
                self.found[key] = binding
                pending.append((binding.name, binding.value))
                pending += _constructors(binding.value)

    def _uses(self, name: str, thing: Any) -> Iterator[tuple[Any, Binding]]:
        kind = type(thing)
        if is_a(thing, *_CONTAINERS):
            yield from _entries(name, thing)
        if kind is FunctionType and imported.is_users(thing.__module__):
            self.functions.append(thing)
            self.assigned.update(_variables(thing, imported.assigned_globals(thing)))
            yield from _variables(thing, imported.global_names(thing))
            yield from self._named(name, thing)
        elif kind is FunctionType:  # of a library, which holds what the user gave it
            yield from _variables(thing, set())
        elif is_a(thing, ModuleType) and imported.is_users(thing.__name__):
            yield from self._named(thing.__name__, thing)
        elif is_a(thing, type) and imported.is_users(thing.__module__):
            for each in filter(lambda base: imported.is_users(base.__module__), thing.__mro__):
                yield from self._named(each.__name__, each)
        elif not imported.is_library(kind.__module__) or kind in _NAMESPACES or _is_module(thing):
            yield from self._named(name, thing)

    def _named(self, name: str, thing: Any) -> Iterator[tuple[Any, Binding]]:
        """Yield the attributes of an object that functions name, and note those that they assign."""
        names = self.names
        special = _special_methods(thing) if is_a(thing, type) else _rates(thing)
        of_class = self._class_names(thing if is_a(thing, type) else type(thing))
        has = (_dictionary(thing).keys() | of_class) - _sent_attributes(thing)
        for attribute in sorted(has & (self._names | special)):
            read = _reader(thing, attribute)
            if read is None:
                continue
            value = read()
            made = (id(thing), attribute), Binding(f"{name}.{attribute}", read, value)
            is_method = attribute in names.called and (is_a(thing, type) or value is None or callable(value))
            if is_method or attribute in names.read | special:
                yield made
            else:
                self.assigned.update([made])

    def _class_names(self, kind: type) -> frozenset[str]:
        """Return those of the names that a class or one of its bases defines."""
        if id(kind) not in self._of_classes:
            self._of_classes[id(kind)] = self._names.intersection(chain(*map(vars, kind.__mro__)))
        return self._of_classes[id(kind)]

    def _layers(self, name: str, module: Any) -> Iterator[tuple[Any, Binding]]:
        """Yield the layers of a module, without those of a shared one that have parameters (settings.py)."""
        if not _is_module(module):
            return
        is_shared = any(map(self._is_shared, settings.parameters(module))) if module._modules else False
        for key, layer in module._modules.items():
            if not (is_shared and settings.has_parameters(layer)):
                yield (id(module), key), Binding(f"{name}.{key}", partial(module._modules.get, key), layer)


def _sent_attributes(thing: Any) -> set[str]:
    """Return the attributes that each call sends, or that a scheduler replaces."""
    if _is_module(thing):
        return {"training"}
    return {"param_groups", "state", "defaults", "step"} if settings.is_optimizer(thing) else set()


def _rates(thing: Any) -> set[str]:
    """Return the names of numbers that a layer of a library reads itself, e.g. `p` of a Dropout.

    The whole numbers of a layer with parameters are their sizes, and too many to compare before each call.
    """
    if not _is_module(thing) or not imported.is_library(type(thing).__module__):
        return set()
    kinds = (float,) if settings.has_parameters(thing) else (float, int)
    return {name for name, value in vars(thing).items() if type(value) in kinds}


def _special_methods(kind: type) -> set[str]:
    """Return the names of special methods, which a callable executes without naming them."""
    return {
        name
        for name, value in vars(kind).items()
        if name.startswith("__") and type(value) is FunctionType and name not in _QUIET
    }


def _constructors(kind: Any) -> list[tuple[str, Any]]:
    """Return what making an object of a class of the user executes."""
    bases = kind.__mro__ if is_a(kind, type) else ()
    own = [vars(base) for base in bases if imported.is_users(base.__module__)]
    return [("self", has[name]) for has in own for name in _CONSTRUCTORS if name in has]


def _reader(thing: Any, attribute: str) -> Read | None:
    """Return what reads an attribute of an object without executing code of its class, or None.

    A value in the object's own dictionary would hide one of its class.
    """
    has = _dictionary(thing)
    if attribute in has:
        return partial(has.get, attribute)
    bases = thing.__mro__[1:] if is_a(thing, type) else type(thing).__mro__
    default = next((vars(base)[attribute] for base in bases if attribute in vars(base)), _NOTHING)
    if is_a(default, MemberDescriptorType) and not is_a(thing, type):
        return partial(_in_slot, default, thing)
    is_hidden = default is not _NOTHING and not hasattr(type(default), "__get__")  # as a property is not
    is_method = is_a(default, FunctionType) and (attribute == "forward" or not _is_module(thing))
    return partial(has.get, attribute) if is_hidden or is_method else None


def _in_slot(slot: Any, thing: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:  # it has no value, yet or any more
        return None


def _is_module(thing: Any) -> bool:
    return is_a(thing, *settings.kinds()[:1])


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """Return what belongs to an object for good, each with a name for what is found in it."""
    kind = type(thing)
    if is_a(thing, MethodType):
        return [("self", thing.__self__), ("self", thing.__func__)]
    if is_a(thing, partial, partialmethod):
        return [("self", thing.func), ("its arguments", thing.args), ("its arguments", thing.keywords)]
    if is_a(thing, staticmethod, classmethod):
        return [("self", thing.__func__)]
    if is_a(thing, property, cached_property):
        return [("self", thing.fget if is_a(thing, property) else thing.func)]
    if kind is _CACHED:
        return [("self", thing.__wrapped__)]
    if kind is FunctionType:
        modules = [(name, sys.modules.get(name)) for name in imported.import_names(thing)]
        return [("its defaults", thing.__defaults__), ("its defaults", thing.__kwdefaults__), *modules]
    if _is_module(thing):
        return [("self", kind), *thing._modules.items(), *(("its hooks", vars(thing).get(n)) for n in _HOOKS)]
    return [("self", kind)]


def _variables(function: FunctionType, names: set[str]) -> Iterator[tuple[Any, Binding]]:
    """Yield global variables with these names, and the variables of the closure."""
    for name in sorted(names):
        read: Read = partial(function.__globals__.get, name)
        yield (id(function.__globals__), name), Binding(name, read, read())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield (id(cell), name), Binding(name, partial(_contents, cell), _contents(cell))


def _entries(name: str, container: Any) -> Iterator[tuple[Any, Binding]]:
    base = next(each for each in _CONTAINERS if is_a(container, each))  # a subclass may have its own methods
    if base.__len__(container) > _MOST_ENTRIES:
        return
    entries: Any = dict.items(container) if base is dict else enumerate(base.__iter__(container))
    of_sequence = partial(_at, base.__getitem__.__get__(container))
    get = partial(dict.get, container) if base is dict else of_sequence
    for key, value in list(entries):
        if is_a(key, *_KEYS):
            yield (id(container), key), Binding(f"{name}[{key!r}]", partial(get, key), value)


def _at(get: Callable[[int], Any], index: int) -> Any:
    try:
        return get(index)
    except IndexError:
        return None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value, yet or any more
        return None


def _dictionary(thing: Any) -> Any:
    """Return an object's own attributes, without executing code of its class."""
    if is_a(thing, type):
        return vars(thing)
    try:
        has = object.__getattribute__(thing, "__dict__")
    except Exception:  # it has slots, or whatever a user's property raises
        return {}
    return has if is_a(has, dict) else {}
