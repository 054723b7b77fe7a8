"""What is known of torch's operations before they run:

what they write, what shapes come out, what is random.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import UserError
from lockstep.flow import private

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]  # size, stride, dtype of a whole storage
MOST = 20_000  # recipes that are kept

# Written, though the schema does not say so: the running statistics, by the position of the argument.
_UNDECLARED = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}
# What gives a view, though the schema does not say so.
_UNDECLARED_VIEWS = {"aten::_unsafe_view"}
# What does not depend on what was there: a value that failed is whole again after these.
_OVERWRITING = {"aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_"}
# They change which memory a tensor is, which arrays can't.
_REFUSED = {"aten::set_", "aten::resize_", "aten::resize_as_"}
# Views only by a bit that says that the values are to be conjugated or negated: copies here.
_COPIES = {"aten::_conj": "_conj_physical", "aten::_neg_view": "neg"}
_NUMBERS = {"NumberType", "FloatType"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operation's schema says, and what is known beside it.

    writes: positions, or names, of the arguments that are written. same: for each return, the argument that
    it is, or None. aside: neither takes nor makes tensors. check: it makes nothing. seed_with: what to call
    with a generator, or None where none can be given. loose: arguments on whose type alone, not value, shapes
    depend.
    """

    name: str
    view: bool
    changes_shape: bool
    writes: tuple[int | str, ...]
    same: tuple[int | str | None, ...]
    random: bool
    seed_with: Any
    overwriting: bool
    refused: bool
    sparse: bool
    aside: bool
    check: bool
    loose: frozenset[int | str]


@functools.cache
def kind_of(function: Any) -> Kind:
    """function: an operation of torch with its overload."""
    schema = function._schema
    places: list[int | str] = [a.name if a.kwarg_only else n for n, a in enumerate(schema.arguments)]
    aliases = {place: a.alias_info for place, a in zip(places, schema.arguments, strict=True)}
    writes = [place for place, alias in aliases.items() if alias is not None and alias.is_write]
    # A view of a list's parts, or of one tensor: what is returned shares memory with what was given
    shared = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    changes_shape = torch.Tag.inplace_view in function.tags and schema.name != "aten::detach_"
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    loose = {p for p, a in zip(places, schema.arguments, strict=True) if a.type.kind() in _NUMBERS}
    random = torch.Tag.nondeterministic_seeded in function.tags
    return Kind(
        name=schema.name.removeprefix("aten::"),
        view=(shared and not writes) or schema.name in _UNDECLARED_VIEWS,
        changes_shape=changes_shape,
        writes=(*writes, *_UNDECLARED.get(schema.name, ())),
        same=tuple(_same_argument(r, aliases) for r in schema.returns),
        random=random,
        seed_with=_with_generator(function) if random else None,
        overwriting=schema.name in _OVERWRITING,
        refused=schema.name in _REFUSED,
        check=not schema.returns and not writes,
        aside="Tensor" not in str(schema),
        sparse="sparse_coo_tensor" in schema.name,
        loose=frozenset(loose) if tensors else frozenset(),
    )


@functools.cache
def instead_of(function: Any) -> Any:
    """The operation that is recorded: a copy where a view can't be had."""
    name = _COPIES.get(function._schema.name)
    return function if name is None else getattr(torch.ops.aten, name).default


def _same_argument(returned: Any, aliases: dict[int | str, Any]) -> int | str | None:
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    for place, alias in aliases.items():
        if alias is not None and alias.is_write and alias.before_set == returned.alias_info.before_set:
            return place
    return None


def _with_generator(function: Any) -> Any:
    """The overload that takes the same and a generator."""
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
    """What comes out of an operation on inputs of certain shapes.

    layouts: of each tensor, in order; None where there is none, or where it is one of the arguments. leaves:
    what else is returned at these places. structure: of what is returned; None for a single one.
    """

    layouts: list[Layout | None]
    leaves: list[Any]
    structure: Any
    copies: bool | None = field(default=None)  # whether outputs share memory; looked at when it first runs


_recipes: dict[Any, Recipe] = {}


def known_recipe(key: tuple[Any, ...]) -> Recipe | None:
    """One that was made before. key: equal for calls with equal recipes."""
    return _recipes.get(key)


def make_recipe(
    key: tuple[Any, ...],
    function: Any,
    template: Sequence[Any],
    keywords: dict[str, Any],
    layouts: Sequence[Any],
) -> Recipe:
    """What the operation makes of arguments in which each Slot stands for a tensor of a layout.

    layouts: (size, stride, dtype, device) of each. Raises what torch raises where shapes do not fit,
    and what private.depends_on_values knows.
    """
    recipe = _predict(function, template, keywords, layouts)
    if len(_recipes) >= MOST:
        _recipes.clear()
    _recipes[key] = recipe
    return recipe


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a template for the tensor with this number."""

    number: int


def fill(template: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """The arguments, with tensors at their places."""
    filled = []
    for part in template:
        kind = type(part)
        if kind is Slot:
            filled.append(tensors[part.number])
        else:
            filled.append(fill(part, tensors) if kind is list else part)
    return filled


def fill_names(keywords: dict[str, Any], tensors: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(keywords, fill(list(keywords.values()), tensors), strict=True)) if keywords else {}


def _predict(
    function: Any, template: Sequence[Any], keywords: dict[str, Any], layouts: Sequence[Any]
) -> Recipe:
    with private.predicting():
        fakes = [
            torch.empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in layouts
        ]
        returned = function(*fill(template, fakes), **fill_names(keywords, fakes))
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
    given = {id(fake) for fake in fakes}
    made = [leaf if isinstance(leaf, torch.Tensor) and id(leaf) not in given else None for leaf in leaves]
    return Recipe(
        [None if leaf is None else (leaf.size(), leaf.stride(), leaf.dtype) for leaf in made],
        [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        structure,
    )
