"""Facts about torch's operations before they run: what they write, the shapes of results, randomness."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import private
from lockstep.flow.strides import strides_of

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]  # size, stride, dtype of a whole storage
MOST = 20_000  # recipes kept at once

# Arguments, by position, that are written although the schema does not say so: running statistics. Autograd
# does not count these writes.
WRITES_STATISTICS = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}
# Those that write statistics only if this argument says that they train.
_TRAINING = {"native_batch_norm": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5}
# Their second and third results are float32 if images have less precision than parameters.
_NORMALIZATIONS = {
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::native_layer_norm",
    "aten::native_layer_norm_backward",
    "aten::native_group_norm",
    "aten::native_group_norm_backward",
}
# For a target of one sample, with so many dimensions, their loss has none, where torch predicts one.
_LOSSES = {"aten::multi_margin_loss": 0, "aten::multilabel_margin_loss_forward": 1}
# Losses and their gradients that have the dtype of the scores, the argument at this position, whatever the
# target's is. Such a gradient has the scores' shape, too: torch predicts it with a division by their number.
_LIKE_SCORES = {
    "aten::huber_loss": 0,
    "aten::soft_margin_loss": 0,
    "aten::mse_loss_backward": 1,
    "aten::smooth_l1_loss_backward": 1,
    "aten::huber_loss_backward": 1,
    "aten::soft_margin_loss_backward": 1,
}
# Operations that torch cannot predict for a batch of no samples, since its check fails.
_NEEDING_SAMPLES = {
    f"aten::{kind}{n}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)
}
# Shifts of bools by integers, which torch refuses to predict: the kernels convert the bools first.
_SHIFTS = {"aten::__lshift__", "aten::__rshift__"}
# Operations that return a view although the schema does not say so.
_UNDECLARED_VIEWS = {
    "aten::_unsafe_view",
    "aten::broadcast_tensors",
    "aten::meshgrid",
    "aten::unsafe_chunk",
    "aten::unsafe_split",
    "aten::unsafe_split_with_sizes",
}
# Operations whose kernel depends on whether gradients are enabled. Both kernels differ in rounding.
BY_GRADIENT_MODE = {"mkldnn_rnn_layer"}
# Operations that do not read the old value: after them a value that failed is valid again.
_OVERWRITING = {"aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_"}
_NESTED = (
    "an array can't be a nested tensor; an nn.TransformerEncoder with a mask needs enable_nested_tensor=False"
)
_QUANTIZED = "an array can't be quantized; use array.tensor() outside of `with flow.device`"
_OTHER_MEMORY = "an array can't be given other memory; make a new array"
_DISTRIBUTED = (
    "torch.distributed does not wait for the values of arrays: use flow.send and flow.receive, or "
    "ParallelExecutor(group=); or call it outside of `with flow.device`, with array.tensor()"
)
# Operations that arrays cannot have, and what to do instead.
_REFUSED = {
    "aten::_pin_memory": _OTHER_MEMORY,
    "aten::set_": _OTHER_MEMORY,
    "aten::resize_": _OTHER_MEMORY,
    "aten::resize_as_": _OTHER_MEMORY,
    "aten::_nested_tensor_from_mask": _NESTED,
    "aten::_nested_tensor_from_tensor_list": _NESTED,
    "aten::_nested_view_from_jagged": _NESTED,
    "aten::quantize_per_tensor": _QUANTIZED,
    "aten::quantize_per_tensor_dynamic": _QUANTIZED,
    "aten::quantize_per_channel": _QUANTIZED,
    "aten::_pack_padded_sequence": (
        "an array can't be a packed sequence, whose lengths torch reads at once; give the layer the "
        "padded batch"
    ),
    # Its kernel asks whether its operands need gradients, and its backward then reads what it did not write.
    "aten::_sparse_mm_reduce_impl": (
        "torch.sparse.mm with a reduction takes no arrays; use array.tensor() outside of `with flow.device`"
    ),
}
# torch says that it draws random numbers, but it refuses dropout.
_NOT_RANDOM = {"aten::_scaled_dot_product_flash_attention_for_cpu"}
# Views by a bit that says that values are to be conjugated or negated become copies. Zeros without memory,
# which forward-mode differentiation makes, get memory. torch predicts wrong shapes for embedding bags without
# gradients; those with gradients have the same values.
_INSTEAD = {
    "aten::_conj": "_conj_physical",
    "aten::_neg_view": "neg",
    "aten::_efficientzerotensor": "zeros",
    "aten::_embedding_bag_forward_only": "_embedding_bag",
}
# Operations whose numbers decide the size of the result.
_SIZED_BY_NUMBERS = {"aten::arange", "aten::range"}
_PLAIN_NUMBERS = int, float, complex
_NUMBERS = {"NumberType", "FloatType", "TensorType"}  # a number may stand for a tensor: `x * 0.1`


@dataclass(frozen=True, slots=True)
class OperationTraits:
    """An operation's properties: those of its schema, and those that the schema leaves out.

    Attributes:
        writes: Positions or names of the arguments that it writes.
        same: For each result, the argument that it is, or None.
        aside: It neither takes nor makes tensors.
        composite: It consists of other operations. torch passes it on as a whole in inference mode only.
        check: It returns nothing and writes nothing.
        refused: Why arrays cannot have it, and what to do instead; empty if they can.
        seed_with: The overload that takes a generator, or None.
        loose: Arguments that, if they are numbers, decide shapes and dtypes by their type only.
        takes_dtype: It has an argument `dtype`.
    """

    name: str
    view: bool
    changes_shape: bool
    writes: tuple[int | str, ...]
    same: tuple[int | str | None, ...]
    random: bool
    seed_with: Any
    overwriting: bool
    refused: str
    sparse: bool
    aside: bool
    composite: bool
    check: bool
    loose: frozenset[int | str]
    takes_dtype: bool


@functools.cache
def traits_of(function: Any) -> OperationTraits:
    """Return the traits of an operation of torch, given with its overload."""
    schema = function._schema
    places: list[int | str] = [a.name if a.kwarg_only else n for n, a in enumerate(schema.arguments)]
    aliases = {place: a.alias_info for place, a in zip(places, schema.arguments, strict=True)}
    writes = [place for place, alias in aliases.items() if alias is not None and alias.is_write]
    is_distributed = schema.name.startswith(("c10d::", "_c10d_functional"))
    if is_distributed:  # the schema does not say what it writes, and a program would communicate once only
        writes = places
    # A view of a list's parts, or of one tensor: what is returned shares memory with what was given
    shared = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    changes_shape = torch.Tag.inplace_view in function.tags and schema.name != "aten::detach_"
    random = torch.Tag.nondeterministic_seeded in function.tags and schema.name not in _NOT_RANDOM
    key = "CompositeImplicitAutograd"
    return OperationTraits(
        name=schema.name.removeprefix("aten::"),
        view=(shared and not writes) or schema.name in _UNDECLARED_VIEWS,
        changes_shape=changes_shape,
        writes=(*writes, *WRITES_STATISTICS.get(schema.name, ())),
        same=tuple(_same_argument(r, aliases) for r in schema.returns),
        random=random,
        seed_with=_with_generator(function) if random else None,
        overwriting=schema.name in _OVERWRITING,
        refused=_DISTRIBUTED if is_distributed else _REFUSED.get(schema.name, ""),
        check=not schema.returns and not writes,
        aside="Tensor" not in str(schema),
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key),
        sparse="sparse_coo_tensor" in schema.name,
        loose=_loose(schema, places),
        takes_dtype="dtype" in places,
    )


def _loose(schema: Any, places: Sequence[int | str]) -> frozenset[int | str]:
    """Return the arguments whose value, if it is a number, is not part of a recipe's key.

    Custom operations may compute a size from any number, and a returned number may depend on one.
    """
    returns_tensors = all("Tensor" in str(returned.type) for returned in schema.returns)
    if not schema.name.startswith("aten::") or schema.name in _SIZED_BY_NUMBERS or not returns_tensors:
        return frozenset()
    return frozenset(p for p, a in zip(places, schema.arguments, strict=True) if _takes_number(a.type))


def _takes_number(kind: Any) -> bool:
    """Return whether an argument of this schema type is a number, or a list of scalars."""
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    if kind.kind() == "ListType":  # a list of floats may be scale factors, which decide sizes
        return bool(kind.getElementType().kind() == "NumberType")
    return kind.kind() in _NUMBERS


@functools.cache
def instead_of(function: Any) -> Any:
    """Return the operation that is recorded: a copy if arrays cannot have this view."""
    name = _INSTEAD.get(function._schema.name)
    return function if name is None else getattr(torch.ops.aten, name).default


def _same_argument(returned: Any, aliases: dict[int | str, Any]) -> int | str | None:
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    for place, alias in aliases.items():
        if alias is not None and alias.is_write and alias.before_set == returned.alias_info.before_set:
            return place
    return None


def _with_generator(function: Any) -> Any:
    """Return the overload with the same arguments and a generator."""
    names = {argument.name for argument in function._schema.arguments}
    if "generator" in names:
        return function
    for overload in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, overload)
        if {argument.name for argument in other._schema.arguments} == names | {"generator"}:
            return other
    return None


@dataclass(slots=True)
class Recipe:
    """The results of an operation on inputs of certain shapes.

    Attributes:
        layouts: Of each tensor, in order; None if it is no tensor, or one of the arguments.
        leaves: The results that are no tensors.
        structure: Of the results; None for a single one.
        default: torch's default dtype, if it decided the dtype of a result.
    """

    layouts: list[Layout | None]
    leaves: list[Any]
    structure: Any
    copies: bool | None = field(default=None)  # whether outputs share memory; looked at when it first runs
    default: torch.dtype | None = None


_recipes: dict[Any, Recipe] = {}


def known_recipe(key: tuple[Any, ...]) -> Recipe | None:
    """Return the recipe for this key, if one was made before."""
    return _recipes.get(key)


def make_recipe(
    key: tuple[Any, ...],
    function: Any,
    template: Sequence[Any],
    keywords: dict[str, Any],
    layouts: Sequence[Any],
) -> Recipe:
    """Return and remember the recipe of an operation. Each ArgumentSlot stands for a tensor of a layout.

    Args:
        key: Equal for calls with equal recipes.
        layouts: (size, stride, dtype, device) of each tensor.

    Raises:
        Exception: torch's own, for shapes that do not fit, or those of `private.depends_on_values`.
    """
    recipe = _predict(function, template, keywords, layouts)
    recipe.default = _default_dtype(function, template, keywords, layouts, recipe)
    if len(_recipes) >= MOST:
        _recipes.clear()
    _recipes[key] = recipe
    return recipe


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """The place of the tensor with this number in a template."""

    number: int


def fill(template: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return the arguments, with tensors in their slots."""
    filled = []
    for part in template:
        kind = type(part)
        if kind is ArgumentSlot:
            filled.append(tensors[part.number])
        else:
            filled.append(fill(part, tensors) if kind is list else part)
    return filled


