"""Arrays give torch's bits and strides on any device, and the tables about its operations are right."""

import copy
import ctypes
import io
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import private, recipes
from lockstep.flow.devices import Cpu


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Cpu]]:
    """Return devices of one thread each. Sums depend on the threads, so torch has one here, too."""
    made, threads = flow.cpus(3, threads=1), torch.get_num_threads()
    torch.set_num_threads(1)
    with flow.Engine(made):
        yield made
    torch.set_num_threads(threads)


def assert_same(array: Any, tensor: Any) -> None:
    """Compare bits, shape, dtype and strides."""
    assert isinstance(array, flow.Array), type(array)
    assert array.shape == tensor.shape and array.dtype is tensor.dtype
    if tensor.numel() > 1:
        for size, *steps in zip(tensor.shape, array.stride(), tensor.stride(), strict=True):
            assert size == 1 or steps[0] == steps[1]  # the step of a single element is of no use
    torch.testing.assert_close(array.tensor(), tensor.detach(), rtol=0, atol=0, equal_nan=True)


# Operations of random programs: each takes the tensors so far and two numbers, and returns a new one or None.
Step = Callable[[torch.Tensor, torch.Tensor, int], Any]
STEPS: list[Step] = [
    lambda a, b, n: a + b if a.shape == b.shape else a * 0.5,
    lambda a, b, n: a - n,
    lambda a, b, n: a * (n + 0.5),
    lambda a, b, n: torch.relu(a) + 0,
    lambda a, b, n: torch.tanh(a) * 1,
    lambda a, b, n: a @ b.transpose(-1, -2) if a.shape == b.shape and a.dim() == 2 else a.clone(),
    lambda a, b, n: a.sum(n % a.dim(), keepdim=True) if a.dim() else a,
    lambda a, b, n: a.max(n % a.dim())[0] if a.dim() else a,
    lambda a, b, n: a.t() if a.dim() == 2 else a.unsqueeze(0),
    lambda a, b, n: a[n % len(a) :] if a.dim() else a.detach(),
    lambda a, b, n: a.select(-1, n % a.shape[-1]) if a.dim() > 1 else a,
    lambda a, b, n: a.reshape(-1),
    lambda a, b, n: a.expand(n % 3 + 1, *a.shape) if a.dim() < 3 else a,
    lambda a, b, n: torch.cat([a, b]) if a.shape == b.shape and a.dim() else a.contiguous(),
    lambda a, b, n: torch.where(a > 0, a, -a),
    lambda a, b, n: a.split(max(1, len(a) // 2))[-1] if a.dim() else a,
    lambda a, b, n: a.as_strided((2,), (1,), n % 2) if a.numel() > 4 and is_dense(a) else a,
    lambda a, b, n: a.add_(n) if is_dense(a) else None,
    lambda a, b, n: a.mul_(b) if a.shape == b.shape and is_dense(a) else None,
    lambda a, b, n: a.relu_() if is_dense(a) else None,
    lambda a, b, n: a.copy_(b) if a.shape == b.shape and is_dense(a) else None,
    lambda a, b, n: a.zero_() if is_dense(a) and n == 0 else None,
    lambda a, b, n: a[0].fill_(n) if a.dim() > 1 and is_dense(a) else None,
    lambda a, b, n: torch.add(a, 1, out=b) if a.shape == b.shape and is_dense(b) and is_dense(a) else None,
]  # fmt: skip


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether no two elements share an address."""
    return all(step > 0 for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


programs = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 99), st.integers(0, 99), st.integers(0, 5)),
    max_size=30,
)


@settings(deadline=None, max_examples=40)
@given(programs, st.lists(st.integers(0, 2), min_size=30, max_size=30))
def test_random_programs_give_torchs_bits(devices: list[Cpu], program: list, places: list[int]) -> None:
    random = np.random.default_rng(0)
    start = [torch.from_numpy(random.standard_normal((3, 4)).astype(np.float32)) for _ in range(3)]
    eager, lazy = [t.clone() for t in start], [flow.array(t) for t in start]
    for (step, first, second, number), place in zip(program, places, strict=False):
        flow.set_device(devices[place])
        for tensors in (eager, lazy):
            a, b = tensors[first % len(tensors)], tensors[second % len(tensors)]
            made = STEPS[step](a, b, number)
            if made is not None and made.numel() < 2000:
                tensors.append(made)
    for tensor, array in zip(eager, lazy, strict=True):
        assert_same(array, tensor)


def both(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Check that a function has the same results and side effects for arrays and tensors."""
    own = [tensor.clone() for tensor in tensors]
    arrays = [flow.array(tensor) for tensor in tensors]
    torch.manual_seed(1)
    expected = function(*own)
    torch.manual_seed(1)
    found = function(*arrays)
    for array, tensor in zip(arrays, own, strict=True):
        assert_same(array, tensor)
    for array, tensor in zip(flat(found), flat(expected), strict=True):
        assert_same(array, tensor)


def flat(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def pictures(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).standard_normal(shape).astype(np.float32))


def test_each_class_of_operations(devices: list[Cpu]) -> None:
    x, y = pictures(4, 3, 8, 8), pictures(4, 6)
    mean, spread = torch.zeros(3), torch.ones(3)
    both(lambda a, m, v: F.batch_norm(a, m, v, training=True), x, mean, spread)  # writes that no schema tells
    both(lambda a, m, v: F.batch_norm(a, m, v) * 1, x, mean, spread)
    both(lambda a, w: F.linear(a.view(2, 2, 6), w).relu_(), y, pictures(5, 6))  # _unsafe_view
    both(lambda a: (torch.unsafe_chunk(a, 2)[0].add_(1), torch.unsafe_split(a, 2)[1].mul_(2), a), y)
    both(lambda a: torch.max(a, 1), y)  # several results
    both(lambda a: torch.var_mean(a, 0), y)
    both(lambda a: torch.topk(a, 2), y)
    both(lambda a: [*a.chunk(3, 1), *torch.unbind(a)], y)  # lists of views
    both(lambda a: torch.stack([a, a * 2]), y)  # lists of inputs
    both(lambda a: a[:, [0, 2]], y)
    both(lambda a: a.index_add_(0, torch.tensor([0, 1, 0, 1]), a.clone()), y)
    both(lambda a: a.t_().unsqueeze_(0).squeeze_(0), y)  # shapes changed in place
    both(lambda a: torch.complex(a, a * 2).conj() * 1j, y)  # views by a bit
    both(lambda a: torch.view_as_real(torch.complex(a, a)).add(1), y)  # another dtype
    both(lambda a: a.view(torch.int32) ^ 1, y)
    both(lambda a: a.to(torch.float64).sum(), y)
    both(lambda a: a.to(memory_format=torch.channels_last), x)
    both(lambda a, w: F.conv2d(a.to(memory_format=torch.channels_last), w), x, pictures(5, 3, 3, 3))
    both(lambda a: F.max_pool2d(a, 2, return_indices=True), x)
    both(lambda a: torch.sort(a, descending=True), y)
    both(lambda a: torch.cumsum(a, 1), y)
    both(lambda a: torch.einsum("ij,kj->ik", a, a), y)
    both(lambda a: torch.linalg.svd(a)[1], y)
    both(lambda a: F.interpolate(a, scale_factor=1.5), x)
    both(lambda a: a.nonzero(), y)  # shapes that depend on values
    both(lambda a: a[a > 0], y)
    both(lambda a: torch.unique((a * 2).int()), y)
    both(lambda a: torch.full_like(a, 3).masked_fill_(a > 0, 0), y)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 5),
        lambda: nn.LSTM(4, 5, 2, bidirectional=True),
        lambda: nn.GRU(4, 5),
        lambda: nn.RNN(4, 5),
    ],
)
def test_recurrent_layers_and_their_gradients(devices: list[Cpu], make: Callable[[], nn.RNNBase]) -> None:
    """oneDNN's LSTM returns a workspace whose size torch does not predict."""
    layer = make()
    own = flow.arrays(copy.deepcopy(layer))
    x = torch.randn(3, 2, 4)
    lazy = flow.array(x)
    for net, tensor in ((layer, x), (own, lazy)):
        output, _ = net(tensor.requires_grad_())
        output.square().sum().backward()
    for parameter, array in zip((x, *layer.parameters()), (lazy, *own.parameters()), strict=True):
        assert_same(array.grad, parameter.grad)
    with torch.no_grad():
        program = flow.capture(lambda x: own(x)[0], lazy)
        for _ in range(4):  # oneDNN has another kernel here
            x = torch.randn(3, 2, 4)
            assert torch.equal(program(x), layer(x)[0])
            assert_same(own(flow.array(x))[0], layer(x)[0])


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_counts_when_an_operation_is_recorded(
    devices: list[Cpu], default_dtype: None
) -> None:
    """All of these run under the last default dtype."""
    made, integers, go = {}, torch.arange(7), threading.Event()
    engine: Any = devices[0].engine
    engine.push(lambda: go.wait(30))
    with flow.device(devices[0]):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.set_default_dtype(dtype)
            own = flow.array(integers)
            made[dtype] = [torch.zeros(3), torch.full((2,), 0.1), torch.linspace(0, 1, 5), torch.rand(3)]
            made[dtype] += [own / 3, own * 0.1, torch.exp(own), torch.where(own > 3, 0.5, 0.25)]
            with private.without_modes():
                values: list[Any] = [torch.zeros(3), torch.full((2,), 0.1), torch.linspace(0, 1, 5), None]
                values += [integers / 3, integers * 0.1, torch.exp(integers)]
            made[dtype] = list(zip(made[dtype], [*values, None], strict=True))
    go.set()
    for dtype, pairs in made.items():
        for array, value in pairs:
            assert array.dtype is dtype and array.tensor().dtype is dtype
            if value is not None:
                assert_same(array, value)
    assert flow.randn((2,)).dtype is flow.randb((2,), 0.5).dtype is torch.float32


