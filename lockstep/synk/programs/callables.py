"""Functions that are callables computing with torch, and tensors that all ranks share.

The callable goes over by value, with whatever it holds: modules, optimizers, closures. Shared tensors in it
go as numbers, so that on each rank all of it meets that rank's own tensors.
"""

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.synk import rows
from lockstep.synk.folded import Folded
from lockstep.synk.programs import Asked, Input, Program
from lockstep.synk.programs.tensors import TensorShared
from lockstep.synk.results import FOLD_OPS, check_foldable, normalise_mode
from lockstep.synk.shareds import Known, Shared


@dataclass(frozen=True)
class Spec:
    """What the user gave to lockstep.synk.function. Variables by number."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    output_modes: tuple[str | None, ...]
    returns: str
    updates: tuple[tuple[int, str | None, bool], ...]  # the last: whether the user gave the mode
    sliceable: tuple[int, ...]


class CallableProgram(Program):
    """A callable in this process."""

    kind = "callable"

    def __init__(self, spec: Spec, here: Any) -> None:
        self.spec, self._shareds, self._gpu = spec, here.shareds, here.gpu
        shareds = here.shareds
        self.name, self.inputs, self.returns = spec.name, spec.inputs, spec.returns
        self.output_modes = spec.output_modes
        self.updated = {shareds[number]: mode for number, mode, _ in spec.updates}
        self.default_modes = {shareds[number] for number, _, given in spec.updates if not given}
        self.sliceable = [shareds[number] for number in spec.sliceable]

    def excerpt(self, arrays: Sequence[np.ndarray], choices: Sequence[rows.Choice | None]) -> list[Any]:
        if self._gpu is not None:
            uploaded: list[torch.Tensor] = self._gpu.upload(arrays, choices)
            return uploaded
        return [torch.from_numpy(array) for array in super().excerpt(arrays, choices)]

    def call(self, inputs: list[torch.Tensor]) -> list[Any]:
        return [self._as_array(i, value) for i, value in enumerate(self._compute(inputs))]

    def call_whole(self, inputs: list[torch.Tensor]) -> list[Any]:
        outputs = enumerate(self.call_part(inputs))
        return [self._gpu.kept.add(i, value) if torch.is_tensor(value) else value for i, value in outputs]

    def call_part(self, inputs: list[torch.Tensor]) -> list[Any]:
        """Outputs that are better folded on the GPU are tensors there."""
        outputs = enumerate(self._compute(inputs))
        return [value if self._stays(i, value) else self._as_array(i, value) for i, value in outputs]

    def folded(self, number: int, n_rows: int) -> Folded:
        made = super().folded(number, n_rows)
        return made if self._gpu is None else self._gpu.kept.folded(number, made)

    def _stays(self, number: int, value: Any) -> bool:
        folds = self._gpu is not None and self.output_modes[number] in FOLD_OPS
        return folds and bool(self._gpu.kept.suits(value))

    def call_alone(self, inputs: list[Any]) -> list[Any]:
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
        yield (
            what,
            (number, [shared.describe() for shared in new if isinstance(shared, TensorShared)], _seed()),
        )
        for name, value in inspect.getclosurevars(_plain(self.spec.function)).nonlocals.items():
            yield f"{what}: {name!r}, which it uses", value
        yield what, self.spec

    def marks(self) -> Any:
        known = [shared for shared in self._shareds.values() if isinstance(shared, TensorShared)]
        return {shared: shared.marks() for shared in known if shared not in self.updated}

    def check_marks(self, before: Any) -> None:
        for shared, mark in before.items():
            if shared.marks() != mark:
                raise RuntimeError(
                    f"{self.name} changes {shared.name}, which is not among its updates: a sliced call must "
                    "know what to fold"
                )

    def _as_array(self, number: int, value: Any) -> np.ndarray:
        """A copy: a callable may return what lies in a block."""
        array = np.array(value.detach().cpu().numpy() if torch.is_tensor(value) else value)
        mode, what = self.output_modes[number], f"{self.name}: output {number}"
        if mode is not None and array.dtype.kind not in "biufc":
            raise TypeError(
                f"{what} is {type(value).__name__}, which has no {mode}: return tensors or numbers"
            )
        if mode is not None:
            check_foldable(mode, array.dtype, what)
        if mode == "gather" and array.ndim == 0:
            raise TypeError(f"{what} is a scalar, which has no rows to gather")
        return array


def receive(here: Any, objects: Iterator[Any]) -> None:
    """Makes the program on a worker."""
    number, described, seed = next(objects)
    if not any(program.kind == CallableProgram.kind for program in here.programs.values()):
        _seed_streams(seed, here.rank)
    for kind, shared_number, name, what in described:
        shared = kind.make(here, name, what)
        shared.number = shared_number
        here.shareds[shared_number] = shared
    spec = next(piece for piece in objects if isinstance(piece, Spec))
    here.programs[number] = CallableProgram(spec, here)


def build(known: Known, here: Any, asked: Asked) -> CallableProgram:
    """Checks what the user gave for a callable."""
    name = asked.name
    if asked.givens is not None or asked.options:
        what = ", ".join(["givens"] * (asked.givens is not None) + list(asked.options))
        raise TypeError(f"{name}: {what}: a callable has no such option, only a graph of PyTensor")
    modes, returns = _check_modes(name, asked.outputs)
    updates = _listed(name, "updates", asked.updates)
    pairs = [_check_update(known, name, i, given) for i, given in enumerate(updates)]
    numbers = [number for number, _, _ in pairs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"{name}: a variable is updated twice")
    shareds = here.shareds
    stored = _listed(name, "sliceable_shareds", asked.sliceable_shareds)
    sliceable = [_find(known, name, "sliceable", given) for given in stored]
    for number in sliceable:
        if number in numbers:
            raise ValueError(f"{name}: sliceable {shareds[number].name!r} is updated by the function")
    inputs = _check_parameters(name, asked.inputs, asked.bcast_inputs)
    spec = Spec(name, asked.inputs, inputs, modes, returns, tuple(pairs), tuple(sliceable))
    return CallableProgram(spec, here)


def _check_parameters(name: str, function: Callable[..., Any], whole: Any) -> tuple[Input, ...]:
    """An input for each parameter that has no default."""
    if whole is not None and not isinstance(whole, list):
        raise TypeError(f"{name}: bcast_inputs is {type(whole).__name__}, and has to be a list of names")
    names = []
    for parameter in _signature(name, function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"{name}: {parameter} can't be an input: inputs are positional parameters")
        if parameter.default is parameter.empty:
            names.append(parameter.name)
    for given in whole or []:
        if given not in names:
            raise ValueError(f"{name}: bcast_inputs has {given!r}, inputs are {', '.join(names) or 'none'}")
    return tuple(Input(given, None, None, given in (whole or [])) for given in names)


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """A module's is that of its forward."""
    try:
        return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)
    except ValueError:
        raise TypeError(f"{name}: {function} does not tell its parameters: wrap it in a function") from None


