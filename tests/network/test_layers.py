"""Layers in CUDA kernels: values and gradients, on the simulated driver and on GPUs."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from conftest import make_config
from limits import limit
from simulated import Simulation
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import kernels as package
from lockstep.backends import backend_of
from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.kernels.pool import PoolKernel
from lockstep.kernels.sgd import SgdKernel
from lockstep.launch.ranks import run_ranks
from lockstep.network import dropout
from lockstep.network.convolution import Convolution
from lockstep.network.layers import INSTALLED, UNAVAILABLE, LocalResponseNorm, ReluMaxPool, install_kernels
from lockstep.network.low_precision import Update

pytestmark = pytest.mark.timeout(600)  # PyCUDA is built the first time
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
# batch, channels, rows, columns; n, k, alpha, beta: AlexNet's, GoogLeNet's, and others with large sums.
CASES: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((3, 96, 5, 7), (5, 2.0, 1e-4, 0.75)),
    ((2, 64, 3, 3), (5, 1.0, 2e-5, 0.75)),
    ((1, 8, 1, 1), (5, 2.0, 0.3, 0.75)),
    ((2, 16, 1, 5), (3, 0.7, 0.2, 0.5)),
    ((2, 24, 2, 1), (1, 1.0, 0.1, 1.3)),
    ((1, 16, 2, 2), (5, 0.1, 1e8, 0.75)),
]


def reference(x: torch.Tensor, form: tuple[Any, ...]) -> torch.Tensor:
    """Return the formula's values in x's precision; autograd computes the gradient."""
    n, k, alpha, beta = form
    channels = range(x.shape[1])
    near = [[j for j in channels if abs(i - j) <= n // 2] for i in channels]
    sums = torch.stack([(x[:, of] ** 2).sum(1) for of in near], 1)
    return x / (k + alpha * sums) ** beta


def example(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(sum(shape))
    x, gradient = (torch.randn(shape, generator=random).mul_(3).to(dtype) for _ in range(2))
    return tuple(t.to(memory_format=torch.channels_last) for t in (x, gradient))  # type: ignore[return-value]


def by_formula(shape: tuple[int, ...], form: tuple[Any, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    x, gradient = (tensor.double() for tensor in example(shape, dtype))
    y = reference(x.requires_grad_(), form)
    y.backward(gradient)
    assert x.grad is not None
    return [y.detach(), x.grad]


@pytest.mark.parametrize(("shape", "form"), CASES, ids=str)
def test_the_closed_form_is_the_gradient(shape: tuple[int, ...], form: tuple[Any, ...]) -> None:
    x, gradient = (tensor.double() for tensor in example(shape, torch.float32))
    norm = LocalResponseNorm(*form)
    y = norm(x.requires_grad_())
    y.backward(gradient)
    for found, expected in zip([y.detach(), x.grad], by_formula(shape, form, torch.float32), strict=True):
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(norm(x), y, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_way_in_lower_precision(dtype: torch.dtype) -> None:
    shape, form = CASES[0]
    x, gradient = example(shape, dtype)
    y = LocalResponseNorm(*form)(x.requires_grad_())
    y.backward(gradient)
    assert y.dtype == x.grad.dtype == dtype
    for found, expected in zip([y.detach(), x.grad], by_formula(shape, form, dtype), strict=True):
        bound = 1e-6 if dtype == torch.float32 else 2e-2
        assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


def start(simulation: Simulation | None) -> tuple[Any, str]:
    """Return the back end of a GPU, simulated or real, and torch's device."""
    if simulation:
        simulated.use(simulation)
    backend = backend_of("cuda:0")
    backend.start_computing(make_config())
    return backend, "cpu" if simulation else "cuda:0"


