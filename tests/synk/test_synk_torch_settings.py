"""The caller's settings of torch apply to callables on all ranks, and to nothing else there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from synk_teams import team

import lockstep.synk as synk
from lockstep.synk import torch_settings


@pytest.fixture(scope="module", params=[1, 2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    with team(request.param) as size:
        yield size


def make_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def everything() -> Iterator[None]:
    with ExitStack() as stack:
        for make in list(SETTINGS.values())[:-1]:
            stack.enter_context(make())
        yield


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": lambda: torch.set_grad_enabled(True),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16, off": lambda: torch.autocast("cpu", torch.float16, enabled=False),
    "float64": lambda: default_dtype(torch.float64),
    "everything": everything,
}


def state() -> list[bool]:
    return [
        torch.get_default_dtype() == torch.float64,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") == torch.float16,
    ]


class Probe:
    """An object that notes the settings with which it is unpickled: those of a worker between two calls."""

    def __init__(self) -> None:
        self.found = state()

    def __reduce__(self) -> Any:
        return type(self), ()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("num_slices", [1, 2])
def test_all_ranks_compute_with_the_callers_settings(ranks: int, name: str, num_slices: int) -> None:
    net = synk.share(make_net())

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        seen = torch.tensor([*state(), y.requires_grad, y.dtype == torch.bfloat16])
        scale = torch.linspace(0.1, 0.9, 3)  # of the default dtype
        return torch.cat([y.detach() * scale, seen.expand(len(x), -1)], 1).double()

    f = synk.function(compute, "gather", updates=[synk.weights(net)])
    synk.distribute()
    x = np.random.default_rng(0).normal(size=(2 * ranks, 4)).astype("float32")
    with SETTINGS[name]():
        parts = np.split(x, ranks * num_slices)
        expected = torch.cat([compute(torch.from_numpy(part)) for part in parts]).numpy()
        assert f(x, num_slices=num_slices).tobytes() == expected.tobytes()

    probe = Probe()
    between = synk.function(lambda: torch.tensor(probe.found), "gather")
    synk.distribute()
    assert between().reshape(ranks, -1).tolist() == [[False, True, False, False, False]] * ranks
    assert f(x).shape == (2 * ranks, 10)


def settings_of_process() -> list[bool]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_mkldnn_deterministic(),
        torch.get_float32_matmul_precision() == "medium",
        torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled(),
    ]


@pytest.mark.slow
def test_all_ranks_have_the_settings_of_the_callers_process(ranks: int) -> None:
    f = synk.function(lambda: torch.tensor([settings_of_process()]), "gather")
    synk.distribute()
    before = settings_of_process()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        with (
            torch.backends.mkldnn.flags(enabled=False, deterministic=True),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
        ):
            assert f().tolist() == [[True, False, True, True, True]] * ranks
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert f().tolist() == [before] * ranks == [[False, True, False, False, False]] * ranks


def test_a_collective_in_inference_mode_leaves_weights_that_train(ranks: int) -> None:
    net = synk.share(make_net())

    def backward(x: torch.Tensor) -> torch.Tensor:
        net(x).sum().backward()
        return net.weight.grad.sum()

    f = synk.function(backward, "sum", updates=[synk.grads(net), synk.weights(net)])
    synk.distribute()
    with torch.inference_mode():
        synk.broadcast(synk.weights(net), np.ones(15, "f4"))
        synk.all_reduce(synk.weights(net))
    assert f(np.ones((ranks, 4), "f4")) == 12 * ranks


def test_settings_are_restored_when_the_computation_fails() -> None:
    with everything():
        captured = torch_settings.capture()
    before = torch_settings.capture()
    with pytest.raises(ArithmeticError), torch_settings.use(captured):
        assert torch_settings.capture() == captured
        raise ArithmeticError
    assert torch_settings.capture() == before


def test_autocast_around_several_calls_casts_the_current_weights(ranks: int) -> None:
    net = synk.share(make_net())

    def grow() -> None:
        with torch.no_grad():
            net.weight.mul_(2)

    f = synk.function(lambda x: net(x).detach().float(), "gather")
    g = synk.function(grow, None, updates=[synk.weights(net)])
    synk.distribute()
    x = np.ones((ranks, 4), "f4")
    with torch.autocast("cpu", torch.bfloat16):
        first = f(x)
        g()
        second = f(x)
    assert (first == first[0]).all() and (second == second[0]).all()
    assert not np.array_equal(first, second)


def test_an_output_of_autocasts_dtype_says_what_to_return(ranks: int) -> None:
    net = synk.share(make_net())
    f = synk.function(net, "gather", name="f")
    synk.distribute()
    with (
        torch.autocast("cpu"),
        pytest.raises(TypeError, match=r"f: output 0 is torch.bfloat16, .* Return y\.float"),
    ):
        f(np.ones((ranks, 4), "f4"))


def test_a_sparse_output_is_refused_in_the_words_of_torch(ranks: int) -> None:
    f = synk.function(lambda x: torch.eye(len(x)).to_sparse(), "gather", name="f")
    synk.distribute()
    with pytest.raises(
        TypeError, match=r"^f: output 0 is Tensor: can't convert Sparse .* Use Tensor\.to_dense\(\)"
    ):
        f(np.ones((ranks, 4), "f4"))
