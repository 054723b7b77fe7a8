"""One recorded operation: what is called with which values, and where what comes out is kept."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.flow.devices import Device
from lockstep.flow.recipes import Kind, Layout, Recipe, fill, fill_names

View = tuple[torch.Size, tuple[int, ...], int, torch.dtype]  # size, stride, offset, dtype
_SEEDING = threading.Lock()  # operations that can only use torch's own generator take turns


class Cell:
    """Where a value is when it is there. layout: of the whole; None for what is not strided."""

    __slots__ = ("__weakref__", "layout", "value")

    def __init__(self, layout: Layout | None, value: Any = None) -> None:
        self.layout, self.value = layout, value

    def view(self, view: View | None) -> Any:
        """The value, or a view of its memory."""
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
        """Memory for what will be overwritten, where what should have made it has failed."""
        if self.value is None and self.layout is not None:
            size, stride, dtype = self.layout
            self.value = torch.empty_strided(size, stride, dtype=dtype, device=device.torch_device)


class Instruction:
    """An operation on cells, which are given when it runs: so it can run again with others.

    views: of each input. overwrites: the input that need not be there before. gives_result: whether someone
    waits for what it returns, which is kept then.
    """

    __slots__ = (
        "device", "function", "gives_result", "keywords", "kind", "lane", "line", "name", "overwrites",
        "phase", "recipe", "seed", "template", "views",
    )  # fmt: skip

    def __init__(
        self, name: str, function: Callable[..., Any], device: Device, lane: str = "compute"
    ) -> None:
        self.name, self.function, self.device, self.lane = name, function, device, lane
        self.kind: Kind | None = None
        self.template: Sequence[Any] = ()
        self.keywords: dict[str, Any] = {}
        self.views: list[View | None] = []
        self.recipe: Recipe | None = None
        self.seed: int | None = None
        self.overwrites: int | None = None
        self.line, self.phase = "", "forward"
        self.gives_result = False

    def execute(self, inputs: Sequence[Cell], outputs: Sequence[Cell], run: int = 0) -> Any:
        """run: the number of the program's run; other random numbers in each."""
        if self.overwrites is not None:
            inputs[self.overwrites].allocate(self.device)
        tensors = []
        for cell, view in zip(inputs, self.views, strict=True):
            value = cell.value  # the common case without a call
            tensors.append(cell.view(view) if view is not None or value is None else value)
        if self.device.asynchronous:
            self.device.hold(tensors)
        arguments = fill(self.template, tensors)
        keywords = fill_names(self.keywords, tensors) if self.keywords else {}
        if self.seed is None:
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
                recipe.copies = _share_memory([*inputs, *leaves], leaves)
        for cell, value in zip(outputs, leaves, strict=True):
            cell.value = _as_promised(value, cell.layout, recipe is not None and bool(recipe.copies))


def _as_promised(value: torch.Tensor, layout: Layout | None, copy: bool) -> torch.Tensor:
    """With the strides that were told to the user, on which views of it were built."""
    if layout is None or (not copy and value.stride() == layout[1] and value.size() == layout[0]):
        return value
    size, stride, dtype = layout
    assert value.size() == size and value.dtype is dtype, f"{tuple(value.size())} came out, not {tuple(size)}"
    return torch.empty_strided(size, stride, dtype=dtype, device=value.device).copy_(value)


def _share_memory(tensors: Sequence[Any], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of an output is another tensor's, too."""
    places = [t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided]
    return any(
        o.layout is torch.strided and o.numel() and places.count(o.untyped_storage().data_ptr()) > 1
        for o in outputs
    )


def draw_seed(generator: torch.Generator | None) -> int:
    """From the one that was given, or torch's, so torch.manual_seed counts, and checkpointing draws again."""
    with _SEEDING:
        device = "cpu" if generator is None else generator.device
        return int(torch.randint(2**62, (), generator=generator, device=device))