def test_the_default_dtype_of_complex_results_counts_when_they_are_recorded(
    devices: list[Cpu], default_dtype: None
) -> None:
    go = threading.Event()
    devices[0].engine.push(lambda: go.wait(limit(20)))  # type: ignore[attr-defined]
    with flow.device(devices[0]):
        torch.set_default_dtype(torch.float64)
        made = [flow.array(torch.arange(2)) * 1j, torch.full((2,), 1j) * 0 + 1j]
    torch.set_default_dtype(torch.float32)
    go.set()
    for array, wanted in zip(made, ([0, 1j], [1j, 1j]), strict=True):
        assert array.tensor().dtype is array.dtype is torch.complex128 and array.tolist() == wanted


def test_a_program_keeps_the_default_dtype_of_its_capture(devices: list[Cpu], default_dtype: None) -> None:
    torch.set_default_dtype(torch.float64)
    program = flow.capture(lambda n: (n / 3, torch.zeros(2)), torch.arange(5))
    torch.set_default_dtype(torch.float32)
    third, zeros = program(torch.arange(5))
    assert third.dtype is zeros.dtype is torch.float64
    assert torch.equal(third, torch.arange(5).double() / 3)


NUMBERS: list[Callable[[Any, Any], Any]] = [
    lambda a, n: a * n,
    lambda a, n: a / (n + 0.5),
    lambda a, n: 1 - a + n,
    lambda a, n: n - a,
    lambda a, n: a.clamp(0, n),
    lambda a, n: a.clamp(max=n),
    lambda a, n: a**n,
    lambda a, n: torch.where(a > 0, a, n),
    lambda a, n: a.masked_fill(a > 0, n),
    lambda a, n: a.clone().add_(a, alpha=n),
    lambda a, n: torch._foreach_mul([a, a + 1], [n, n + 1])[1],
    torch.full_like,
    lambda a, n: a.clone().fill_(n),
]


