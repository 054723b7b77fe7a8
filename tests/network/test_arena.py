"""The arena's views, theano_alexnet's update rules, the learning rate's policies, and dropout by sample."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import UserError
from lockstep.exchange import ALIGNMENT
from lockstep.memory.host import HostMemory
from lockstep.network import dropout
from lockstep.network.arena import Arena
from lockstep.network.optimizer import make_optimizer
from lockstep.optim import states_of
from lockstep.optim.schedules import learning_rate


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 3))


def test_parameters_momenta_and_buffers_are_views_of_one_block() -> None:
    net = make_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    arena = Arena(net, HostMemory(), states=("momenta",))
    optimizer = make_optimizer(net, arena, make_config())
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    net(torch.randn(4, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    begin, end = arena.flat.data_ptr(), arena.flat.data_ptr() + arena.flat.nbytes
    views = [*net.parameters(), *(buffer for buffer in net.buffers() if buffer.is_floating_point())]
    views += [optimizer.state[parameter]["momentum_buffer"] for parameter in net.parameters()]
    for view in views:
        assert begin <= view.data_ptr() < end and view.data_ptr() % (4 * ALIGNMENT) == begin % (4 * ALIGNMENT)
    assert torch.equal(arena.tensors["weights/0.weight"], net[0].weight)
    assert torch.equal(
        arena.state_of("momenta", "0.weight"), optimizer.state[net[0].weight]["momentum_buffer"]
    )
    assert arena.state_of("momenta", "0.weight").abs().sum() > 0
    assert arena.tensors["buffers/1.running_mean"].abs().sum() > 0
    assert list(arena.local) == ["buffers/1.num_batches_tracked"]
    names = [name.split("/")[0] for name in arena.tensors]
    assert names == sorted(names, key=["weights", "momenta", "buffers"].index)


def test_a_buffer_that_the_model_also_keeps_in_a_list_is_the_arenas() -> None:
    """The list kept the tensor from before, which no step wrote."""
    net = make_net()
    kept = [net[1].running_mean, net[1].num_batches_tracked]
    arena = Arena(net, HostMemory(), with_ema=True)
    net(torch.randn(4, 3, 4, 4))
    assert kept[0] is net[1].running_mean and kept[0].abs().sum() > 0
    assert torch.equal(kept[0], arena.tensors["buffers/1.running_mean"])
    assert kept[1].item() == arena.local["buffers/1.num_batches_tracked"].item() == 1
    arena.bind(net, "ema", "ema")
    assert kept[0].data_ptr() == arena.tensors["ema/1.running_mean"].data_ptr()


def theano_alexnet_step(w, v, gradient, is_bias, config, nesterov):
    """One update by theano_alexnet's rules: v takes the rate in. Nesterov as in Sutskever et al. 2013."""
    rate = config.learning_rate * (2 if is_bias else 1)
    decay = 0.0 if is_bias else config.weight_decay
    g = gradient + decay * w
    if nesterov:
        v_next = config.momentum**2 * v - (1 + config.momentum) * rate * g
        return w + v_next, config.momentum * v - rate * g
    v = config.momentum * v - rate * g
    return w + v, v


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [True, False])
def test_updates_are_theano_alexnets(nesterov: bool, momentum: bool) -> None:
    if nesterov and not momentum:
        pytest.skip("refused by the configuration")
    torch.manual_seed(1)
    net = nn.Linear(4, 3).double()
    values = {"use_momentum": momentum, "use_nesterov_momentum": nesterov, "learning_rate": 0.05}
    config = make_config(weight_decay=0.01, **values)
    arena = Arena(net, HostMemory(), states=("momenta",) if momentum else ())
    optimizer = make_optimizer(net, arena, config)
    expected = {
        name: (value.detach().clone(), torch.zeros_like(value)) for name, value in net.named_parameters()
    }
    reference = make_config(weight_decay=0.01, learning_rate=0.05, momentum=0.9 if momentum else 0.0)
    for _ in range(5):
        x = torch.randn(6, 4, dtype=torch.float64)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        for name, parameter in net.named_parameters():
            w, v = expected[name]
            expected[name] = theano_alexnet_step(w, v, parameter.grad, name == "bias", reference, nesterov)
        optimizer.step()
        # Only the weights are compared, at each step: the gradients of the next depend on them.
        for name, parameter in net.named_parameters():
            assert torch.allclose(parameter, expected[name][0], rtol=1e-12, atol=1e-14)


