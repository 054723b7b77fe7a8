"""Factors of gradients: each row of the product is computed once, by the trainer that updates it."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import FullLayers
from training_runs import FACTORS

from lockstep.comm.group import Group, World
from lockstep.errors import UserError
from lockstep.exchange.host import HostTransport
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.network.factors import FactoredLayer, Factors
from lockstep.network.gradients import Gradients
from lockstep.network.step_graph import why_not_captured

SIZES = {"first": (100, 512), "wide": (201, 100), "odd": (99, 201)}


def make_factors(world: World, n_rows: int, dtype: torch.dtype = torch.float64) -> Factors:
    layers = [FactoredLayer(f"{name}.weight", *size, n_rows, dtype) for name, size in SIZES.items()]
    arena = Arena(FullLayers(7).double(), HostMemory(), leading=[layer.name for layer in layers])
    assert [arena.span_of(layer.name)[0] for layer in layers] == sorted(
        arena.span_of(layer.name)[0] for layer in layers
    )
    assert arena.n_leading <= min(arena.span_of(name)[0] for name in ("conv.weight", "first.bias"))
    return Factors(layers, arena, world)


def plan(factors: Factors, world: World, chunk: int, keep: bool) -> list[tuple[int, int]]:
    """chunk: elements that a transport of `world` likes to have at a time."""
    pipes = {rank: SimpleNamespace() for rank in range(world.size) if rank != world.rank}
    transport = HostTransport([np.zeros(16)] * world.size, Group(world, cast(Any, pipes)))
    transport.chunk = chunk
    return factors.plan(transport, keep)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(50, 60_000), st.booleans(), st.integers(0, 99))
@settings(deadline=None, max_examples=5)
def test_all_trainers_together_make_the_mean_of_all_products(
    size: int, n_rows: int, chunk: int, keep: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    table, made = None, torch.empty(0)
    for world in World.on_one_host(size):
        factors = make_factors(world, n_rows)
        table = torch.randn_like(factors.table) if table is None else table
        factors.table.copy_(table)
        made = made if len(made) else torch.full((factors.spans[-1][1],), torch.nan, dtype=torch.float64)
        pieces = plan(factors, world, chunk, keep)
        factors.collect()
        for piece in pieces:
            factors.make(piece)
            if not keep:
                made[slice(*piece)] = factors.gradient_of(piece)
        for piece in pieces if keep else ():
            assert made[slice(*piece)].isnan().all()  # it was not made before
            made[slice(*piece)] = factors.gradient_of(piece)
    for number, span in enumerate(factors.spans):
        of_ranks = [views[number] for views in factors._of_ranks]
        expected = sum(errors.t() @ inputs for errors, inputs in of_ranks) / size
        assert torch.allclose(made[slice(*span)].view_as(expected), expected, rtol=0, atol=1e-12)


def test_rows_that_no_picture_has_filled_are_zero_and_too_many_are_refused() -> None:
    factors = make_factors(World.on_one_host(2)[1], 4)
    factors.table.fill_(5)
    factors.add("odd.weight", torch.ones(3, 99), torch.full((3, 201), 2.0))
    factors.complete()
    (errors, inputs), others = factors._of_ranks[1][2], factors._of_ranks[0][2]
    assert errors[:3].eq(1).all() and inputs[:3].eq(2).all()
    assert errors[3:].eq(0).all() and inputs[3:].eq(0).all() and factors._of_ranks[1][0][0].eq(0).all()
    assert all(view.eq(5).all() for view in others)
    with pytest.raises(UserError, match=r"factors: odd.weight has had 5 rows in a step, and 4 at most"):
        factors.add("odd.weight", torch.ones(2, 99), torch.ones(2, 201))


def test_a_weight_that_something_else_uses_too_is_refused() -> None:
    world = World.on_one_host(1)[0]
    model = FullLayers(7).double()
    layer = FactoredLayer("odd.weight", 99, 201, 4, torch.float64)
    arena = Arena(model, HostMemory(), leading=["odd.weight"])
    factors = Factors([layer], arena, world)
    gradients = Gradients(model, arena, factors)
    gradients.is_open = True
    made = model.odd(torch.ones(4, 201, dtype=torch.float64)).sum()
    made.backward()
    errors, inputs = factors._of_ranks[0][0]
    assert errors.eq(1).all() and inputs.eq(1).all() and model.odd.weight.grad is None
    assert gradients.of(arena.span_of("odd.bias")).eq(4).all()
    with pytest.raises(UserError, match=r"factors: odd.weight is used by more than its own layer"):
        model.odd.weight.square().sum().backward()


def test_a_step_with_factors_is_not_captured_unasked() -> None:
    config = make_config(**{**FACTORS, "model": "alexnet"})
    assert why_not_captured(config, on_gpu=True) == "factors: true"
    assert not why_not_captured(make_config(model="alexnet"), on_gpu=True)
