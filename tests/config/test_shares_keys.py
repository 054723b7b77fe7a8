"""Ranges of logical ranks: they cover all of them, fit their slots, and follow measured times."""

from itertools import pairwise

import pytest
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.rules import settle
from lockstep.config.shares import balance, bounds_of, most_of, share_of, slowest
from lockstep.errors import UserError


@given(st.integers(1, 40), st.data())
def test_equal_shares_cover_all_logical_ranks_and_differ_by_one(n_logical: int, data: st.DataObject) -> None:
    n_trainers = data.draw(st.integers(1, n_logical))
    config = make_config(logical_ranks=n_logical, global_batch_size=80, devices=["cpu"] * n_trainers)
    bounds = bounds_of(config)
    sizes = [last - first for first, last in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == n_logical and len(sizes) == n_trainers
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 200), st.data())
def test_a_slot_has_room_for_every_share(
    size: int, n_logical: int, n_images: int, data: st.DataObject
) -> None:
    n_trainers = data.draw(st.integers(1, min(n_logical, size)))
    keys = {"logical_ranks": n_logical, "global_batch_size": size, "devices": ["cpu"] * n_trainers}
    config, _ = settle(make_config(**keys, shares=data.draw(st.sampled_from(["equal", "auto"]))))
    times = data.draw(st.lists(st.floats(0.1, 9), min_size=n_trainers, max_size=n_trainers))
    found = [bounds_of(config)]
    if config.shares == "auto":
        found.append(balance(times, n_logical, most_of(config)))
    for bounds in found:
        places = [share_of(0, min(size, n_images), leaves, n_logical) for leaves in pairwise(bounds)]
        assert places[0][0] == 0 and places[-1][1] == min(size, n_images)
        assert all(one[1] == other[0] for one, other in pairwise(places))
        assert all(last - first <= config.batch_size for first, last in places)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 12))
def test_balanced_shares_are_no_slower_than_any_other(seconds: list[float], more: int) -> None:
    n_logical, n_trainers = len(seconds) + more, len(seconds)
    most = n_logical - n_trainers + 1
    best = balance(seconds, n_logical, most)
    assert best[0] == 0 and best[-1] == n_logical and all(last > first for first, last in pairwise(best))
    for one in range(n_trainers):
        for other in range(n_trainers):
            sizes = [last - first for first, last in pairwise(best)]
            if one != other and sizes[one] > 1:  # the best of a convex problem: no move of one helps
                sizes[one], sizes[other] = sizes[one] - 1, sizes[other] + 1
                moved = (0, *(sum(sizes[: rank + 1]) for rank in range(n_trainers)))
                assert slowest(seconds, moved) >= slowest(seconds, best) * (1 - 1e-9)


def test_a_trainer_of_a_third_of_the_speed_gets_a_quarter() -> None:
    assert balance([1.0, 3.0], 8, 8) == (0, 6, 8)
    assert balance([1.0, 3.0], 8, 5) == (0, 5, 8)  # as many as slots have room for


def test_more_trainers_than_logical_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="raise logical_ranks, or use 2 devices at most"):
        settle(make_config(logical_ranks=2, global_batch_size=8, devices=["cpu"] * 3))