def normalise(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, dtype: torch.dtype
) -> list[list[np.ndarray]]:
    """Return the kernel's values and gradients of all cases, as float64 on the host."""
    backend, device = start(simulation)
    results = []
    for shape, form in CASES:
        norm = LocalResponseNorm(*form)
        implementations = install_kernels(nn.Sequential(norm), make_config(), backend.memory, backend.stream)
        assert implementations == {
            "lrn": INSTALLED,
            "dropout": "no such layer",
            "pool": "no such layer",
        }
        x, gradient = (tensor.to(device) for tensor in example(shape, dtype))
        assert norm.kernel is not None and norm.kernel.takes(x, norm)
        y = norm(x.requires_grad_())
        y.backward(gradient)
        assert x.grad is not None
        results.append([t.double().cpu().contiguous().numpy() for t in (y.detach(), x.grad)])
    return results


@pytest.fixture
def simulation_of(request: pytest.FixtureRequest) -> Simulation | None:
    if request.param == "gpu":
        return None
    simulation: Simulation = request.getfixturevalue("simulation").set(delay=500)
    return simulation


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_normalises_as_the_formula_in_float64(
    simulation_of: Simulation | None, dtype: torch.dtype
) -> None:
    (results,) = run_ranks(normalise, 1, simulation_of, dtype)
    for (shape, form), found in zip(CASES, results, strict=True):
        for ours, expected in zip(found, by_formula(shape, form, dtype), strict=True):
            # One rounding of the result, to 24 or 8 bits, and few in float32 before it.
            bound = 2e-6 if dtype == torch.float32 else 2.0**-8
            assert ((torch.from_numpy(ours) - expected).abs() <= bound * expected.abs() + 1e-5).all(), (
                shape,
                form,
            )


def launch_in_another_thread(rank: int, pipes: dict[int, Pipe], simulation: Simulation) -> str:
    """Return what PyCUDA says of a kernel that comes first in a thread, as one did in autograd's."""
    backend, _ = start(simulation)
    norm = LocalResponseNorm()
    install_kernels(nn.Sequential(norm), make_config(), backend.memory, backend.stream)  # type: ignore[attr-defined]
    assert norm.kernel is not None
    with ThreadPoolExecutor(1) as pool:
        return str(
            pool.submit(norm.kernel.forward, example((1, 8, 1, 1), torch.float32)[0], norm).exception()
        )