def test_without_momentum_the_arena_has_no_momenta() -> None:
    arena = Arena(nn.Linear(2, 2), HostMemory())
    assert list(arena.tensors) == ["weights/weight", "weights/bias"]


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    arena = Arena(nn.Linear(4, 4), HostMemory())
    before = arena.flat.clone()
    good = {name: torch.ones_like(tensor) for name, tensor in arena.state().items()}
    bad = {**good, "weights/bias": torch.ones(5)}
    with pytest.raises(UserError, match=r"file: is of another model: its 'weights/bias' is .*\(5,\)"):
        arena.load(bad, "file")
    with pytest.raises(UserError, match="it has no 'weights/bias'"):
        arena.load({"weights/weight": good["weights/weight"]}, "file")
    with pytest.raises(UserError, match=r"this one has no 'weights/extra'\. Use the model.* as many classes"):
        arena.load({**good, "weights/extra": torch.ones(1)}, "file")
    assert torch.equal(arena.flat, before)
    arena.load(good, "file")
    assert arena.tensors["weights/bias"].eq(1).all()


class Odd(nn.Module):
    """A model with parameters and buffers of every kind that can be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.tied.weight
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.volume = nn.Conv3d(1, 2, 2).to(memory_format=torch.channels_last_3d)
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.nothing = nn.Parameter(torch.ones(0))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.full((2, 2), 0.5))
        self.again.register_buffer("mean", self.mean)
        self.register_buffer("absent", None)
        self.register_buffer("spread", torch.ones(1).expand(4), persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.tied(x)) @ self.turned * self.scalar + self.spread[:3] * self.mean.sum()
        volumes = self.volume(x.view(-1, 1, 1, 2, 2).expand(-1, 1, 2, 2, 2))
        return self.drop(y.sum(1, keepdim=True) + volumes.flatten(1))


def test_odd_tensors_lie_in_the_arena_and_are_trained() -> None:
    torch.manual_seed(0)
    net = Odd()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = torch.randn(6, 4)
    net.eval()
    expected = net(x)
    config = make_config(ema_decay=0.5)
    arena = Arena(net, HostMemory(), states_of(config), with_ema=True)
    optimizer = make_optimizer(net, arena, config)
    torch.testing.assert_close(net(x), expected)  # `turned` is contiguous now: BLAS may round otherwise
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert net.tied.weight is net.again.weight and net.mean is net.again.mean
    assert list(arena.local) == ["buffers/count"]
    assert "momenta/frozen" not in arena.tensors and "weights/frozen" in arena.tensors
    net(x).square().sum().backward()
    optimizer.step()
    arena.move_averages(0.5)
    arena.check_bound(net)
    for name in ("tied.weight", "scalar", "turned", "volume.weight"):
        now = arena.tensors[f"weights/{name}"]
        assert not torch.equal(now, before.get(name, now)), name
        assert torch.allclose(arena.tensors[f"ema/{name}"], (now + before[name]) / 2)
    assert torch.equal(net.again.weight, arena.tensors["weights/tied.weight"])


class TwoBuffers(nn.Module):
    """A network that needs one buffer in the backward pass, and changes another one after its use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.full((4,), 0.5))
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.factor
        self.center.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y


def test_a_buffer_may_change_while_autograd_holds_another_one() -> None:
    net = TwoBuffers()
    arena = Arena(net, HostMemory())
    net(torch.ones(2, 4)).sum().backward()
    assert arena.tensors["buffers/center"].any()
    assert net.linear.weight.grad is not None and net.linear.weight.grad.eq(1.0).all()


