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


def test_a_view_of_a_shared_tensor_is_not_shared_again(ranks: int) -> None:
    """It would be moved out of the tensor's memory, and writes to one would not be seen in the other."""
    tensor, net = synk.share(torch.zeros(4)), synk.share(make_net())
    bias = net[0].bias.data
    for view, name in ((tensor[:2], "tensor"), (tensor[3], "tensor"), (bias[1:], "weights of Sequential")):
        with pytest.raises(ValueError, match=f"a tensor is a view of '{name}"):
            synk.share(view)
    module = make_net()
    module[0].bias.data = bias
    with pytest.raises(ValueError, match=r"Sequential has a tensor of shape .* in common with 'weights of"):
        synk.share(module)
    view = tensor[:2]
    view += 1
    assert tensor.tolist() == [1, 1, 0, 0]


def test_a_view_of_a_shared_tensor_that_left_its_slot_is_refused(ranks: int) -> None:
    tensor = synk.share(torch.zeros(4))

    def double() -> None:
        tensor.data = tensor * 2

    f = synk.function(double, None, updates=[tensor])
    synk.distribute()
    f()
    view = tensor.data[1:]
    with pytest.raises(ValueError, match="a tensor is a view of 'tensor"):
        synk.share(view)
    synk.function(lambda: view.sum() * 1, "sum", name="f")
    with pytest.raises(TypeError, match="a tensor is a view of 'tensor"):
        synk.distribute()


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


