"""A recorded operation, the memories that it uses, and its submission to the engine."""

import ctypes
import functools
import operator
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import placement, private
from lockstep.flow.devices import Device
from lockstep.flow.engine import Variable, engine_of, in_dry_run
from lockstep.flow.lanes import Operation
from lockstep.flow.recipes import ArgumentSlot, Layout, OperationTraits, Recipe, fill, fill_names

View = tuple[torch.Size, tuple[int, ...], int, torch.dtype]  # size, stride, offset, dtype
# Operations whose threads write the same element in the order in which they come.
_BY_INDEX = {
    *("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "put", "put_"),
    *("index_copy", "index_copy_", "max_unpool2d", "max_unpool3d", "_unsafe_masked_index_put_accumulate"),
}
_SEEDING = threading.RLock()  # operations that can only use torch's own generator take turns

os.register_at_fork(after_in_child=_SEEDING._at_fork_reinit)  # type: ignore[attr-defined]


class Cell:
    """The place of a value: None until it is computed. `layout` is None unless the value is strided."""

    __slots__ = ("__weakref__", "layout", "value")

    def __init__(self, layout: Layout | None) -> None:
        self.layout = layout
        self.value: Any = None

    def view(self, view: View | None) -> Any:
        """Return the value, or a view of its memory."""
        whole = self.value
        if whole is None:
            raise UserError("its input has no value: it was made in a dry run")
        if view is None:
            return whole
        size, stride, offset, dtype = view
        if dtype is whole.dtype:
            return whole.as_strided(size, stride, whole.storage_offset() + offset)
        first = whole.storage_offset() * whole.dtype.itemsize // dtype.itemsize + offset
        return torch.empty(0, dtype=dtype, device=whole.device).set_(
            whole.untyped_storage(), first, size, stride
        )

    def allocate(self, device: Device) -> None:
        """Make memory for a value to be overwritten, if the operation that should make it failed."""
        if self.value is None and self.layout is not None:
            size, stride, dtype = self.layout
            self.value = torch.empty_strided(size, stride, dtype=dtype, device=device.torch_device)


def _of_whole(name: str) -> Any:
    """Return a property that is an attribute of the whole array's memory."""
    get = operator.attrgetter(f"_whole.{name}")
    return property(get, lambda self, new: setattr(self._whole, name, new))


class Storage(Variable):
    """The memory of an array and its views, on one device.

    Attributes:
        program: The program that is being captured, if the memory stands for one of its values.
        copies: Copies in other devices' memories, with the version that they copy.
        views: The views that autograd knows, or None if it never had any.
        stale: Those of them whose shape, or whose base's, has changed in place, or None if none ever has.
    """

    __slots__ = ("cell", "copies", "device", "program", "stale", "views")

    def __init__(self, device: Device, layout: Layout | None, name: str = "", program: Any = None) -> None:
        Variable.__init__(self, name)
        self.device, self.program = device, program
        self.cell = Cell(layout)
        self.copies: dict[Any, tuple[int, Storage]] = {}
        self.views: Any = None
        self.stale: Any = None


class SparseEntries(Storage):
    """The memory of a sparse array's values or indices, with the hazards and the version of the whole."""

    __slots__ = ("_whole",)

    def __init__(self, whole: Storage, cell: Cell) -> None:
        self._whole, self._look_at = whole, whole._look_at
        self.name, self.device, self.program = whole.name, whole.device, whole.program
        self.cell, self.copies, self.views, self.stale = cell, {}, None, None

    writer = _of_whole("writer")
    readers = _of_whole("readers")
    version = _of_whole("version")


class Instruction:
    """An operation whose cells are given when it runs, so that it can run again on others.

    Attributes:
        views: Of each input, its part of the memory.
        overwrites: The input whose old value is not needed.
        gives_result: Whether the function's result is kept for a reader.
        cast_to: Dtype to which all inputs are converted first.
    """

    __slots__ = (
        "cast_to", "device", "function", "gives_result", "keywords", "kind", "lane", "line", "name",
        "overwrites", "phase", "recipe", "seed", "template", "views",
    )  # fmt: skip

    def __init__(
        self, name: str, function: Callable[..., Any], device: Device, lane: str = "compute"
    ) -> None:
        self.name, self.function, self.device, self.lane = name, function, device, lane
        self.kind: OperationTraits | None = None
        self.template: Sequence[Any] = ()
        self.keywords: dict[str, Any] = {}
        self.views: list[View | None] = []
        self.recipe: Recipe | None = None
        self.cast_to: torch.dtype | None = None
        self.seed: int | None = None
        self.overwrites: int | None = None
        self.line, self.phase = "", "forward"
        self.gives_result = False

    def on_inputs(self, views: Sequence[View | None], phase: str) -> "Instruction":
        """Make it function(*inputs), recorded at the user's present line, and return it."""
        self.template, self.views = [ArgumentSlot(n) for n in range(len(views))], list(views)
        self.line, self.phase = placement.user_line(), phase
        return self

    def execute(self, inputs: Sequence[Cell], outputs: Sequence[Cell], run: int = 0) -> Any:
        """Run the operation. `run` numbers the runs of a program, which get different random numbers."""
        if self.overwrites is not None:
            inputs[self.overwrites].allocate(self.device)
        tensors = []
        for cell, view in zip(inputs, self.views, strict=True):
            value = cell.value  # the common case without a call
            tensors.append(cell.view(view) if view is not None or value is None else value)
        if self.device.asynchronous:
            self.device.hold(tensors)
        if self.cast_to is not None:
            tensors = [tensor.to(self.cast_to) for tensor in tensors]
        arguments = fill(self.template, tensors)
        keywords = fill_names(self.keywords, tensors) if self.keywords else {}
        if self.kind is not None and self.kind.name in _BY_INDEX:
            returned = self.device.call(partial(in_one_thread, self.function), arguments, keywords)
        elif self.seed is None:
            returned = self.device.call(self.function, arguments, keywords)
        else:
            returned = self._seeded(arguments, keywords, (self.seed + run) % 2**63)
        if outputs:
            self._keep(returned, outputs, tensors)
        return returned if self.gives_result else None

    def _seeded(self, arguments: list[Any], keywords: dict[str, Any], seed: int) -> Any:
        assert self.kind is not None
        device = self.device.torch_device
        if self.kind.seed_with is not None:
            keywords["generator"] = torch.Generator(device).manual_seed(seed)
            return self.device.call(self.kind.seed_with, arguments, keywords)
        generator = private.default_generator(device)
        with _SEEDING:
            state = generator.get_state()
            try:
                generator.manual_seed(seed)
                return self.device.call(self.function, arguments, keywords)
            finally:
                generator.set_state(state)

    def _keep(self, returned: Any, outputs: Sequence[Cell], inputs: Sequence[Any]) -> None:
        recipe = self.recipe
        if len(outputs) == 1 and recipe is not None and recipe.structure is None and recipe.copies is False:
            outputs[0].value = _as_promised(returned, outputs[0].layout, False)
            return
        single = recipe is None or recipe.structure is None
        leaves = [returned] if single else private.tree_leaves(returned)
        if recipe is not None:
            leaves = [leaf for leaf, layout in zip(leaves, recipe.layouts, strict=True) if layout is not None]
            if recipe.copies is None:
                # Attention makes no weights if none are needed.
                made = [leaf for leaf in leaves if leaf is not None]
                recipe.copies = _share_memory([*inputs, *made], made)
        for cell, value in zip(outputs, leaves, strict=True):
            cell.value = _as_promised(value, cell.layout, recipe is not None and bool(recipe.copies))


def on_copies(make: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a sparse tensor with its own indices and values: writes to the given ones must not reach it."""
    return make(*args, **kwargs).clone()


def in_one_thread(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation without torch's other threads.

    OpenMP's own function sets the number for this thread only; torch's would set that of new threads, too.
    """
    number = torch.get_num_threads()
    _openmp_function()(1)
    try:
        return function(*args, **kwargs)
    finally:
        _openmp_function()(number)


@functools.cache
def _openmp_function() -> Callable[[int], Any]:
    found: Any = getattr(ctypes.CDLL(None), "omp_set_num_threads", bool)
    return found  # type: ignore[no-any-return]


def without_gradients(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation in a worker as under torch.no_grad. An LSTM's workspace is empty then, not None."""
    with torch.no_grad():
        returned = function(*args, **kwargs)
    return [torch.empty(0, dtype=torch.uint8) if each is None else each for each in returned]


def keeping_sizes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose results' sizes depend on values.

    Raises:
        UserError: It has given one of its tensors another size, which no array can have.
    """
    tensors = [t for t in private.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    places = [
        (t.size(), t.stride(), t.storage_offset()) if t.layout is torch.strided else None for t in tensors
    ]
    returned = function(*args, **kwargs)
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None and tensor.size() != place[0]:
            came = tuple(tensor.size())
            tensor.as_strided_(*place)
            raise UserError(
                f"it would change an array from {tuple(place[0])} to {came} in place, which arrays can't: "
                "give it one of that shape"
            )
    return returned


def _as_promised(value: Any, layout: Layout | None, copy: bool) -> Any:
    """Return the value with the dtype and strides that its array has, on which views were built.

    Only the kernel knows the size of a recurrent layer's workspace, for which torch predicts (0,), and
    whether a sum of embeddings needs its notes for backward.
    """
    if layout is None or value is None:
        return value
    size, stride, dtype = layout
    if not copy and value.stride() == stride and value.size() == size and value.dtype is dtype:
        return value
    if (0,) in (size, value.size()) and value.dtype is dtype:
        return value
    came = f"{tuple(value.size())} {value.dtype}"
    assert value.size() == size and value.dtype is dtype, f"{came} came out, not {tuple(size)} {dtype}"
    return torch.empty_strided(size, stride, dtype=dtype, device=value.device).copy_(value)


def _share_memory(tensors: Sequence[Any], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether the memory of an output is also another tensor's."""
    places = [t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided]
    return any(
        o.layout is torch.strided and o.numel() and places.count(o.untyped_storage().data_ptr()) > 1
        for o in outputs
    )


def in_storage(dtype: torch.dtype, memory: Sequence[Any]) -> torch.Tensor:
    """Return an ordinary tensor in a storage: the memory that torch gives an empty one to unpickle it."""
    if placement.is_called_by(torch.serialization._legacy_load):  # which reads the values afterwards
        raise UserError(
            "torch.load: inside of `with flow.device` it can't read a file of the format before torch 1.6: "
            "load it outside, and save it again"
        )
    empty = private.plainly(torch.empty, 0, dtype=dtype)
    return private.plainly(empty.set_, *memory)  # type: ignore[no-any-return]


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed from the generator, or from torch's own.

    So torch.manual_seed counts, and activation checkpointing draws the same numbers again.
    """
    device = "cpu" if generator is None else generator.device
    with _SEEDING:  # not inside of `plainly`: a signal's handler runs while a thread waits for a lock
        return int(private.plainly(torch.randint, 2**62, (), generator=generator, device=device))


def run(
    step: Instruction, reads: Sequence[Storage], writes: Sequence[Storage] = (), made: Sequence[Storage] = ()
) -> Operation:
    """Submit an operation on these memories.

    Args:
        reads: Memories that it reads.
        writes: Those of them that it changes.
        made: Memories without a value, which it fills.
    """
    engine = engine_of(step.device)
    function = partial(step.execute, [s.cell for s in reads], [s.cell for s in made])
    operation = engine.operation(function, engine.lane(step.device, step.lane), step.name)
    operation.line, operation.phase = step.line, step.phase
    if step.overwrites is not None:
        reads = [s for number, s in enumerate(reads) if number != step.overwrites]
    return engine.submit(operation, reads, [*writes, *made])


def need_values(what: str) -> None:
    """Raise UserError in a dry run."""
    if in_dry_run():
        raise UserError(f"{placement.user_line()}: {what} needs values, and a dry run makes none")


def fetching(source: Storage, view: View | None) -> Instruction:
    """Return the operation that copies a value into host memory."""
    step = Instruction("fetch", source.device.fetch, source.device, "fetch").on_inputs([view], "fetch")
    step.gives_result = True
    return step


def stored(tensor: torch.Tensor, device: Device, name: str = "") -> Storage:
    """Return a memory with a copy of an ordinary tensor. The tensor is read before this returns.

    Raises:
        UserError: The tensor has no values.
    """
    if tensor.is_meta:
        raise UserError(
            f"{placement.user_line()}: a tensor on the meta device has no values: make it on the CPU"
        )
    if torch.is_inference_mode_enabled():  # workers are outside of it, and could not write the copy
        with private.inference_mode(False):
            return stored(tensor, device, name)
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        copy = _copy(private.plainly(tensor.detach), private.plainly)
    else:
        with private.without_modes():
            copy = _copy(tensor.detach(), operator.call)
    layout = None if copy.layout is not torch.strided else (copy.size(), copy.stride(), copy.dtype)
    storage = Storage(device, layout, name)
    if device.memory == "host":
        storage.cell.value = copy
    else:
        step = Instruction("put", partial(device.put, copy), device, "communication")
        run(step.on_inputs([], "copy"), [], [], [storage])
    return storage


def _copy(tensor: torch.Tensor, call: Callable[..., Any]) -> torch.Tensor:
    """Return a copy in host memory, made by this thread only.

    torch's pool would help, and its threads would keep cores busy for some milliseconds afterwards that the
    devices' workers need.
    """
    strided, is_zero = tensor.layout is torch.strided, tensor._is_zerotensor()
    if strided and not is_zero and tensor.numel() and not call(tensor.data_ptr):
        raise UserError(
            f"{placement.user_line()}: this {type(tensor).__name__} has no memory (it is fake, freed or a "
            "wrapper of other tensors): give its values as an ordinary tensor"
        )
    plain = strided and not (is_zero or tensor.is_conj() or tensor.is_neg())
    if not (plain and tensor.is_cpu):
        moved: torch.Tensor = call(tensor.to, "cpu", copy=True)
        return moved
    made: torch.Tensor = call(torch.empty_like, tensor)
    if made.stride() != tensor.stride():  # it has gaps
        call(made.copy_, tensor)
        return made
    ctypes.memmove(made.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return made


def strides_of_copy(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a copy of the tensor has: its own, unless it has gaps or overlaps itself."""
    with private.without_modes():
        alike = torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
        return torch.empty_like(alike).stride()


def copy_on(device: Device, source: Storage, program: Any) -> Storage:
    """Return the memory's copy on another device, made once per version.

    Args:
        program: The program that is being captured, or None.
    """
    copies, version = (source.copies, source.version) if program is None else program.copies_of(source)
    key = device.memory, in_dry_run()  # a dry run's copy gets no value
    known = copies.get(key)
    copying = None if known is None else known[1].writer
    has_failed = copying is not None and copying.failure is not None  # such as for lack of memory
    if known is None or known[0] != version or has_failed:
        target = Storage(device, source.cell.layout, source.name, program)
        step = Instruction("copy", partial(_move, source.device, device), device, "communication")
        (run if program is None else program.add)(step.on_inputs([None], "copy"), [source], [], [target])
        known = copies[key] = version, target
    copy: Storage = known[1]
    return copy


def _move(source: Device, target: Device, value: torch.Tensor) -> torch.Tensor:
    direct = "host" in (source.memory, target.memory) or target.copies_from(source)
    return target.put(value if direct else source.fetch(value))