def double_buffer(net: Odd) -> None:
    net.mean = net.mean.double()


def half_weights(net: Odd) -> None:
    net.half()


def whole_numbers(net: Odd) -> None:
    net.steps = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)


def complex_buffer(net: Odd) -> None:
    net.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (double_buffer, r"buffers/mean is torch.float64, and trainers average torch.float32 only"),
        (half_weights, r"is torch.float16, and trainers average torch.float32 only"),
        (whole_numbers, r"weights/steps is torch.int32"),
        (complex_buffer, r"buffers/spectrum is torch.complex64"),
    ],
)
def test_tensors_that_can_not_be_averaged_are_refused(change: Callable[[Odd], None], message: str) -> None:
    net = Odd()
    change(net)
    with pytest.raises(UserError, match=message):
        Arena(net, HostMemory())


def test_a_network_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(UserError, match="the model has no parameters"):
        Arena(nn.ReLU(), HostMemory())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no parameters that are trained"):
        make_optimizer(frozen, Arena(frozen, HostMemory(), ("momenta",)), make_config())


def test_a_buffer_that_is_replaced_is_seen() -> None:
    net = Odd()
    arena = Arena(net, HostMemory())
    net.mean = net.mean * 0.9
    with pytest.raises(UserError, match="mean has been replaced by another tensor"):
        arena.check_bound(net)


def test_digests_show_a_single_bit() -> None:
    arena = Arena(nn.Linear(4, 4), HostMemory())
    before = arena.digests()
    arena.tensors["weights/bias"][2] *= 1 + 2e-7
    changed = [name for name, digest in arena.digests().items() if digest != before[name]]
    assert changed == ["weights/bias"]


@pytest.mark.parametrize("place", [0, 1023, 1024, 99_999])
def test_digests_show_one_bit_and_two_numbers_that_have_changed_places(place: int) -> None:
    """Changes show in a table of many rows of 1,024 numbers, and in the bytes behind it."""
    arena = Arena(nn.Linear(1000, 100, bias=False), HostMemory())
    weights, before = arena.tensors["weights/weight"].view(-1), arena.digests()
    for bit in (0, 31):
        weights.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1
        assert arena.digests() != before
        weights.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1
    assert arena.digests() == before
    for other in (50_000, place ^ 2):
        weights[[place, other]] = weights[[other, place]]
        assert arena.digests() != before
        weights[[place, other]] = weights[[other, place]]


def test_step_policy_falls_after_the_given_epochs() -> None:
    config = make_config(learning_rate=1.0, lr_step=[2, 4])
    rates = [learning_rate(config, epoch, []) for epoch in range(1, 7)]
    assert np.allclose(rates, [1, 1, 0.1, 0.1, 0.01, 0.01])


def test_auto_policy_falls_when_the_error_stands_still() -> None:
    config = make_config(learning_rate=1.0, lr_policy="auto", lr_adapt_threshold=0.01)
    errors = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.395, 0.394, 0.3, 0.299, 0.2985, 0.298]
    rates = [learning_rate(config, epoch, errors) for epoch in range(1, 14)]
    # Epochs 6 to 8 brought 0.006, so 9 has a tenth; 9 to 11 brought 0.0015, so 12 has a hundredth.
    assert np.allclose(rates, [1] * 8 + [0.1] * 3 + [0.01] * 2)
    assert learning_rate(config, 5, [0.9] * 4) == 1.0  # never before six epochs


keys = st.integers(0, 2**31 - 1)


@given(st.floats(0.05, 0.95), keys)
def test_dropout_drops_the_right_share(p: float, seed: int) -> None:
    sample_keys = torch.from_numpy(dropout.sample_keys(seed, 1, 40))
    kept = dropout.keep_mask(sample_keys, (0, 0), 500, p).double().mean()
    assert abs(kept - (1 - p)) < 0.02  # 5.6 standard deviations