def test_the_gradient_of_a_shared_tensor_goes_to_the_ranks(ranks: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    (tensor * torch.tensor([3.0, 4.0])).sum().backward()
    synk.share(tensor)
    f = synk.function(lambda x: tensor.grad.expand(len(x), 2), "gather")
    synk.distribute()
    assert f(np.ones(ranks)).tolist() == [[3.0, 4.0]] * ranks


def test_tensors_can_be_shared_whatever_the_default_device_is(ranks: int) -> None:
    with torch.device("meta"):
        tensor = synk.share(torch.ones(2, device="cpu"))
    f = synk.function(lambda x: tensor.expand(len(x), 2), "gather")
    synk.distribute()
    assert f(np.ones(ranks)).tolist() == [[1.0, 1.0]] * ranks


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


def test_a_gradient_that_is_a_transposed_view_is_in_the_vector_as_it_is(ranks: int) -> None:
    net = synk.share(torch.nn.Linear(2, 2, bias=False))

    def transpose() -> None:
        net.weight.grad = net.weight.grad.T

    f = synk.function(transpose, None, updates=[synk.grads(net)])
    synk.distribute()
    synk.broadcast(synk.grads(net), np.arange(4, dtype="f4"))
    f()
    assert synk.gather(synk.grads(net)).tolist() == [[0, 2, 1, 3]] * ranks
    assert net.weight.grad.tolist() == [[0, 2], [1, 3]]


def test_sparse_gradients_and_parameters_in_one_memory_are_refused(ranks: int) -> None:
    net = synk.share(torch.nn.Embedding(4, 2, sparse=True))
    f = synk.function(lambda x: net(x).sum().backward(), None, updates=[synk.grads(net)])
    total = synk.function(lambda x: x.sum(), "sum")
    synk.distribute()
    f(np.ones(ranks, "i8"))
    assert total(np.ones(4 * ranks), num_slices=2) == 4 * ranks
    with pytest.raises(TypeError, match=r"shape \(4, 2\) is sparse, and .* sparse=False"):
        synk.all_reduce(synk.grads(net))
    net.weight.grad = None
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight.data = tied[0].weight.data
    with pytest.raises(ValueError, match="tensors of Sequential lie in the same memory"):
        synk.share(tied)
    tied[1].weight.data = torch.ones(2, 2)
    tied.register_buffer("row", tied[0].weight.data[1])
    with pytest.raises(ValueError, match="tensors of Sequential lie in the same memory"):
        synk.share(tied)
    tied.row = torch.zeros(2, 4)[:, 2:]
    tied.register_buffer("left", tied.row._base[:, :2])
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


def flat(module: torch.nn.Module) -> np.ndarray:
    return np.concatenate([param.detach().numpy().ravel() for param in module.parameters()])


def test_parameters_that_exchange_their_memory_keep_their_values(ranks: int) -> None:
    net, other = synk.share(make_net(torch.nn.Linear(3, 4))), synk.share(make_net(torch.nn.Linear(3, 4)))
    first, second = net[0].bias, other[0].bias
    with torch.no_grad():
        second.add_(1)
        for param in other.parameters():
            param.mul_(2)

    def exchange() -> None:
        for mine, others in zip(net.parameters(), other.parameters(), strict=True):
            mine.data, others.data = others.data, mine.data

    f = synk.function(exchange, None, updates=[synk.weights(net), synk.weights(other)])
    synk.distribute()
    values = flat(net), flat(other)
    for here in (True, False):
        exchange() if here else f()
        values = values[1], values[0]
        for module, expected in zip((net, other), values, strict=True):
            if here:
                synk.broadcast(synk.weights(module))
            assert [value.tobytes() for value in synk.gather(synk.weights(module))] == [
                expected.tobytes()
            ] * ranks
            assert np.array_equal(flat(module), expected)
    assert first is net[0].bias and second is other[0].bias


def test_parameters_of_one_module_that_exchange_their_memory_keep_their_values(ranks: int) -> None:
    net = make_net(torch.nn.Linear(4, 3, dtype=torch.float64))
    synk.share(net)
    synk.function(net, "gather")
    synk.distribute()
    one, two = net[0].weight, net[1].weight
    values = two.detach().clone(), one.detach().clone()
    one.data, two.data = two.data, one.data
    synk.broadcast(synk.weights(net))
    assert torch.equal(one, values[0]) and torch.equal(two, values[1])


def test_a_parameter_in_another_order_or_shape(ranks: int) -> None:
    net = synk.share(torch.nn.Linear(3, 3, bias=False))
    f = synk.function(lambda: net.weight.detach().clone()[None], "gather")
    synk.distribute()
    expected = net.weight.detach().clone().t()
    net.weight.data = net.weight.data.t()
    synk.broadcast(synk.weights(net))
    assert np.array_equal(f(), np.stack([expected] * ranks))
    assert torch.equal(net.weight, expected)
    net.weight.data = net.weight.data.reshape(9, 1).clone()
    with pytest.raises(ValueError, match=r"a tensor of shape \(9, 1\) had shape \(3, 3\) at share\(\)"):
        synk.broadcast(synk.weights(net))
    net.weight.data = expected.clone()
    synk.broadcast(synk.weights(net))


def test_tensors_that_exchange_their_memory_keep_their_values(ranks: int) -> None:
    old, new = synk.share(torch.zeros(3)), synk.share(torch.ones(3))

    def shift() -> None:
        old.data, new.data = new.data, old.data + 5

    f = synk.function(shift, None, updates=[old, new])
    synk.distribute()
    f()
    synk.all_reduce(new)
    assert synk.gather(old).tolist() == [[1] * 3] * ranks
    assert synk.gather(new).tolist() == [[5] * 3] * ranks


def test_a_tensor_that_is_a_view_of_an_input_keeps_its_value(ranks: int) -> None:
    kept = synk.share(torch.zeros(0, dtype=torch.float64))

    def keep(x: torch.Tensor) -> None:
        kept.data = x

    f, g = synk.function(keep, None, updates=[kept]), synk.function(lambda: kept, "gather")
    synk.distribute()
    data = synk.data(np.arange(4.0))
    f(data)
    data[:] = 9
    assert g().tolist() == [0, 1, 2, 3]
    with torch.inference_mode():
        f(data)
    assert g().tolist() == [9] * 4


def test_a_tensor_may_grow_before_it_is_distributed(ranks: int) -> None:
    tensor = synk.share(torch.zeros(0, 3))
    tensor.data = torch.ones(100, 3)
    f = synk.function(lambda: tensor.sum() * 1, "max")
    synk.distribute()
    assert f() == 300
    synk.all_reduce(tensor, "sum")
    assert f() == 300 * ranks


def test_the_variable_of_a_buffer_is_named(ranks: int) -> None:
    net = synk.share(torch.nn.BatchNorm1d(4).double())
    synk.function(net, "gather")
    synk.distribute()
    with pytest.raises(TypeError, match="to which it belongs, 'float64 buffers of BatchNorm1d'"):
        synk.broadcast(net.running_mean)


def test_two_modules_of_one_class_have_their_own_buffers(ranks: int) -> None:
    """Their names are equal, so that a name is not enough."""
    nets = [synk.share(torch.nn.BatchNorm1d(2)) for _ in range(2)]
    for net in nets:
        synk.function(net, "gather")
    synk.distribute()
    with pytest.raises(ValueError, match="2 variables are called 'float32 buffers of BatchNorm1d'"):
        synk.gather("float32 buffers of BatchNorm1d")
    for number, net in enumerate(nets, 1):
        net.load_state_dict({**net.state_dict(), "running_mean": torch.full((2,), 10.0 * number)})
        synk.broadcast([synk.weights(net), *synk.buffers(net)])
    for number, net in enumerate(nets, 1):
        floats, counts = synk.gather(synk.buffers(net))
        assert floats.tolist() == [[10 * number] * 2 + [1] * 2] * ranks and counts.tolist() == [[0]] * ranks
    assert synk.buffers(synk.share(make_net())) == []


def test_by_rows_needs_a_function_that_updates_the_variable(ranks: int) -> None:
    net = synk.share(make_net())

    def backward(x: torch.Tensor) -> None:
        net(x).mean().backward()

    f = synk.function(backward, None)
    synk.distribute()
    f(np.ones((3, 4)))
    synk.all_reduce(synk.grads(net))
    with pytest.raises(ValueError, match=r"no function has 'gradients of Sequential' in its updates"):
        synk.all_reduce(synk.grads(net), by_rows=True)


def test_a_parameter_that_a_callable_cuts_in_its_memory_is_refused_by_collectives(ranks: int) -> None:
    """A collective would otherwise give the parameter its former shape again."""
    net = synk.share(make_net())

    def cut() -> None:
        for parameter in net.parameters():
            parameter.data = parameter.data[:2]

    f = synk.function(cut, None, updates=[synk.weights(net)])
    synk.distribute()
    f()
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 4\) had shape \(3, 4\) at share"):
        synk.broadcast(synk.weights(net))