def _check_modes(name: str, outputs: Any) -> tuple[tuple[str | None, ...], str]:
    if outputs is None:
        return (), "none"
    listed = outputs if isinstance(outputs, list) else [outputs]
    modes = tuple(normalise_mode(mode, f"{name}: output {i}") for i, mode in enumerate(listed))
    return modes, "list" if isinstance(outputs, list) else "one"


def _check_update(known: Known, name: str, number: int, given: Any) -> tuple[int, str | None, bool]:
    what = f"{name}: update {number}"
    if not isinstance(given, tuple):
        return _find(known, name, f"update {number}", given), "avg", False
    if len(given) != 2:
        raise TypeError(f"{what} is a tuple of {len(given)}: give (shared, mode)")
    return _find(known, name, f"update {number}", given[0]), normalise_mode(given[1], what), True


def _listed(name: str, what: str, given: Any) -> list[Any]:
    if given is not None and not isinstance(given, list):
        raise TypeError(f"{name}: {what} is {type(given).__name__}, and has to be a list")
    return given or []


def _find(known: Known, name: str, what: str, given: Any) -> int:
    number, part = known.label(given) or (None, 0)
    if number is None or part:
        hint = (
            "part of a module: use synk.weights(module)"
            if part
            else "not shared: call synk.share on it first"
        )
        raise TypeError(f"{name}: {what} is {hint}")
    return number


def _plain(function: Callable[..., Any]) -> Any:
    """The Python function in it, for its closure."""
    return function if inspect.isfunction(function) else (lambda: None)


def _seed() -> bytes:
    """From the state of this process's random stream: where those of the others begin."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest()


def _seed_streams(seed: bytes, rank: int) -> None:
    """Torch's stream, and NumPy's and Python's global ones, become the rank's own."""
    words = np.random.SeedSequence(int.from_bytes(seed, "big"), spawn_key=(rank,)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))  # the stream that functions of users may take
    random.seed(int(words[2]))
