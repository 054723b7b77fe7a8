"""Functions that are callables computing with torch.

The callable is pickled by value with what it holds: modules, optimizers, closures. Shared tensors in it
are pickled as numbers, so that each rank's copy refers to that rank's own tensors.
"""

import hashlib
import inspect
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.synk import rows, torch_settings
from lockstep.synk.context import RankContext
from lockstep.synk.programs import FunctionRequest, Input, RankProgram, UpdateMode
from lockstep.synk.results import REDUCE_OPS, PartReducer, check_reducible, normalise_mode
from lockstep.synk.shareds import Shared, SharedRegistry
from lockstep.synk.storage import version_of
from lockstep.synk.tensors import SharedTensor, TensorShared
from lockstep.synk.torch_settings import TorchSettings


@dataclass(frozen=True)
class Spec:
    """The checked arguments of lockstep.synk.function, with variables by number."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    output_modes: tuple[str | None, ...]
    returns: str
    updates: dict[int, UpdateMode]  # by variable
    sliceable: tuple[int, ...]


class CallableProgram(RankProgram):
    """A callable in this process."""

    kind = "callable"

    def __init__(self, spec: Spec, context: RankContext) -> None:
        self.spec, self._shareds, self._gpu = spec, context.shareds, context.gpu
        shareds, self.source = context.shareds, spec.function
        self.name, self.inputs, self.returns = spec.name, spec.inputs, spec.returns
        self.output_modes = spec.output_modes
        self.updated = {shareds[number]: update.mode for number, update in spec.updates.items()}
        self.default_modes = {
            shareds[number] for number, update in spec.updates.items() if not update.by_user
        }
        self.sliceable = [shareds[number] for number in spec.sliceable]

    def check_dtype(self, what: str, dtype: np.dtype[Any]) -> None:
        try:
            torch.from_numpy(np.empty(0, dtype))
        except (TypeError, ValueError) as error:  # ValueError: another byte order
            raise TypeError(f"{what} is {dtype}, which torch has not: convert it before the call") from error

    def excerpt(self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]) -> list[Any]:
        if self._gpu is not None:
            return self._gpu.upload(arrays, choices)
        return [torch.from_numpy(array) for array in super().excerpt(arrays, choices)]

    def call(self, inputs: list[torch.Tensor]) -> list[Any]:
        return [self._as_array(i, value) for i, value in enumerate(self._compute(inputs))]

    def call_whole(self, inputs: list[torch.Tensor]) -> list[Any]:
        outputs = self.call_part(inputs)
        if self._gpu is None:
            return outputs
        add = self._gpu.outputs.add
        return [add(i, value) if torch.is_tensor(value) else value for i, value in enumerate(outputs)]

    def call_part(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Compute one slice; outputs that are faster to reduce on the GPU stay there as tensors."""
        outputs = enumerate(self._compute(inputs))
        return [value if self._stays(i, value) else self._as_array(i, value) for i, value in outputs]

    def make_reducer(self, number: int, n_rows: int) -> PartReducer:
        made = super().make_reducer(number, n_rows)
        return made if self._gpu is None else self._gpu.outputs.make_reducer(number, made)

    def _stays(self, number: int, value: Any) -> bool:
        if self._gpu is None or self.output_modes[number] not in REDUCE_OPS:
            return False
        return self._gpu.outputs.should_keep(value)

    def capture_settings(self) -> TorchSettings:
        return torch_settings.capture()

    def use_settings(self, settings: TorchSettings) -> AbstractContextManager[None]:
        return torch_settings.use(settings)

    def find_written(self, inputs: list[torch.Tensor]) -> list[int]:
        if self._gpu is not None:  # they are copies
            return []
        return [number for number, tensor in enumerate(inputs) if version_of(tensor)]

    def call_locally(self, inputs: list[Any]) -> list[Any]:
        return self.call(self.excerpt([np.array(value) for value in inputs], [None] * len(inputs)))

    def _compute(self, inputs: list[torch.Tensor]) -> list[Any]:
        function = self.spec.function
        result = function(*inputs) if self._gpu is None else self._gpu.compute(function, *inputs)
        if self.returns == "none":
            return []
        listed = list(result) if self.returns == "list" and isinstance(result, list | tuple) else [result]
        if len(listed) != len(self.output_modes):
            raise TypeError(
                f"{self.name} returned {len(listed)} outputs, {len(self.output_modes)} have modes"
            )
        return listed

    def pieces(self, number: int, new: list[Shared]) -> Iterator[tuple[str, Any]]:
        what = f"function {self.name!r}"
        yield what, receive
        described = [shared.describe() for shared in new if isinstance(shared, TensorShared)]
        yield what, (number, described, _seeds())
        for name, value in _closure(self.spec.function):
            yield f"{what}: {name!r}, which it uses,", value
        yield what, self.spec

    def versions(self) -> Any:
        registry = [shared for shared in self._shareds.values() if isinstance(shared, TensorShared)]
        return {shared: shared.versions() for shared in registry if shared not in self.updated}

    def check_unchanged(self, before: Any) -> None:
        for shared, mark in before.items():
            if shared.versions() != mark:
                raise RuntimeError(
                    f"{self.name} changes {shared.name}, which is not among its updates: a sliced call must "
                    "know what to reduce"
                )

    def _as_array(self, number: int, value: Any) -> np.ndarray:
        """Return a checked copy of an output, since a callable may return an array that lies in a block."""
        mode, what = self.output_modes[number], f"{self.name}: output {number}"
        array = _to_numpy(value, what)
        if mode is not None and array.dtype.kind not in "biufc":
            raise TypeError(
                f"{what} is {type(value).__name__}, which has no {mode}: return tensors or numbers"
            )
        if mode is not None:
            check_reducible(mode, array.dtype, what)
        if mode == "gather" and array.ndim == 0:
            raise TypeError(f"{what} is a scalar, which has no rows to gather")
        return array


