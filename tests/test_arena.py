"""The arena's views, theano_alexnet's update rules, the learning rate's policies, and dropout by sample."""

import numpy as np
import pytest
import torch
from conftest import make_config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep import dropout
from lockstep.arena import ALIGNMENT, Arena
from lockstep.errors import UserError
from lockstep.memory.host import HostMemory
from lockstep.optimizer import make_optimizer
from lockstep.schedule import learning_rate


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
    with pytest.raises(UserError, match="this one has no 'weights/extra'"):
        arena.load({**good, "weights/extra": torch.ones(1)}, "file")
    assert torch.equal(arena.flat, before)
    arena.load(good, "file")
    assert arena.tensors["weights/bias"].eq(1).all()


def test_digests_show_a_single_bit() -> None:
    arena = Arena(nn.Linear(4, 4), HostMemory())
    before = arena.digests()
    arena.tensors["weights/bias"][2] *= 1 + 2e-7
    changed = [name for name, digest in arena.digests().items() if digest != before[name]]
    assert changed == ["weights/bias"]


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