def test_a_thread_without_the_devices_context_can_launch_no_kernel(simulation: Simulation) -> None:
    """So torch has to launch one in autograd's thread of the device first: start_torch sees to it."""
    (problem,) = run_ranks(launch_in_another_thread, 1, simulation)
    assert problem == "cuFuncSetBlockShape failed: CUDA error 201"  # invalid context


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
def test_bfloat16_is_normalised_with_the_devices_own_roots_and_quotients(tmp_path: Path) -> None:
    """Exact ones would take about ten instructions each, and the kernel is bound by arithmetic."""
    source = Path(package.__file__).parent / "lrn.cu"
    command = ["nvcc", "-arch=sm_90", *package.OPTIONS, "-ptx", "-o", str(tmp_path / "ptx"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=limit(60))
    for entry in (tmp_path / "ptx").read_text().split(".entry ")[1:]:
        exact = any(operation in entry for operation in ("sqrt.rn.f32", "div.rn.f32"))
        assert exact == ("float32" in entry.partition("(")[0]), entry.partition("(")[0]


def drop(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, dtype: torch.dtype
) -> list[tuple[bytes, bytes]]:
    """Return outputs and gradients of torch and of the kernel, in turn, for odd sizes and several layers."""
    backend, device = start(simulation)
    results = []
    for shape, p in (((5, 4099), 0.5), ((3, 7, 2, 3), 0.3), ((4, 1), 0.9)):
        x, gradient = (torch.randn(shape).to(device, dtype) for _ in range(2))
        for which in ("none", "dropout"):
            model = nn.Sequential(nn.Dropout(p), nn.Dropout(p))
            layers = dropout.install(model)
            install_kernels(model, make_config(custom_kernels=which), backend.memory, backend.stream)
            assert (layers[0].kernel is not None) == (which == "dropout")
            keys = torch.arange(7, 7 + len(x), dtype=torch.int32, device=device)
            dropout.set_keys(layers, keys)
            given = x.clone().requires_grad_()
            y = layers[0](layers[1](layers[0](given)))  # one layer in two places
            y.backward(gradient)
            assert given.grad is not None
            bits = [t.detach().float().cpu().numpy().tobytes() for t in (y, given.grad)]
            results.append((bits[0], bits[1]))
    return results


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_drops_to_the_bits_of_torch(simulation_of: Simulation | None, dtype: torch.dtype) -> None:
    (results,) = run_ranks(drop, 1, simulation_of, dtype)
    for plain, ours in zip(results[::2], results[1::2], strict=True):
        assert plain == ours


def test_a_kernel_that_cant_be_built_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(driver: Any, name: str) -> None:
        raise UserError("no compiler")

    monkeypatch.setattr("lockstep.kernels.load", fail)
    memory: Any = SimpleNamespace(driver=None)
    norm = LocalResponseNorm()
    implementations = install_kernels(nn.Sequential(norm), make_config(), memory, None)
    assert implementations["lrn"] == f"{UNAVAILABLE}: no compiler"
    assert norm.kernel is None and norm(torch.ones(1, 3, 1, 1)).shape == (1, 3, 1, 1)


# batch, channels, rows, columns; the window's size and stride: AlexNet's, smallnet's, with gaps, the whole.
POOLS = [((2, 16, 7, 9), (3, 2)), ((3, 8, 6, 4), (2, 2)), ((1, 24, 8, 8), (2, 3)), ((2, 8, 5, 5), (5, 1))]


def pooling_example(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers that are often equal, often negative, one NaN, and a gradient for every output."""
    x, gradient = example(shape, dtype)
    x = x.round()
    x[0, 0, 0, 0] = torch.nan
    return x, gradient


def pool(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, dtype: torch.dtype
) -> list[list[np.ndarray]]:
    backend, device = start(simulation)
    results = []
    for shape, form in POOLS:
        layer = ReluMaxPool(*form)
        install_kernels(
            nn.Sequential(layer), make_config(custom_kernels="pool"), backend.memory, backend.stream
        )
        x, gradient = (tensor.to(device) for tensor in pooling_example(shape, dtype))
        assert layer.kernel is not None and layer.kernel.takes(x, layer)
        assert not layer.kernel.takes(x[:, :3], layer) and not layer.kernel.takes(x.contiguous(), layer)
        y = layer(x.requires_grad_())
        y.backward(gradient[:, :, : y.shape[2], : y.shape[3]])
        assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)
        results.append([t.float().cpu().contiguous().numpy() for t in (y.detach(), x.grad)])
    return results


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_pools_as_torch_in_float64(simulation_of: Simulation | None, dtype: torch.dtype) -> None:
    (results,) = run_ranks(pool, 1, simulation_of, dtype)
    for (shape, form), (values, gradients) in zip(POOLS, results, strict=True):
        x, gradient = (tensor.double() for tensor in pooling_example(shape, dtype))
        y = nn.functional.max_pool2d(torch.relu(x.requires_grad_()), *form)
        y.backward(gradient[:, :, : y.shape[2], : y.shape[3]])
        assert x.grad is not None
        assert np.array_equal(values, y.detach().numpy(), equal_nan=True), (shape, form)
        bound = 1e-6 if dtype == torch.float32 else 2.0**-8  # one rounding of a sum
        assert torch.allclose(torch.from_numpy(gradients).double(), x.grad, rtol=bound, atol=1e-5), (
            shape,
            form,
        )


def pool_behind(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, dtype: torch.dtype
) -> list[list[np.ndarray]]:
    """Return values, and gradients of pixels and biases: of the layer and of plain operations, in turn."""
    backend, device = start(simulation)
    results = []
    for n_channels, shape, form in (
        (16, (2, 16, 7, 9), (3, 2)),
        (8, (9, 8, 14, 12), (2, 2)),
        (3, (2, 3, 4, 4), (2, 2)),
    ):
        torch.manual_seed(1)
        layer, conv = ReluMaxPool(*form), Convolution(n_channels, n_channels, 1).to(device, dtype)
        install_kernels(
            nn.Sequential(layer), make_config(custom_kernels="pool"), backend.memory, backend.stream
        )
        bias = torch.zeros(16, dtype=dtype, device=device)[:n_channels].copy_(conv.bias)
        conv.bias.data = bias * 2
        conv.to(memory_format=torch.channels_last)
        x, gradient = (tensor.to(device) for tensor in example(shape, dtype))
        for way in (
            lambda given, layer=layer, conv=conv: layer.behind(conv, given),
            lambda given, form=form, conv=conv: torch.relu(
                nn.functional.max_pool2d(conv(given, adds_bias=False) + conv.bias[:, None, None], *form)
            ),
        ):
            given = x.clone().requires_grad_()
            conv.zero_grad()
            y = way(given)
            y.backward(gradient[:, :, : y.shape[2], : y.shape[3]])
            found = (y.detach(), given.grad, conv.bias.grad)
            results.append([tensor.double().cpu().contiguous().numpy() for tensor in found])
    return results


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_added_behind_the_maximum_gives_the_same_values(
    simulation_of: Simulation | None, dtype: torch.dtype
) -> None:
    (results,) = run_ranks(pool_behind, 1, simulation_of and simulation_of.set(biases=1), dtype)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, plain in zip(results[::2], results[1::2], strict=True):
        assert np.array_equal(ours[0], plain[0])
        ties = np.abs(ours[1] - plain[1]) > bound * np.abs(plain[1]).max()
        assert ties.mean() <= (0 if dtype == torch.float32 else 0.05)
        assert np.allclose(ours[2], plain[2], rtol=bound, atol=bound * np.abs(plain[2]).max())


def test_the_convolution_leaves_its_bias_to_a_kernel_only() -> None:
    asked: list[dict[str, bool]] = []
    conv, layer, x = Convolution(8, 8, 3), ReluMaxPool(2, 2), torch.randn(1, 8, 6, 6)
    conv.register_forward_hook(lambda module, given, words, y: asked.append(words), with_kwargs=True)
    plain = layer.behind(conv, x)
    layer.kernel = SimpleNamespace(adds_biases=True, takes=lambda *arguments: False)  # type: ignore[assignment]
    assert torch.allclose(layer.behind(conv, x), plain, rtol=1e-6)
    assert asked == [{}, {"adds_bias": False}]
    assert torch.equal(layer.behind(nn.Identity(), x), layer(x))


class Operations(TorchDispatchMode):
    """A dispatch mode that records the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_the_kernel_that_pools_is_all_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions only allocate what the kernel writes; nothing is copied into another layout."""
    launched = []
    monkeypatch.setattr(PoolKernel, "_launch", lambda self, function, *rest: launched.append(function))
    kernel = object.__new__(PoolKernel)
    kernel._forward, kernel._backward = ({torch.float32: way} for way in ("forward", "backward"))
    x, layer = example((2, 8, 7, 7), torch.float32)[0], ReluMaxPool(3, 2)
    with Operations() as operations:
        y, places = kernel.forward(x, layer)
        made = kernel.backward(y, places, x.shape, layer)
    assert made.shape == x.shape and made.is_contiguous(memory_format=torch.channels_last)
    assert launched == ["forward", "backward"]
    assert {name.split(".")[1] for name in operations.names} <= {"empty", "empty_like"}, operations.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_way_pools_first_with_the_same_bits(dtype: torch.dtype) -> None:
    for shape, form in POOLS:
        found = []
        for layer in (ReluMaxPool(*form), nn.Sequential(nn.ReLU(), nn.MaxPool2d(*form))):
            x, gradient = pooling_example(shape, dtype)
            y = layer(x.requires_grad_())
            y.backward(gradient[:, :, : y.shape[2], : y.shape[3]])
            assert x.grad is not None
            found.append([y.detach(), x.grad])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1)), (shape, form)


def in_doubles(update: Update, momentum: float, nesterov: bool) -> list[np.ndarray]:
    """Return weights, momenta and copies after a step, computed with NumPy as sgd.cu does."""
    weight, gradient = update.weight.numpy(), update.gradient.float().numpy()
    if update.decay:
        gradient = (gradient + update.decay * weight.astype(np.float64)).astype(np.float32)
    found = []
    if update.momenta is not None:
        velocity = momentum * update.momenta.numpy().astype(np.float64) + gradient
        found.append(velocity := velocity.astype(np.float32))
        gradient = velocity
        if nesterov:
            before = update.gradient.float().numpy().astype(np.float64)
            before = (before + update.decay * weight.astype(np.float64)).astype(np.float32)
            gradient = (before + momentum * velocity.astype(np.float64)).astype(np.float32)
    weight = (weight.astype(np.float64) - update.rate * gradient.astype(np.float64)).astype(np.float32)
    copies = [] if update.copy is None else [torch.from_numpy(weight).bfloat16().float().numpy()]
    return [weight, *found, *copies]


def some_updates(device: str, has_momenta: bool) -> list[Update]:
    """Return more tensors than one launch takes, of odd sizes and different rates."""
    random, updates = torch.Generator().manual_seed(3), []
    for number in range(70):
        n = (1, 3, 4, 7, 1030)[number % 5]
        tensors = [torch.randn(n, generator=random).to(device) for _ in range(3)]
        copy = torch.zeros(n, dtype=torch.bfloat16, device=device)
        update = Update(tensors[0], copy if number % 11 else None, tensors[1].bfloat16())
        update.momenta = tensors[2] if has_momenta else None
        update.rate, update.decay = 0.1 / (1 + number % 3), (5e-4, 0.0)[number % 2]
        updates.append(update)
    whole = torch.randn(9, generator=random).bfloat16().to(device)
    updates[5].gradient = whole[1:2]  # begins in the middle of eight bytes
    return updates


def take_a_step(
    rank: int, pipes: dict[int, Pipe], simulation: Simulation | None, momentum: float, nesterov: bool
) -> list[list[np.ndarray]]:
    backend, device = start(simulation)
    updates = some_updates(device, momentum > 0)
    SgdKernel(backend.memory, backend.stream).step(updates, momentum, nesterov)
    backend.stream.synchronize()
    tensors = [[each.weight, each.momenta, each.copy] for each in updates]
    return [[tensor.float().cpu().numpy() for tensor in each if tensor is not None] for each in tensors]


@pytest.mark.parametrize("simulation_of", ["simulated", GPU], indirect=True)
@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.9, False), (0.8, True), (0.0, False)], ids=["momentum", "nesterov", "plain"]
)
def test_the_kernel_steps_and_writes_the_copies(
    simulation_of: Simulation | None, momentum: float, nesterov: bool
) -> None:
    (results,) = run_ranks(take_a_step, 1, simulation_of, momentum, nesterov)
    for update, found in zip(some_updates("cpu", momentum > 0), results, strict=True):
        for ours, expected in zip(found, in_doubles(update, momentum, nesterov), strict=True):
            if simulation_of is None:  # a device's compiler may contract in doubles
                assert np.allclose(ours, expected, rtol=2e-7 if ours is not found[-1] else 2.0**-8)
            else:
                assert ours.tobytes() == expected.tobytes()


def test_every_block_of_a_step_has_numbers_to_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short tensors beside a long one get as many blocks as they fill."""
    launched = []
    kernel = object.__new__(SgdKernel)
    kernel._most_blocks, kernel._stream = 2112, None
    kernel._function = lambda rows, *numbers, grid, **rest: launched.append((rows, grid, numbers[-1]))
    sizes = [(9 << 20) + 3, 96, 1024, 1025, 1, *[7] * 60]
    updates = [Update(torch.empty(n), None, torch.empty(n, dtype=torch.bfloat16)) for n in sizes]
    kernel.step(updates, 0.9, False)
    found = []
    for rows, grid, n_tensors in launched:
        spans = [(int(row["first_block"]), int(row["n_blocks"])) for row in rows[:n_tensors]]
        assert grid == (sum(n for _, n in spans), 1)
        assert [first for first, _ in spans] == [sum(n for _, n in spans[:i]) for i in range(len(spans))]
        found += [n for _, n in spans]
    assert found == [2112, 1, 1, 2, *[1] * 61]