def _closure(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a function's closure that have a value now; other callables have no closure."""
    if inspect.isfunction(function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # it gets its value later
                continue
            yield name, value


def _to_numpy(value: Any, what: str) -> np.ndarray:
    """Return a copy of a tensor, or of what NumPy can make an array of."""
    try:
        return np.array(value.numpy(force=True) if torch.is_tensor(value) else value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what} is {_why_not_array(value, error)}") from error


def _why_not_array(value: Any, error: Exception) -> str:
    if torch.is_tensor(value) and isinstance(error, TypeError) and value.layout is torch.strided:
        return f"{value.dtype}, a dtype that NumPy lacks. Return y.float()"
    # E.g. a tuple of tensors on a GPU, or of tensors that require gradients
    hint = " Several outputs need a list of modes" if isinstance(value, list | tuple) else ""
    return f"{type(value).__name__}: {error}{hint}"


def receive(context: RankContext, objects: Iterator[Any]) -> None:
    """Build the program on a worker."""
    number, described, seeds = next(objects)
    if not any(program.kind == CallableProgram.kind for program in context.programs.values()):
        _seed_streams(seeds, context.rank)
    with _keep_streams():  # a module that the callable imports may seed them, and alike on all ranks
        for description in described:
            context.shareds[description.number] = description.make(context)
        spec = next(piece for piece in objects if isinstance(piece, Spec))
    context.programs[number] = CallableProgram(spec, context)


def build(registry: SharedRegistry, context: RankContext, request: FunctionRequest) -> CallableProgram:
    """Check the arguments for a callable, and return its program."""
    name = request.name
    if request.givens is not None or request.options:
        what = ", ".join(["givens"] * (request.givens is not None) + list(request.options))
        raise TypeError(f"{name}: {what}: a callable has no such option, only a graph of PyTensor")
    modes, returns = _check_modes(name, request.outputs)
    updates = _check_updates(registry, context, name, request.updates)
    stored = _listed(name, "sliceable_shareds", request.sliceable_shareds)
    sliceable = [_find(registry, name, "sliceable", argument) for argument in stored]
    for number in sliceable:
        if number in updates:
            raise ValueError(f"{name}: sliceable {context.shareds[number].name!r} is updated by the function")
        if not isinstance(context.shareds[number], SharedTensor) or not context.shareds[number].shape:
            raise TypeError(f"{name}: sliceable {context.shareds[number].name!r} has no rows")
    spec = Spec(
        name=name,
        function=request.inputs,
        inputs=_check_parameters(name, request.inputs, request.bcast_inputs),
        output_modes=modes,
        returns=returns,
        updates=updates,
        sliceable=tuple(sliceable),
    )
    return CallableProgram(spec, context)


def _check_parameters(name: str, function: Callable[..., Any], whole: Any) -> tuple[Input, ...]:
    """Return an input for each parameter without a default."""
    if whole is not None and not isinstance(whole, list):
        raise TypeError(f"{name}: bcast_inputs is {type(whole).__name__}, and has to be a list of names")
    names = []
    for parameter in _signature(name, function).parameters.values():
        if parameter.default is not parameter.empty:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: {parameter} can't be an input: inputs are positional parameters")
        names.append(parameter.name)
    for argument in whole or []:
        if argument not in names:
            raise ValueError(
                f"{name}: bcast_inputs has {argument!r}, inputs are {', '.join(names) or 'none'}"
            )
    return tuple(
        Input(argument, dtype=None, ndim=None, whole=argument in (whole or [])) for argument in names
    )


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable; a module has that of its forward."""
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError:
        raise TypeError(f"{name}: {function} has no readable signature. Wrap it in a function") from None


def _check_modes(name: str, outputs: Any) -> tuple[tuple[str | None, ...], str]:
    if outputs is None:
        return (), "none"
    listed = outputs if isinstance(outputs, list) else [outputs]
    modes = tuple(normalise_mode(mode, f"{name}: output {i}") for i, mode in enumerate(listed))
    return modes, "list" if isinstance(outputs, list) else "one"


def _check_updates(
    registry: SharedRegistry, context: RankContext, name: str, updates: Any
) -> dict[int, UpdateMode]:
    """Return the modes of the updates by the variable's number."""
    modes: dict[int, UpdateMode] = {}
    for i, argument in enumerate(_listed(name, "updates", updates)):
        what = f"{name}: update {i}"
        if isinstance(argument, tuple) and len(argument) != 2:
            raise TypeError(f"{what} is a tuple of {len(argument)}: give (shared, mode)")
        shared, *mode = argument if isinstance(argument, tuple) else (argument,)
        number = _find(registry, name, f"update {i}", shared)
        if number in modes:
            raise ValueError(f"{name}: a variable is updated twice")
        modes[number] = UpdateMode(normalise_mode(mode[0], what), by_user=True) if mode else UpdateMode()
        if mode:
            variable = context.shareds[number]
            check_reducible(modes[number].mode, variable.get().dtype, f"{what} of {variable.name!r}")
    return modes


def _listed(name: str, what: str, argument: Any) -> list[Any]:
    if argument is not None and not isinstance(argument, list):
        raise TypeError(f"{name}: {what} is {type(argument).__name__}, and has to be a list")
    return argument or []


def _find(registry: SharedRegistry, name: str, what: str, argument: Any) -> int:
    number, part = registry.label(argument) or (None, 0)
    if number is None or part:
        hint = (
            "part of a module: use synk.weights(module)"
            if part
            else "not shared: call synk.share on it first"
        )
        raise TypeError(f"{name}: {what} is {hint}")
    return number


def _seeds() -> list[bytes]:
    """Return seeds for the other ranks' streams of torch, NumPy and Python, from those of this process."""
    others = [pickle.dumps(state) for state in (np.random.get_state(), random.getstate())]
    states = [torch.get_rng_state().numpy().tobytes(), *others]
    return [hashlib.sha256(state).digest() for state in states]


def _seed_streams(seeds: Sequence[bytes], rank: int) -> None:
    """Seed torch's stream and the global ones of NumPy and Python for this rank."""
    sequences = [np.random.SeedSequence(int.from_bytes(seed, "big"), spawn_key=(rank,)) for seed in seeds]
    words = [int(sequence.generate_state(3)[i]) for i, sequence in enumerate(sequences)]
    torch.manual_seed(words[0])
    np.random.seed(words[1])  # the stream that functions of users may take
    random.seed(words[2])


@contextmanager
def _keep_streams() -> Iterator[None]:
    """Leave this rank's streams of torch, NumPy and Python as they are before."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if is_used else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