@pytest.mark.parametrize("function", NUMBERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_another_number_needs_no_new_recipe(
    devices: list[Cpu], function: Callable[[Any, Any], Any], dtype: torch.dtype
) -> None:
    tensor = torch.arange(-3, 3).to(dtype)
    both(lambda a: function(a, 3), tensor)
    both(lambda a: function(a, 1.5), tensor.float())
    known = set(recipes._recipes)
    both(lambda a: function(a, 2), tensor)
    both(lambda a: function(a, 7), tensor)
    both(lambda a: function(a, -2.25), tensor.float())
    assert set(recipes._recipes) == known
    both(lambda a: a * True, tensor)  # of another type


def test_adam_needs_no_new_recipes(devices: list[Cpu]) -> None:
    """Its bias corrections change in each step."""
    for foreach in (False, True):
        weight = flow.randn((3,)).requires_grad_()
        optimizer = torch.optim.Adam([weight], foreach=foreach)
        weight.grad = flow.ones((3,))
        optimizer.step()
        optimizer.step()
        known = set(recipes._recipes)
        optimizer.step()
        assert set(recipes._recipes) == known


def test_torch_remembers_no_shapes_of_arrays(devices: list[Cpu]) -> None:
    """Recipes are dropped when there are many; torch's cache of predictions would keep every shape."""
    known = FakeTensorMode.cache_info().size
    for samples in range(1000, 1010):
        (flow.ones(samples) + 1).relu().wait()
    assert FakeTensorMode.cache_info().size == known


def test_numbers_that_decide_sizes_do(devices: list[Cpu]) -> None:
    for stop in (3, 6):
        target = flow.zeros((stop,), torch.int64)
        torch.arange(0, stop, out=target)
        assert target.tolist() == list(range(stop))
        assert F.interpolate(flow.ones((1, 1, 2, 2)), scale_factor=float(stop)).shape[-1] == 2 * stop
        assert repeated(flow.ones((1,)), stop + 0.5).tolist() == [1.0] * stop
    with pytest.raises(UserError, match=r"would change an array from \(3,\) to \(6,\)"):
        torch.arange(0, 6, out=flow.zeros((3,), torch.int64))


@torch.library.custom_op("lockstep_tests::repeated", mutates_args=())
def repeated(x: torch.Tensor, times: float) -> torch.Tensor:
    return x.repeat(int(times))


@repeated.register_fake
def _(x: torch.Tensor, times: float) -> torch.Tensor:
    return x.repeat(int(times))


def test_a_custom_operation_in_place_returns_its_argument(devices: list[Cpu]) -> None:
    """torch can't predict the results of one without a fake, so it runs at once."""
    library = torch.library.Library("lockstep_tests", "FRAGMENT")
    library.define("grown_(Tensor(a!) x) -> Tensor(a!)")
    library.define("both_(Tensor(a!) x, Tensor y) -> (Tensor(a!), Tensor)")
    library.impl("grown_", lambda x: x.add_(1), "CPU")
    library.impl("both_", lambda x, y: (x.add_(1), x + y), "CPU")
    x = flow.zeros((4,))
    assert torch.ops.lockstep_tests.grown_(x) is x
    same, other = torch.ops.lockstep_tests.both_(x, x)
    assert same is x and other is not x
    other.add_(1)
    assert [x.tolist(), other.tolist()] == [[2] * 4, [5] * 4]


def test_random_numbers_are_those_of_the_seed(devices: list[Cpu]) -> None:
    """They depend on torch.manual_seed, not on the order of execution or on devices."""
    layer = nn.Dropout(0.5)

    def numbers(place: int, others: int) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with flow.device(devices[place]):
            x = torch.ones(50, 50)
            made = [
                layer(x),
                torch.rand(9),
                torch.randn(9),
                torch.randperm(20),
                torch.rand_like(x).bernoulli_(0.3),
            ]
            made += [torch.native_dropout(x, 0.5, True)[0], torch.multinomial(x, 3)]
            for _ in range(others):
                x = x @ x
        return [array.tensor() for array in made]

    first = numbers(0, 0)
    for again in (numbers(0, 30), numbers(1, 0)):
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(first[0], first[5])
    with flow.device(devices[0]):
        own = [torch.rand(9, generator=torch.Generator().manual_seed(seed)).tensor() for seed in (1, 1, 2)]
    assert torch.equal(own[0], own[1]) and not torch.equal(own[0], own[2])
    torch.manual_seed(6)
    assert not torch.equal(flow.randn((9,)).tensor(), first[2])
    assert abs(float(flow.randb((10_000,), 0.3).mean()) - 0.3) < 0.03
    sample = flow.randn((10_000,), 2.0, 0.5).tensor()
    assert abs(float(sample.mean()) - 2) < 0.05 and abs(float(sample.std()) - 0.5) < 0.05


def test_checkpointing_draws_the_same_masks_again(devices: list[Cpu]) -> None:
    torch.manual_seed(0)
    layers = flow.arrays(nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 20)))
    x = flow.randn((8, 20))
    gradients = []
    for use_reentrant in (None, False, True):
        layers.zero_grad()
        torch.manual_seed(3)
        inputs = x.detach().clone().requires_grad_()
        y = (
            layers(inputs)
            if use_reentrant is None
            else checkpoint(layers, inputs, use_reentrant=use_reentrant)
        )
        y.sum().backward()
        gradients.append(layers[0].weight.grad.tensor())
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def network(dropout: float = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout), nn.Linear(8 * 16, 5),
    )  # fmt: skip


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=1e-3),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_torchs_bits(devices: list[Cpu], name: str) -> None:
    torch.manual_seed(0)
    model = network(0.0)
    lazy = flow.arrays(copy.deepcopy(model))
    x, labels = pictures(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 4, 0])
    with flow.device(devices[1]):
        optimizer = OPTIMIZERS[name](lazy.parameters())
        for _ in range(3):
            step(lazy, optimizer, x, labels)
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        step(model, optimizer, x, labels)
    for array, tensor in zip(lazy.state_dict().values(), model.state_dict().values(), strict=True):
        assert_same(array, tensor)