@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_tensor_that_a_callable_conjugates_lazily_has_the_conjugate_value(
    ranks: int, num_slices: int
) -> None:
    tensor = synk.share(torch.tensor([1 + 2j]))
    net = synk.share(torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([3 + 4j]))]))
    net[0].grad = torch.tensor([5 + 6j])

    def conjugate(x: torch.Tensor) -> None:
        tensor.data, net[0].data = tensor.data.conj(), net[0].data.conj()
        net[0].grad = net[0].grad.conj()

    shareds = [tensor, synk.weights(net), synk.grads(net)]
    f = synk.function(conjugate, None, updates=shareds)
    synk.distribute()
    synk.broadcast(shareds)  # gradients lie in the vector now
    f(np.ones(2 * ranks), num_slices=num_slices)
    values = [each.tolist() for each in synk.gather(shareds)]
    assert values == [[[value]] * ranks for value in (1 - 2j, 3 - 4j, 5 - 6j)]
    assert (net[0].item(), net[0].grad.item()) == (3 - 4j, 5 - 6j)


def test_views_of_one_tensor_remain_views_on_all_ranks(ranks: int) -> None:
    whole = torch.zeros(4)
    views = list(whole.split(2))

    def count() -> torch.Tensor:
        whole.add_(1)
        return torch.cat(views)

    f = synk.function(count, "gather")
    synk.distribute()
    for times in (1, 2):
        assert f().tolist() == [times] * 4 * ranks


def test_a_view_of_a_shared_tensor_is_refused(ranks: int) -> None:
    net = synk.share(make_net())
    for view in (net[0].weight.data, net[0].weight.detach()[0]):
        synk.function(lambda view=view: view.sum() * 1, "sum", name="f")
        with pytest.raises(TypeError, match="a tensor is a view of 'weights of Sequential', of which"):
            synk.distribute()
    if net[0].weight.is_cpu:
        array = net[0].weight.detach().numpy()[1:]
        synk.function(lambda: float(array.sum()), "sum", name="f")
        with pytest.raises(TypeError, match="an array is a view of 'weights of Sequential', of which"):
            synk.distribute()
    copy_of_it = net[0].weight.detach().clone()
    f = synk.function(lambda: copy_of_it.sum() * 1, "max")
    synk.distribute()
    assert f() == copy_of_it.sum().item()


def test_a_function_that_was_distributed_before_its_module_was_shared_is_an_error(ranks: int) -> None:
    net, other = make_net(), torch.ones(3, dtype=torch.float64)
    predict = synk.function(lambda x: net(x).sum(1), "gather")
    scaled = synk.function(lambda x: x * other, "gather")
    synk.distribute()
    rows = np.ones((4, 4))
    np.testing.assert_allclose(predict(rows), net(torch.tensor(rows)).sum(1).detach())
    synk.share(net)
    with pytest.raises(RuntimeError, match="'weights of Sequential' was shared after this function"):
        predict(rows)
    np.testing.assert_array_equal(scaled(np.ones((4, 3))), np.ones((4, 3)))  # it does not use the module
    predict = synk.function(net, "gather")
    synk.distribute()
    synk.broadcast(synk.weights(net), values=np.ones(15))
    np.testing.assert_array_equal(predict(rows), np.full((4, 3), 5.0))