def fill_names(keywords: dict[str, Any], tensors: Sequence[Any]) -> dict[str, Any]:
    """Return the keyword arguments, with tensors in their slots."""
    return dict(zip(keywords, fill(list(keywords.values()), tensors), strict=True)) if keywords else {}


def _predict(
    function: Any, template: Sequence[Any], keywords: dict[str, Any], layouts: Sequence[Any]
) -> Recipe:
    fakes, returned = private.predict(partial(_call_on_fakes, function, template, keywords, layouts))
    for fake, (size, *_) in zip(fakes, layouts, strict=True):
        if fake.size() != size:
            raise UserError(
                f"{function.__name__} would change an array from {tuple(size)} to {tuple(fake.size())} in "
                "place, which arrays can't: give it one of that shape"
            )
    if isinstance(returned, torch.Tensor):
        leaves, structure = [returned], None
    else:
        leaves, structure = private.tree_flatten(returned)
    # torch's prediction may return an input where the schema, and the operation itself, return a new tensor
    returns_inputs = any(place is not None for place in traits_of(function).same)
    given = {id(fake) for fake in fakes} if returns_inputs else ()
    made = [leaf if isinstance(leaf, torch.Tensor) and id(leaf) not in given else None for leaf in leaves]
    if any(leaf is not None and leaf.layout is not torch.strided for leaf in made):
        raise NotImplementedError("a sparse result, whose number of entries depends on values")
    known: Sequence[Any] = _dtypes_of_norms(function, layouts) or [
        leaf if leaf is None else leaf.dtype for leaf in made
    ]
    return Recipe(
        [
            None if leaf is None else (leaf.size(), strides_of(function, layouts, leaf, number), dtype)
            for number, (leaf, dtype) in enumerate(zip(made, known, strict=True))
        ],
        [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        structure,
    )


def _dtypes_of_norms(function: Any, layouts: Sequence[Any]) -> list[torch.dtype] | None:
    """Return the dtypes of a normalization's results where torch predicts wrong ones, else None."""
    if private.schema_name(function) not in _NORMALIZATIONS:
        return None
    (_, _, images, _), *others = layouts
    mixed = images.itemsize < 4 and any(dtype is torch.float32 for _, _, dtype, _ in others)
    return [images, torch.float32, torch.float32] if mixed else None


def _default_dtype(
    function: Any, template: Sequence[Any], keywords: dict[str, Any], layouts: Sequence[Any], recipe: Recipe
) -> torch.dtype | None:
    """Return torch's default dtype if it decided the dtype of a result, else None.

    It may have changed when the operation runs. It decides the dtype of results of integers if inputs of
    that dtype would give the same.
    """
    default = torch.get_default_dtype()
    given = [dtype for _, _, dtype, _ in layouts]
    if keywords.get("dtype") is not None or any(
        dtype.is_floating_point or dtype.is_complex for dtype in given
    ):
        return None
    decided = default, default.to_complex()
    if not any(layout is not None and layout[2] in decided for layout in recipe.layouts):
        return None
    cast = [(size, stride, default, device) for size, stride, _, device in layouts]
    try:
        same = not cast or _predict(function, template, keywords, cast).layouts == recipe.layouts
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return default if same else None


def _call_on_fakes(
    function: Any, template: Sequence[Any], keywords: dict[str, Any], layouts: Sequence[Any]
) -> tuple[list[torch.Tensor], Any]:
    fakes = [
        torch.empty_strided(size, stride, dtype=dtype, device=device)
        for size, stride, dtype, device in layouts
    ]
    name = private.schema_name(function)
    scores = _LIKE_SCORES.get(name)
    if scores == 1:
        return fakes, torch.empty_like(fakes[1], memory_format=torch.contiguous_format)
    if name in _NEEDING_SAMPLES and not fakes[0].size(0):
        one = fakes[0].new_empty(1, *fakes[0].shape[1:])
        return fakes, function(*fill(template, [one, *fakes[1:]]), **fill_names(keywords, fakes))[:0]
    arguments = fill(template, fakes)
    if name in _SHIFTS:
        arguments[0] = arguments[0].to(torch.result_type(*arguments))
    returned = function(*arguments, **fill_names(keywords, fakes))
    if scores == 0 or (name == "aten::pow" and type(arguments[1]) is bool):  # torch predicts int64
        return fakes, returned.to(fakes[0].dtype)
    if name in _LOSSES and fakes[1].dim() <= _LOSSES[name]:
        loss, *others = [returned] if isinstance(returned, torch.Tensor) else returned
        returned = (loss.squeeze(), *others) if others else loss.squeeze()
    return fakes, returned


class Operands:
    """An operation's arguments: its tensors, and a template with an ArgumentSlot for each.

    Attributes:
        key: Calls of one operation with equal keys have results of equal shapes.
        generator: The one among its arguments, which gives a seed. By position it is not in the template.
    """

    def __init__(self, kind: OperationTraits, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        self.tensors: list[Any] = []
        self.key: list[Any] = []
        self.generator: torch.Generator | None = None
        self._loose = kind.loose
        self.template = [self._take(part, place) for place, part in enumerate(args)]
        if kind.random and self.generator is not None:  # the last argument, as in poisson's schema
            self.template.pop()
        self.keywords = {name: self._take(part, name) for name, part in keywords.items()}
        self.key += keywords

    def _take(self, part: Any, place: int | str) -> Any:
        kind = type(part)
        if isinstance(part, torch.Tensor):
            self.tensors.append(part)
            self.key += (part.size(), part.dtype)
            if part.layout is torch.strided:
                self.key.append(part.stride())
            return ArgumentSlot(len(self.tensors) - 1)
        if kind is list or kind is tuple:
            self.key.append(len(part))
            return [self._take(each, place) for each in part]
        if kind is torch.Generator:
            self.generator = part  # it gives a seed, and has no part in shapes
            return part
        self.key.append(kind if kind in _PLAIN_NUMBERS and place in self._loose else (kind, part))
        return part

    def at(self, place: int | str) -> list[Any]:
        """Return the tensors of one argument."""
        if isinstance(place, str):
            part = self.keywords.get(place)
        else:
            part = self.template[place] if place < len(self.template) else None
        parts = part if type(part) is list else [part]
        return [self.tensors[each.number] for each in parts if type(each) is ArgumentSlot]

    def written(self, kind: OperationTraits) -> list[Any]:
        """Return the tensors that the operation writes."""
        if kind.name in _TRAINING and self.template[_TRAINING[kind.name]] is False:
            return []
        return [tensor for place in kind.writes for tensor in self.at(place)]

    def run(self, function: Any) -> Any:
        """Call a function with these arguments."""
        return function(*fill(self.template, self.tensors), **fill_names(self.keywords, self.tensors))

    def are_for_meta(self) -> bool:
        """Return whether the results lie on torch's meta device."""
        device = self.keywords.get("device")
        return device is not None and device.type == "meta"

    def is_meta(self) -> bool:
        """Return whether the operation is about shapes only, which torch computes on its meta device."""
        return self.are_for_meta() or any(tensor.is_meta for tensor in self.tensors)

    def run_on_meta(self, function: Any) -> Any:
        """Call a function with tensors without values, as torch does for the meta device."""
        with private.without_modes():
            layouts = [(t.size(), t.stride(), t.dtype) for t in self.tensors]
            self.tensors = [torch.empty_strided(*lay[:2], dtype=lay[2], device="meta") for lay in layouts]
            return self.run(function)