# Sums of results with other strides would round in another way.
FUNCTIONS_OF_PICTURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm of lines": lambda x: F.batch_norm(x.flatten(2), None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "elu": F.elu,
    "softplus": F.softplus,
    "glu": lambda x: F.glu(x, 1),
    "logsigmoid": F.logsigmoid,
    "log softmax": lambda x: F.log_softmax(x, 1),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), "reflect"),
    "replication": lambda x: F.pad(x, (1, 1, 1, 1), "replicate"),
    "reflection in volumes": lambda x: F.pad(x.unsqueeze(2), (1, 1, 1, 1, 0, 0), "reflect"),
    "replication in volumes": lambda x: F.pad(x.unsqueeze(2), (1, 1, 1, 1, 1, 1), "replicate"),
    "power of a number": lambda x: 2**x,
    "binary cross entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones(x.shape)),
    "unpooling": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "shuffle": lambda x: F.channel_shuffle(x, 2),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_PICTURES)
@pytest.mark.parametrize("last", [False, True])
def test_results_have_the_strides_of_torchs_kernels(devices: list[Cpu], name: str, last: bool) -> None:
    function = FUNCTIONS_OF_PICTURES[name]
    x = pictures(3, 4, 6, 6).to(memory_format=[torch.channels_last, torch.contiguous_format][last])
    expected = function(x.requires_grad_())
    weights = pictures(*expected.shape)
    if last and weights.ndim > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        weights = weights.to(memory_format=formats[weights.ndim])
    (gradient,) = torch.autograd.grad(expected, x, weights)
    with flow.device(devices[0]):
        inputs = flow.array(x.detach()).requires_grad_()
        found = function(inputs)
        (own,) = torch.autograd.grad(found, inputs, flow.array(weights))
        assert found.stride() == expected.stride() and own.stride() == gradient.stride()
        assert_same(own.sum((0, 2, 3)), gradient.sum((0, 2, 3)))


