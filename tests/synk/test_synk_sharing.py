"""The tensors of modules that ranks share: replaced buffers, attributes, and unusual gradients."""

import copy
from collections.abc import Iterator
from typing import Any

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


class TwoNames(torch.nn.Module):
    """A network that has one tensor as two buffers, until `forward` replaces them."""

    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(2, 2)
        total = torch.zeros(2)
        self.register_buffer("total", total)
        self.register_buffer("squares", total)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total, self.squares = self.total + x.sum(0), self.squares + (x * x).sum(0)
        return torch.stack([self.total, self.squares])


def test_two_names_of_one_buffer_that_forward_separates(ranks: int) -> None:
    net = synk.share(TwoNames())
    f = synk.function(net, "gather")
    synk.distribute()
    for times in (1, 2):
        rows = f(np.full((ranks, 2), 3, "f4")).reshape(ranks, 2, 2)
        assert rows.tolist() == [[[3 * times] * 2, [9 * times] * 2]] * ranks
    with pytest.raises(ValueError, match=r"total and squares were one tensor at share.*a tensor for each"):
        synk.gather("float32 buffers of TwoNames")


@pytest.mark.parametrize("both", [False, True])
def test_a_buffer_of_two_modules_that_one_of_them_replaces_is_replaced_in_that_one_only(
    ranks: int, both: bool
) -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.mask
            self.mask = self.mask + 1
            return x * before

    net = torch.nn.Sequential(Masked(), Masked(), torch.nn.Linear(2, 2))
    net[0].register_buffer("mask", torch.ones(2))
    net[1].register_buffer("mask", net[0].mask)
    plain = copy.deepcopy(net)
    synk.share(net)
    f = synk.function(net if both else net[0], "gather")
    synk.distribute()
    x = torch.ones(2 * ranks, 2)
    for _ in range(3):
        expected = (plain if both else plain[0])(x).detach().numpy()
        assert np.allclose(f(x), expected)
        assert np.array_equal(net[1].mask, plain[1].mask)


def test_a_buffer_that_is_a_view_of_an_input_keeps_its_value_until_the_next_call(ranks: int) -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(2, 2)
            self.register_buffer("last", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.last = self.last, x[-1]
            return before[None].clone()

    net = synk.share(Last())
    f = synk.function(net, "gather")
    synk.distribute()
    first = np.arange(4 * ranks, dtype="f4").reshape(-1, 2)
    f(first)
    assert np.array_equal(f(-first), first[1::2])
    data = synk.data(first)
    f(data)
    data[:] = 7
    assert np.array_equal(f(data), first[1::2])


def test_attributes_of_parameters_go_to_the_ranks(ranks: int) -> None:
    net = make_net(torch.nn.Linear(3, 2, dtype=torch.float64))
    for param in net.parameters():
        param.decays, param.twin = param.dim() > 1, net[1].bias
    synk.share(net)

    def attributes(x: torch.Tensor) -> torch.Tensor:
        assert all(param.twin is net[1].bias for param in net.parameters())
        return torch.tensor([[param.decays for param in net.parameters()]])

    f = synk.function(attributes, "gather")
    synk.distribute()
    assert f(np.ones(ranks)).tolist() == [[True, False, True, False]] * ranks


def test_a_module_may_have_param_groups(ranks: int) -> None:
    class Grouped(torch.nn.Linear):
        def param_groups(self) -> list[dict[str, Any]]:
            return [{"params": self.parameters()}]

    net = synk.share(Grouped(2, 2))
    f = synk.function(lambda x: torch.tensor([net.training]) & (net(x) != 9).any(), "gather")
    synk.distribute()
    net.eval()
    assert not f(np.ones((2 * ranks, 2), "f4")).any()


def test_gradients_that_have_a_graph_are_reduced(ranks: int) -> None:
    net = synk.share(make_net())

    def compute(x: torch.Tensor) -> None:
        net.zero_grad()
        net(x).square().sum().backward(create_graph=True)

    f = synk.function(compute, None, updates=[synk.grads(net)])
    synk.distribute()
    x = np.arange(8.0 * ranks).reshape(-1, 4)
    for _ in range(2):
        f(x)
        synk.all_reduce(synk.grads(net), op="sum")
    plain = make_net()
    plain(torch.from_numpy(x)).square().sum().backward()
    expected = np.concatenate([param.grad.numpy().ravel() for param in plain.parameters()])
    assert np.allclose(np.concatenate([p.grad.numpy().ravel() for p in net.parameters()]), expected)
    for param in net.parameters():
        param.grad = None


def test_sparse_gradients_and_parameters_in_one_memory_are_refused(ranks: int) -> None:
    net = synk.share(torch.nn.Embedding(4, 2, sparse=True))
    f = synk.function(lambda x: net(x).sum().backward(), None, updates=[synk.grads(net)])
    synk.distribute()
    with pytest.raises(TypeError, match=r"shape \(4, 2\) is sparse, and .* sparse=False"):
        f(np.ones(ranks, "i8"))
        synk.all_reduce(synk.grads(net))
    net.weight.grad = None
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(ValueError, match="tensors of Sequential lie in the same memory"):
        synk.share(tied)
    tied[1].weight = tied[0].weight
    synk.share(tied)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16, a dtype that NumPy lacks"),
        (torch.ones(2, dtype=torch.complex64).conj(), "is a conjugate view: give"),
        (torch.ones(2).to_sparse(), "is torch.sparse_coo: give dense tensors"),
    ],
)
def test_a_module_that_is_refused_can_be_shared_once_it_is_mended(
    ranks: int, bad: torch.Tensor, message: str
) -> None:
    net = make_net()
    net.register_buffer("scale", bad)
    with pytest.raises(TypeError, match=message):
        synk.share(net)
    net.scale = torch.ones(2)
    synk.share(net)
    f = synk.function(lambda x: net(x).detach(), "gather", updates=[synk.weights(net)])
    synk.distribute()
    x = np.ones((2 * ranks, 4))
    assert np.array_equal(f(x), net(torch.from_numpy(x)).detach().numpy())


def test_a_variable_that_no_function_has_brought_to_the_ranks_is_named(ranks: int) -> None:
    alone = synk.share(torch.ones(3))
    synk.distribute()
    with pytest.raises(RuntimeError, match=r"not on the ranks yet: .* along with new functions"):
        synk.broadcast(alone)
