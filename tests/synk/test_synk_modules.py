"""Modules that ranks share behave as torch's own: their weights, gradients, buffers, hooks and dtypes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from synk_teams import team

import lockstep.synk as synk


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with team(request.param) as size:
        yield size


def make_net(*more: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), *more).to(torch.float64)


def flat(net: torch.nn.Module) -> np.ndarray:
    return np.concatenate([param.detach().numpy().ravel() for param in net.parameters()])


def test_a_value_of_another_length_changes_no_weight(ranks: int) -> None:
    net = synk.share(make_net())
    synk.function(net, "gather")
    synk.distribute()
    weights, before = synk.weights(net), flat(net)
    for write in (
        lambda: synk.broadcast(weights, np.full(5, 9.0)),
        lambda: synk.set_value(ranks - 1, weights, np.full(16, 9.0)),
        lambda: synk.scatter(weights, np.full(14, 9.0)),
    ):
        with pytest.raises(ValueError, match=r"weights of Sequential have 15 elements in all, .* has \d+"):
            write()
    assert flat(net).tobytes() == before.tobytes()
    synk.all_reduce(weights)
    assert all(value.tobytes() == before.tobytes() for value in synk.gather(weights))