def test_gradients_of_transposed_probabilities_are_torchs(devices: list[Cpu]) -> None:
    frames, targets = pictures(4, 5, 6), torch.tensor([[1, 2], [2, 3], [3, 1], [1, 1]])
    lengths = torch.full((4,), 5), torch.full((4,), 2)

    def gradients(frames: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        weight = weight.detach().requires_grad_()
        scores = (frames @ weight).log_softmax(-1).transpose(0, 1)
        F.ctc_loss(scores, targets, *lengths).backward()
        return [torch.as_tensor(weight.grad)]

    weight = pictures(6, 4)
    expected = gradients(frames, weight)[0]
    with flow.device(devices[0]):
        assert_same(gradients(flow.array(frames), flow.array(weight))[0], expected)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


def test_any_tensor_is_copied_as_it_is(devices: list[Cpu]) -> None:
    whole = torch.arange(24.0).view(2, 3, 4)
    tensors = [
        whole, whole.transpose(0, 2), whole[:, ::2], whole[1, 1:], whole.bfloat16(), torch.empty(0, 3),
        torch.tensor(2.5), torch.ones(3).expand(4, 3), whole.int() > 3,
        torch.randn(3, dtype=torch.cfloat).conj(),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]  # fmt: skip
    for tensor in tensors:
        wanted = tensor.clone()
        made = flow.array(tensor)
        if tensor.numel() and not tensor.is_conj():
            tensor.as_strided((1,), (1,), tensor.storage_offset()).fill_(0)  # the array has a copy
        found = made.tensor()
        assert torch.equal(found, wanted) and found.dtype is wanted.dtype
        if tensor.is_contiguous() or tensor.dim() == 4:
            assert made.stride() == tensor.stride()


def test_sparse_gradients(devices: list[Cpu]) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True)
    lazy = flow.arrays(copy.deepcopy(table))
    rows = torch.tensor([1, 5, 1, 7])
    for module in (table, lazy):
        optimizer = torch.optim.SGD(module.parameters(), 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (module(rows) ** 2).sum().backward()
            optimizer.step()
    assert lazy.weight.grad.layout is torch.sparse_coo
    assert torch.equal(lazy.weight.grad.tensor().to_dense(), table.weight.grad.to_dense())
    assert lazy.weight.grad.to(torch.float64).dtype == torch.float64
    assert_same(lazy.weight, table.weight)


def test_sparse_tensors_made_of_arrays_can_be_copied_and_used(devices: list[Cpu]) -> None:
    plain = torch.eye(3).to_sparse()
    with flow.device(devices[0]):
        for made in (torch.eye(3).to_sparse(), flow.array(plain), flow.array(torch.eye(3)).to_sparse()):
            for each in (made, flow.array(made), made.clone(), flow.array(made).detach()):
                assert each.layout is torch.sparse_coo
                assert torch.equal(each.tensor().to_dense(), torch.eye(3))
            assert flow.array(made, dtype=torch.float64).tensor().dtype is torch.float64
            assert_same(made.to_dense() + 1, torch.eye(3) + 1)


def test_where_things_run(devices: list[Cpu]) -> None:
    """Results lie on the current device, in-place writes stay, backward runs where forward ran."""
    first, second, third = devices
    with flow.device(first):
        x = torch.ones(3, requires_grad=True)
        assert x.place is first and flow.current_device() is first
    with flow.device(second), flow.recording() as trace:
        y = x * 2
        assert y.place is second
        with flow.device(third):
            loss = torch.tanh(y).sum()
            x.detach().add_(0)
    with trace_more() as later:
        loss.backward()
    flow.wait_all()
    assert [o.device for o in trace.operations if o.name == "add_"] == ["cpu:0"]
    places = {o.name: o.device for o in later.operations}
    assert places["tanh_backward"] == "cpu:2" and places["mul"] == "cpu:1"
    assert {o.phase for o in later.operations if o.name == "tanh_backward"} == {"backward"}
    flow.set_device(second)
    assert flow.zeros((2,)).place is flow.ones(2).place is second
    with pytest.raises(UserError, match="another engine"):
        flow.Engine([first])


def trace_more() -> Any:
    return flow.recording()


def test_copies_between_memories_are_made_once_a_version(devices: list[Cpu]) -> None:
    class Other(Cpu):
        """A CPU device with its own memory."""

        def __init__(self, name: str) -> None:
            super().__init__(name, devices[0].cores, 1)
            self.memory = name

    far = Other("far")
    with flow.Engine([far]), flow.recording() as trace:
        x = flow.array(np.arange(6.0).reshape(2, 3))
        with flow.device(devices[0]):
            results = [x + 1, x.t() * 2, (x + x)[0]]
            x += 1
            results.append(x - 1)
        values = [array.tolist() for array in results]
        assert x.place is far and results[3].place is devices[0]
        with pytest.raises(UserError, match="writes arrays on far and cpu:0"):
            torch._foreach_add_([x, results[0]], 1)
    assert values[3] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and values[1] == [
        [0.0, 6.0],
        [2.0, 8.0],
        [4.0, 10.0],
    ]
    assert sum(o.name == "copy" for o in trace.operations) == 2


def test_reading_waits_and_gives_copies(devices: list[Cpu]) -> None:
    source = np.arange(4.0)
    x = flow.array(source)
    source[:] = 0
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
    copied = x.numpy()
    x += 1
    np.testing.assert_array_equal(copied, [0, 1, 2, 3])
    assert x.sum().item() == 10 and float(x[1]) == 2 and bool(x[0] == 1) and int(x[2]) == 3
    np.testing.assert_array_equal(np.asarray(x.wait()), [1, 2, 3, 4])
    assert "4,)" in repr(x) and "cpu" in repr(x)
    y = torch.ones(4)
    z = x + y
    y.zero_()
    assert z.tolist() == [2, 3, 4, 5]
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert torch.load(file)["x"].tolist() == x.tolist()


def test_an_array_is_copied_with_another_dtype(devices: list[Cpu]) -> None:
    made = flow.array(flow.array([1.5, 2.5]), dtype=torch.float64)
    assert made.dtype is torch.float64 and made.tolist() == [1.5, 2.5]


def test_a_result_that_is_an_input_only_in_the_prediction_is_an_array(devices: list[Cpu]) -> None:
    ones = flow.ones((4,))
    for rate in (0.0, 0.5):  # both use one recipe
        values, mask = torch.native_dropout(ones, rate, True)
        assert values is not ones and values.tolist() == [kept / (1 - rate) for kept in mask.tolist()]


def test_numbers_are_formatted_as_torch_does(devices: list[Cpu]) -> None:
    loss = flow.array(torch.tensor(1.23456))
    assert f"{loss:.3f} {loss:>8.1f} {loss}" == "{0:.3f} {0:>8.1f} {0}".format(torch.tensor(1.23456))
    assert f"{flow.ones((2,))}".startswith("Array((2,)")
    with pytest.raises(TypeError, match="format string"):
        f"{flow.ones((2,)):.3f}"


def test_a_saved_module_has_parameters_again(devices: list[Cpu]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[1].weight.detach(), requires_grad=False)
    model[1].bias = model[0].bias
    lazy, file = flow.arrays(copy.deepcopy(model)), io.BytesIO()
    lazy[0].bias.no_decay = True  # type: ignore[union-attr]
    torch.save([lazy, flow.ones((2,)).requires_grad_()], file)
    file.seek(0)
    loaded, tensor = torch.load(file, weights_only=False)
    assert [name for name, _ in loaded.named_parameters()] == ["0.weight", "0.bias", "1.weight"]
    for own, wanted in zip(loaded.parameters(), model.parameters(), strict=True):
        assert type(own) is nn.Parameter and own.requires_grad == wanted.requires_grad
        assert torch.equal(own, wanted)
    assert [vars(own) for own in loaded.parameters()] == [{}, {"no_decay": True}, {}]  # as in torch
    assert type(tensor) is torch.Tensor and tensor.requires_grad


def test_lists_of_arrays_are_numbers(devices: list[Cpu]) -> None:
    a = flow.array(torch.tensor([1.5, 2.5], dtype=torch.float64))
    assert_same(flow.array([a[0], [a[1]][0], 3]), torch.tensor([1.5, 2.5, 3], dtype=torch.float64))
    with flow.device(devices[1]):
        made = torch.tensor([[a[0], a[1]], [a[1], a[0]]])
    assert made.tolist() == [[1.5, 2.5], [2.5, 1.5]] and made.dtype is torch.float64


def test_second_derivatives_inside_and_outside_of_a_device(devices: list[Cpu]) -> None:
    def cubes(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum()

    x = torch.tensor([1.0, 2.0])
    with flow.device(devices[0]):
        found = torch.func.hessian(cubes)(flow.array(x))
        slope = torch.func.jvp(cubes, (flow.array(x),), (flow.ones((2,)),))[1]
    assert_same(found, torch.func.hessian(cubes)(x))
    assert slope.item() == 15
    assert_same(torch.func.hessian(cubes)(flow.array(x)), torch.func.hessian(cubes)(x))
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # a function whose derivatives need views and products
    outer = [
        torch.func.hessian(lambda a, m=m: (torch.sin(m @ a) * a[0]).sum())
        for m in (matrix, flow.array(matrix))
    ]
    assert_same(outer[1](flow.array(x)), outer[0](x))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_a_transformer_with_a_mask(devices: list[Cpu]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        found = flow.arrays(copy.deepcopy(plain))(flow.array(x), src_key_padding_mask=flow.array(mask))
        torch.testing.assert_close(found.tensor(), plain(x, src_key_padding_mask=mask))
        nested = flow.arrays(nn.TransformerEncoder(layer, 2)).eval()
        with pytest.raises(UserError, match="with a mask needs enable_nested_tensor=False"):
            nested(flow.array(x), src_key_padding_mask=flow.array(mask))


def test_functions_that_read_values_in_cpp_explain_what_to_give_them(devices: list[Cpu]) -> None:
    scores, targets = torch.randn(10, 2, 5).log_softmax(2), torch.tensor([[1, 2], [3, 4]])
    expected = F.ctc_loss(scores, targets, (10, 9), (2, 2))
    with flow.device(devices[0]):
        arrays = flow.array(scores), flow.array(targets)
        with pytest.raises(UserError, match=r"ctc_loss reads the memory.*give tensors instead of lists"):
            F.ctc_loss(*arrays, (10, 9), (2, 2))
        assert_same(F.ctc_loss(*arrays, torch.tensor([10, 9]), torch.tensor([2, 2])), expected)
        with pytest.raises(UserError, match="give the layer the padded batch"):
            nn.utils.rnn.pack_padded_sequence(flow.array(scores), [2, 1])
    with pytest.raises(UserError, match="give the layer the padded batch"):
        nn.utils.rnn.pack_padded_sequence(flow.array(scores), [2, 1])


def test_arrays_of_a_module(devices: list[Cpu]) -> None:
    model = network()
    model.tied = model[6]
    with flow.device(devices[1]):
        flow.arrays(model)
        twin = copy.deepcopy(model)
        weight = model[0].weight
        assert flow.arrays(model)[0].weight is weight
    assert model.tied.weight is model[6].weight and isinstance(weight, nn.Parameter)
    for own, other in zip(
        model.state_dict(keep_vars=True).values(), twin.state_dict(keep_vars=True).values(), strict=True
    ):
        assert isinstance(other, flow.Array) and other.place is devices[1] and other is not own
        assert other.requires_grad == own.requires_grad and isinstance(other, nn.Parameter) == isinstance(
            own, nn.Parameter
        )
    flow.arrays(network()).load_state_dict(network().state_dict())
    double = flow.arrays(nn.Linear(3, 2)).double()
    assert double(torch.ones(4, 3, dtype=torch.float64)).tensor().dtype is torch.float64
    with pytest.raises(UserError, match="data of an array is an array"):
        weight.data = torch.zeros(1)


@pytest.mark.parametrize("make", [torch.Tensor.detach, nn.Parameter])
def test_deep_copies_have_the_gradients_that_torch_copies(devices: list[Cpu], make: Any) -> None:
    x = make(torch.ones(3)).requires_grad_()
    (x * 2).sum().backward()
    wanted = copy.deepcopy(x).grad
    lazy = flow.array(x.detach()).requires_grad_()
    if isinstance(x, nn.Parameter):
        lazy = flow.arrays(nn.ParameterList([x]))[0]
    (lazy * 2).sum().backward()
    copies = [copy.deepcopy(lazy)]
    with flow.device(devices[0]):
        copies.append(copy.deepcopy(lazy))
        copies.append(copy.deepcopy(x.grad if wanted is None else x))
    for each in copies:
        assert isinstance(each, flow.Array)
        if wanted is None:
            assert each.grad is None
        else:
            assert isinstance(each.grad, flow.Array) and torch.equal(each.grad.tensor(), wanted)
    if wanted is not None:
        assert lazy.grad is not None and copies[0].grad is not lazy.grad


def test_tensors_on_the_meta_device_are_left_to_torch(devices: list[Cpu]) -> None:
    with flow.device(devices[0]):
        layer = nn.Linear(3, 2, device="meta")
        for made in (layer.weight, layer(torch.ones(4, 3, device="meta")), torch.randn(3, device="meta") * 2):
            assert made.is_meta and not isinstance(made, flow.Array)
        with torch.device("meta"):
            assert nn.Linear(3, 2).weight.is_meta
        with pytest.raises(UserError, match="meta device has no values"):
            torch.ones(2) + torch.empty(2, device="meta")
        values = flow.arrays(layer.to_empty(device="cpu"))(torch.ones(4, 3))
        assert isinstance(values, flow.Array) and values.tensor().shape == (4, 2)


def tied_layers() -> tuple[nn.Linear, nn.Linear]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second


def test_parameters_that_become_arrays_keep_their_gradients(devices: list[Cpu]) -> None:
    found = []
    for make in (lambda model: model, flow.arrays):
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        model(torch.tensor([1, 2, 1])).sum().backward()
        make(model)
        torch.optim.SGD(model.parameters(), 0.1).step()
        found.append([parameter.tolist() for parameter in model.parameters()])
    assert found[0] == found[1]


def test_modules_made_arrays_one_after_another_stay_tied(devices: list[Cpu]) -> None:
    first, second = tied_layers()
    with flow.device(devices[0]):
        flow.arrays(first)
    with flow.device(devices[1]):
        flow.arrays(second)
    assert second.weight is first.weight and second.bias is not first.bias
    first, second = tied_layers()
    flow.arrays(first)
    with torch.no_grad():
        second.weight.add_(1)
    bias = second.bias
    with pytest.raises(UserError, match=r"weight became an array in another module.*was changed since"):
        flow.arrays(second)
    assert second.bias is bias
    del first  # with its array
    assert flow.arrays(second).weight.tensor().shape == (2, 2)


def test_an_optimizer_of_replaced_parameters_is_refused(devices: list[Cpu]) -> None:
    model = nn.Linear(2, 2)
    early = torch.optim.SGD(model.parameters(), 0.1)
    flow.arrays(model)
    model(flow.ones((1, 2))).sum().backward()
    with pytest.raises(UserError, match=r"SGD was made before flow.arrays.*replaced weight .*after"):
        early.step()
    before = model.weight.tensor()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert not torch.equal(model.weight.tensor(), before)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


class KeepsLists(nn.Module):
    """Has its parameters and its buffer in containers of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.weights = [self.first.weight, self.last.weight]
        self.groups = {"biases": (self.first.bias, self.last.bias), "all": [self]}
        self.__dict__["alias"] = self.mean
        self.hidden = [nn.Linear(3, 4)]
        self.hidden[0].weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights, self.groups["biases"], strict=True):  # type: ignore[arg-type]
            x = F.linear(x, weight, bias)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return x - self.alias + F.linear(x[:, :1], self.hidden[0].weight[:2, :1])


def test_parameters_in_lists_of_the_module_become_arrays(devices: list[Cpu]) -> None:
    """The lists kept the tensors from before, which nothing trained."""
    torch.manual_seed(0)
    model, x = KeepsLists(), torch.randn(8, 3)
    lazy = copy.deepcopy(model)
    flow.arrays(lazy)
    for each in (model, lazy):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert lazy.weights[1] is lazy.last.weight and lazy.alias is lazy.mean
    for name, value in model.state_dict().items():
        torch.testing.assert_close(lazy.state_dict()[name].tensor(), value)
    scripted = flow.arrays(torch.jit.script(nn.Sequential(nn.Linear(3, 2))))
    assert all(isinstance(parameter, flow.Array) for parameter in scripted.parameters())
    with flow.Engine(flow.cpus(2)) as engine:
        executor = flow.ParallelExecutor(
            KeepsLists().double(), lambda model, x: model(x).square().mean(),
            lambda parameters: torch.optim.SGD(parameters, 0.1), engine.devices[:1],
        )  # fmt: skip
        losses = [executor.run({"x": x.double()})["loss"].item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_an_operation_that_reads_a_replaced_parameter_is_refused(devices: list[Cpu]) -> None:
    """A closure that had taken a weight before flow.arrays read what it was then."""
    model = nn.Linear(3, 2)
    weight, start, loaded = model.weight, model.weight.detach(), model.state_dict()
    flow.arrays(model)
    x = flow.ones((4, 3))
    for read in (lambda: F.linear(x, weight), lambda: x @ weight[0], lambda: x - weight[0]):
        with pytest.raises(UserError, match=r"test_flow_arrays.*the tensor that weight was before"):
            read()
    with flow.device(devices[0]), pytest.raises(UserError, match="take the array from the module"):
        weight.square()
    assert (model.weight - start).abs().max().item() == 0
    model.load_state_dict(loaded)
    assert flow.array(weight).shape == (2, 3)


def test_hooks_that_an_array_would_lose_are_refused(devices: list[Cpu]) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        hook = getattr(model[1].weight, register)(lambda gradient: None)
        with pytest.raises(UserError, match=r"1.weight has hooks.*register them after flow.arrays"):
            flow.arrays(model)
        assert not isinstance(model[0].weight, flow.Array)
        hook.remove()
        getattr(flow.arrays(model)[1].weight, register)(lambda gradient: None)
        flow.arrays(model)  # which are arrays already
        with pytest.raises(UserError, match=r"1.weight has hooks.*in the optimizer"):
            flow.ParallelExecutor(model, F.mse_loss, torch.optim.SGD, devices)


def test_wrong_shapes_raise_where_they_are_written(
    devices: list[Cpu], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match="broadcast"):
        flow.zeros((2, 3)) + flow.zeros((2, 4))
    assert not caplog.records
    with pytest.raises(UserError, match="ordinary tensor of shape"):
        torch.zeros(3).add_(flow.ones((3,)))
    with pytest.raises(UserError, match="other memory"):
        flow.zeros((2,)).resize_(3)
    with pytest.raises(UserError, match="in place"):
        torch.add(flow.ones((3,)), 1, out=flow.zeros((1,)))


def test_threads_record_side_by_side(devices: list[Cpu]) -> None:
    results: dict[int, float] = {}

    def work(number: int) -> None:
        with flow.device(devices[number % 3]):
            x = torch.full((10,), float(number))
            for _ in range(50):
                x = x + 1
            results[number] = float(x.sum())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: (n + 50) * 10.0 for n in range(6)}


def test_calls_run_beside_and_hold_back_only_what_writes(devices: list[Cpu]) -> None:
    x, go, order = flow.ones((3,)), threading.Event(), []
    saved = flow.call(lambda tree, extra: (go.wait(limit(20)), tree["x"].clone(), extra)[1:], {"x": x}, 7)
    y = x * 2
    assert y.tolist() == [2, 2, 2]  # not held back
    x += 1
    order.append("recorded")
    assert not saved.done
    go.set()
    assert saved.result()[0].tolist() == [1, 1, 1] and saved.result()[1] == 7
    assert x.tolist() == [2, 2, 2]
    flow.call(lambda a: a.mul_(3), x, writes=[x])
    assert x.tolist() == [6, 6, 6]
    with pytest.raises(UserError, match="not an array among the arguments"):
        flow.call(lambda a: None, x, writes=[y])


def test_a_call_gets_ordinary_tensors_as_they_were(devices: list[Cpu]) -> None:
    """torch's optimizers count steps in ordinary tensors, which the next step changes."""
    layer, go = flow.arrays(nn.Linear(3, 2)), threading.Event()
    optimizer = torch.optim.Adam(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def steps(state: dict[str, Any], *same: torch.Tensor) -> list[float]:
        go.wait(limit(20))
        assert same[0] is same[1]
        return [float(own["step"]) for own in state["state"].values()]

    tied = torch.ones(3)
    saved = flow.call(steps, optimizer.state_dict(), tied, tied)
    optimizer.step()
    go.set()
    assert saved.result() == [1, 1]


def test_backward_refuses_what_operations_on_lists_have_overwritten(devices: list[Cpu]) -> None:
    """An optimizer with foreach=True does so if its step comes before a second backward."""
    for overwrite in (torch._foreach_zero_, lambda each: torch._foreach_copy_(each, [torch.ones(3)] * 2)):
        x, weights = flow.ones((3,)).requires_grad_(), [flow.ones((3,)), flow.ones((3,))]
        product = x * weights[0] * weights[1]
        torch._foreach_mul(weights, 2.0)  # it only reads
        product.sum().backward(retain_graph=True)
        overwrite(weights)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        with torch.inference_mode():  # such tensors have no versions
            overwrite([flow.ones((3,)), flow.ones((3,))])


def test_backward_refuses_what_a_call_has_overwritten(devices: list[Cpu]) -> None:
    p = flow.ones((3,)).requires_grad_()
    for part in (slice(None), slice(1, 2)):
        y = torch.exp(p)
        written = y.detach()[part]  # shares its memory
        flow.call(lambda value: value.zero_(), written, writes=[written])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    both(lambda x: torch.autograd.grad(torch.exp(x.requires_grad_()).sum(), x), pictures(4))
    y = torch.exp(p)
    flow.call(lambda value: value.clone(), y)  # it only reads
    y.sum().backward()
    with torch.inference_mode():  # such tensors have no versions
        x = flow.ones((3,))
        flow.call(lambda value: value.zero_(), x, writes=[x])
        assert x.tolist() == [0, 0, 0]


def test_a_call_leaves_arrays_their_shape_and_no_gradient(devices: list[Cpu]) -> None:
    def gradient(value: torch.Tensor) -> Any:
        value.requires_grad_().square().sum().backward()
        assert value.grad is not None
        return value.grad.tolist()

    x = flow.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for _ in range(2):
        assert flow.call(gradient, x).result() == [[2, 4, 6], [8, 10, 12]]
    for change in (torch.Tensor.t_, lambda value: value.resize_(7), lambda value: value.set_(torch.zeros(7))):
        flow.call(lambda value, change=change: change(value).sum().item(), x, writes=[x]).result()
        assert x.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_memory_of_a_loop_stays_flat(devices: list[Cpu]) -> None:
    """Values are released after their last use, without waiting for anything."""
    import weakref

    x, gone = flow.zeros((100,)), []
    for _ in range(200):
        x = x + 1
        gone.append(weakref.ref(x.memory.cell))
    assert x.tolist()[0] == 200
    assert sum(each() is not None for each in gone) <= 2


def test_what_reads_memory_gets_the_value_or_an_error() -> None:
    """Nothing reads address 0: DLPack and data_ptr wait, shared memory and storages are refused."""
    with flow.Engine(flow.cpus(1)):
        part = (flow.array([[1.0, 2.0], [3.0, 4.0]]) * 2)[1]
        assert np.from_dlpack(part).tolist() == torch.from_dlpack(part).tolist() == [6, 8]
        assert list((ctypes.c_float * 2).from_address(part.data_ptr())) == [6, 8]
        with pytest.raises(RuntimeError):
            torch.utils.dlpack.to_dlpack(part)  # C++, which does not call __torch_dispatch__
        for refused in (
            part.share_memory_,
            part.untyped_storage,
            flow.arrays(torch.nn.Linear(2, 2)).share_memory,
        ):
            with pytest.raises(UserError, match=r"array.tensor\(\)"):
                refused()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([6, 6])], ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_norms_of_less_precise_images_have_the_bits_of_torch(
    devices: list[Cpu], norm: nn.Module, trains: bool
) -> None:
    """On CPUs their statistics are float32, which torch's prediction does not say."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), norm).train(trains)
    images = torch.randn(2, 3, 8, 8)

    def step(layers: nn.Module, images: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            out = layers(images)
        out.float().square().mean().backward()
        return [out, *(parameter.grad for parameter in layers.parameters())]

    expected = step(copy.deepcopy(layers), images)
    with flow.device(devices[0]):
        found = step(copy.deepcopy(layers).to(torch.float32), flow.array(images))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(torch.as_tensor(one.wait() if hasattr(one, "wait") else one), other)


def test_normalization_in_evaluation_writes_no_statistics() -> None:
    """It runs on the current device, as operations do that only read, and takes ordinary statistics."""
    first, second = flow.cpus(2)
    layer, x = nn.BatchNorm1d(3).eval(), torch.randn(4, 3)
    with torch.no_grad():
        wanted = layer(x)
        with flow.device(second):
            assert torch.equal(layer(flow.array(x)).tensor(), wanted)
        with flow.device(first):
            flow.arrays(layer)
        with flow.device(second):
            found: Any = layer(x)
    assert found.place is second and torch.equal(found.tensor(), wanted)