def test_dropout_masks_follow_the_sample_only() -> None:
    sample_keys = torch.from_numpy(dropout.sample_keys(3, 1, 50))
    whole = dropout.keep_mask(sample_keys, (0, 0), 64, 0.5)
    assert torch.equal(dropout.keep_mask(sample_keys[[7, 3]], (0, 0), 64, 0.5), whole[[7, 3]])
    assert not torch.equal(dropout.keep_mask(sample_keys, (0, 1), 64, 0.5), whole)
    assert (whole.double() @ whole.double().T / 64)[0, 1:].mean() < 0.35  # pairs agree by chance


def test_installed_dropout_scales_what_it_keeps_and_rests_in_evaluation() -> None:
    net = nn.Sequential(nn.Linear(4, 200), nn.Dropout(0.25), nn.Sequential(nn.Dropout(0.5)))
    installed = dropout.install(net)
    assert [module.p for module in installed] == [0.25, 0.5]
    dropout.set_keys(installed, torch.tensor([1, 2, 3], dtype=torch.int32))
    x = torch.ones(3, 200)
    assert installed[0](x).unique().tolist() == pytest.approx([0.0, 4 / 3])
    net.eval()
    assert torch.equal(installed[1](x), x)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_in_place_changes_its_input(p: float) -> None:
    """A model that called it and did not use its result trained without dropout."""
    layers = dropout.install(nn.Sequential(nn.Dropout(p, inplace=True), nn.Dropout(p)))
    dropout.set_keys(layers, torch.tensor([1, 2], dtype=torch.int32))
    weights = torch.ones(2, 9, requires_grad=True)
    x = weights * 3
    assert layers[0](x) is x
    layers[1].layer = 0
    expected = layers[1](torch.full((2, 9), 3.0))
    assert torch.equal(x, expected) and (x == 0).any()
    x.sum().backward()
    assert torch.equal(weights.grad, expected)


def test_dropout_layers_that_a_model_also_keeps_in_a_list_rest_in_evaluation() -> None:
    """Another object took the layer's place: the one in the list dropped in evaluation, too."""
    kept = nn.Dropout(0.5)
    net = nn.Sequential(kept, nn.Sequential(kept))
    dropped = dropout.install(net)
    assert kept is net[0] is dropped[0] is not dropped[1]
    assert [layer.layer for layer in dropped] == [0, 1]
    assert isinstance(dropped[0], nn.Dropout)
    x = torch.ones(3, 40)
    assert torch.equal(net.eval() and kept(x), x)
    dropout.set_keys(dropped, torch.arange(3, dtype=torch.int32))
    net.train()
    assert not torch.equal(kept(x), dropped[1](x))


def test_dropout_takes_rows_that_are_parts_of_a_sample() -> None:
    """Windows or tokens may be folded into the batch: the mask is still the sample's."""
    net = nn.Sequential(nn.Dropout(0.5))
    layers = dropout.install(net)
    dropout.set_keys(layers, torch.tensor([1, 2], dtype=torch.int32))
    folded = net(torch.ones(6, 10))
    dropout.set_keys(layers, torch.tensor([2], dtype=torch.int32))
    assert torch.equal(net(torch.ones(3, 10)), folded[3:])
    dropout.set_keys(layers, torch.tensor([1, 2], dtype=torch.int32))


def test_dropout_of_other_rows_than_the_batchs_is_torchs() -> None:
    """Tables of relative positions have dropout in timm's vit_relpos and swinv2_cr."""
    net, rows = nn.Sequential(nn.Dropout(0.5)), torch.ones(5, 10)
    dropout.set_keys(dropout.install(net), torch.tensor([1, 2], dtype=torch.int32))
    torch.manual_seed(3)
    dropped = net(rows)
    torch.manual_seed(3)
    assert torch.equal(dropped, torch.nn.functional.dropout(rows, 0.5))
