"""Less common functions of torch give its results on arrays, or are refused in one clear line."""

import contextlib
import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flow_programs import run_program
from limits import limit
from torch import nn
from torch.nn.utils import parametrizations

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow.devices import Cpu


@pytest.fixture(scope="module")
def device() -> Iterator[Cpu]:
    made = flow.cpus(1, threads=1)
    with flow.Engine(made):
        yield made[0]


def test_writes_to_data_do_not_count_for_backward(device: Cpu) -> None:
    """Torch allows it: a loop may clamp `weight.data` between forward and backward."""
    weights = [torch.ones(3, requires_grad=True), flow.array(torch.ones(3)).requires_grad_()]
    for weight in weights:
        made = weight.exp()
        weight.data.clamp_(max=0.5)
        made.data.mul_(2)
        made.sum().backward()
        assert weight._version == 0
    assert torch.equal(weights[0].detach(), weights[1].tensor())
    assert weights[0].grad is not None and weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad.tensor())  # type: ignore[attr-defined]


def written_view(x: torch.Tensor) -> torch.Tensor:
    view = (x * 2)[:3, :3]
    view.t_()
    view.mul_(x[1:, :3])
    return view


def view_of_a_transposed_base(x: torch.Tensor) -> torch.Tensor:
    base = x * 2
    view = base[:2]
    base.t_()
    return view * x[:2]


def view_of_a_squeezed_base(x: torch.Tensor) -> torch.Tensor:
    base = x[None] * 2
    view = base[0]
    base.squeeze_(0)
    return view * x


def base_without_gradient(x: torch.Tensor) -> torch.Tensor:
    base = torch.ones(4, 4)
    view = base[:3, :3]
    base.t_()
    base.mul_(x)
    return view * x[1:, :3]


def view_of_a_transposed_view(x: torch.Tensor) -> torch.Tensor:
    base = x * 2
    part = base[:3, :3].t_()[0]
    base.mul_(x)
    return part * x[1, :3]


def view_that_is_transposed_without_gradients(x: torch.Tensor) -> torch.Tensor:
    view = (x * 2)[:3, :3]
    with torch.no_grad():
        view.t_()
    return view * x[1:, :3]


def unaffected(x: torch.Tensor) -> torch.Tensor:
    base = (x @ x).t_().unsqueeze_(0)
    view = (x * 2)[1]
    view.unsqueeze_(1)
    heads = (x @ x).view(4, 2, 2)
    heads.transpose_(0, 1).transpose_(1, 2)
    data = torch.ones(4, 4)[:3]
    data.t_().mul_(2)
    own = x * 3
    whole = own.flatten().sum()  # its view no longer exists
    transposed = own[:2].t_()[0] * 2  # nor does this one, when `own` is written
    own.mul_(x).t_()
    total = whole + (heads * x.view(2, 2, 4)).sum() + (data * x[:, :3]).sum() + transposed.sum()
    return base.mul_(x).squeeze_(0) * view * own + total


@pytest.mark.parametrize(
    "function, refused",
    [
        (written_view, "mul_ writes the memory of a view"),
        (view_of_a_transposed_base, "t_ of an array that has views"),
        (view_of_a_squeezed_base, "squeeze_ of an array that has views"),
        (base_without_gradient, "mul_ writes the memory of a view"),
        (view_of_a_transposed_view, "mul_ writes the memory of a view"),
        (view_that_is_transposed_without_gradients, "t_ of a view while gradients are off"),
        (unaffected, ""),
    ],
)
def test_gradients_after_a_shape_has_changed_in_place_are_torchs_or_refused(
    device: Cpu, function: Callable[[torch.Tensor], torch.Tensor], refused: str
) -> None:
    """Torch makes views of a subclass's tensors anew without that change."""
    given = torch.arange(16.0).view(4, 4)
    with flow.device(device), torch.no_grad() if refused else contextlib.nullcontext():
        assert torch.equal(function(flow.array(given)).tensor(), function(given.clone()))  # type: ignore[attr-defined]
    own, array = given.clone().requires_grad_(), flow.array(given).requires_grad_()
    function(own).sum().backward()
    with flow.device(device):
        if refused:
            with pytest.raises(UserError, match=refused):
                function(array)
        else:
            function(array).sum().backward()
            assert array.grad is not None and torch.equal(array.grad.tensor(), own.grad)  # type: ignore[attr-defined,arg-type]


def test_a_call_does_not_write_where_a_views_gradient_would_be_wrong(device: Cpu) -> None:
    base = flow.array(torch.arange(16.0).view(4, 4)).requires_grad_() * 1
    view = base[:3, :3].t_()
    with pytest.raises(UserError, match=r"flow\.call writes the memory of a view"):
        flow.call(torch.Tensor.mul_, base, 2, writes=[base])
    del view
    flow.call(torch.Tensor.mul_, base, 2, writes=[base])
    assert base.sum().item() == 240


def test_arrays_made_in_inference_mode_can_be_written_there(device: Cpu) -> None:
    with torch.inference_mode():
        for data in (torch.ones(3), [1.0, 1.0, 1.0]):
            made = flow.array(data)
            made.add_(1)
            made[0] = 5
            assert made.tolist() == [5, 2, 2] and made.is_inference()
        assert torch.is_inference_mode_enabled()


def test_a_shallow_copy_is_an_array_on_the_same_memory(device: Cpu) -> None:
    layer = flow.arrays(nn.Linear(3, 1))
    for original in (torch.ones(3), flow.ones((3,)), nn.Parameter(torch.ones(3)), layer.bias):
        made = copy.copy(original)
        assert made is not original and type(made) is type(original) and made.is_leaf
        assert isinstance(made, nn.Parameter) == isinstance(original, nn.Parameter) == made.requires_grad
        made.detach().fill_(7)
        assert set(original.tolist()) == {7}


@pytest.mark.parametrize("inside", [False, True])
def test_copies_have_the_attributes_that_torchs_have(device: Cpu, inside: bool) -> None:
    own = torch.ones(3, requires_grad=True)
    own.scale = [0.5]  # type: ignore[attr-defined]
    for original in (own, flow.array(own).requires_grad_()):
        vars(original).setdefault("scale", own.scale)  # type: ignore[attr-defined]
        with flow.device(device) if inside else contextlib.nullcontext():
            shallow, deep = copy.copy(original), copy.deepcopy(original)
        assert shallow.scale is own.scale and deep.scale == own.scale  # type: ignore[attr-defined]
        assert deep.scale is not own.scale  # type: ignore[attr-defined]


@pytest.mark.parametrize("parametrize", [parametrizations.orthogonal, parametrizations.spectral_norm])
def test_parametrizations(device: Cpu, parametrize: Callable[[nn.Module], nn.Module]) -> None:
    """torch gives the original parameter the memory of its parametrization's inverse."""
    linear = nn.Linear(3, 3)
    torch.manual_seed(0)
    plain = parametrize(linear)
    with flow.device(device):
        arrays = parametrize(flow.arrays(nn.Linear(3, 3)))
        arrays.load_state_dict(plain.state_dict())
        made = arrays(torch.ones(2, 3))
        made.square().sum().backward()
    expected = plain(torch.ones(2, 3))
    expected.square().sum().backward()
    torch.testing.assert_close(made.tensor(), expected.detach())
    for array, tensor in zip(arrays.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(array.grad.tensor(), tensor.grad)


def test_an_array_takes_the_memory_of_another_array_only(device: Cpu) -> None:
    first, second = flow.array([1.0, 2.0]), flow.array([[3.0], [4.0], [5.0]])
    assert first.set_(second) is first
    second += 1
    assert first.tensor().tolist() == [[4], [5], [6]]
    with pytest.raises(UserError, match="can't be given other memory"):
        first.set_(torch.ones(3))


def test_an_array_moved_to_the_meta_device_is_an_ordinary_tensor(device: Cpu) -> None:
    with flow.device(device):
        weight = flow.array(torch.ones(4, 3)).t()
        for made in (weight.to("meta"), torch.empty_like(weight, device="meta")):
            assert type(made) is torch.Tensor and made.is_meta
            assert made.shape == (3, 4) and made.stride() == weight.stride()
        assert nn.Linear(2, 3).to("meta").weight.is_meta


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a: a.to_sparse_csr(), "_to_sparse_csr makes a tensor of layout torch.sparse_csr"),
        (lambda a: a.to_mkldnn(), "to_mkldnn makes a tensor of layout torch._mkldnn"),
        (lambda a: torch.quantize_per_tensor(a, 0.1, 0, torch.qint8), "an array can't be quantized"),
        (lambda a: torch.nested.nested_tensor([a[0], a[1]]), "an array can't be a nested tensor"),
        (lambda a: torch.nested.as_nested_tensor([a, a]), "an array can't be a nested tensor"),
        (lambda a: a.apply_(float), "apply_ reads the memory of a tensor in C"),
    ],
)
def test_what_an_array_cannot_be_is_refused(device: Cpu, function: Any, message: str) -> None:
    with flow.device(device), pytest.raises(UserError, match=message):
        function(torch.eye(2))


def test_a_module_with_a_tensor_without_values_stays_as_it_is(device: Cpu) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match="has no values"):
        flow.arrays(module)
    assert not any(isinstance(parameter, flow.Array) for parameter in module.parameters())


WITHOUT_MEMORY = """
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from lockstep import flow
from lockstep.errors import UserError

freed, x = torch.ones(2), flow.ones(2)
freed.untyped_storage().resize_(0)
program, module = flow.capture(lambda given: given + 1, x), nn.Linear(2, 2)
module.weight = nn.Parameter(torch.ones(2))
for given in (
    FakeTensorMode().from_tensor(torch.ones(2)),
    TwoTensor(torch.ones(2), torch.ones(2)),
    freed,
):
    module.register_buffer("other", given)
    for use in (flow.array, program, x.copy_, lambda _: flow.arrays(module)):
        try:
            use(given)
        except UserError as error:
            print("<string>" in str(error), "has no memory" in str(error), type(module.weight))
zeros = torch._efficientzerotensor(2)
print(flow.array(zeros).tolist(), x.tolist(), x.copy_(zeros).tolist())
"""


@pytest.mark.slow
def test_a_tensor_without_memory_is_refused_before_it_is_read() -> None:
    """Reading it would end the process."""
    *refused, zeros = run_program(WITHOUT_MEMORY).split("\n")[:-1]
    assert refused == ["True True <class 'torch.nn.parameter.Parameter'>"] * 12
    assert zeros == "[0.0, 0.0] [1.0, 1.0] [0.0, 0.0]"


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    ("loss", "label"),
    [(F.multi_margin_loss, 1), (F.multi_margin_loss, [1]), (F.multilabel_margin_loss, [1, 0, -1])],
)
def test_margin_losses_of_one_sample(
    device: Cpu, loss: Callable[..., torch.Tensor], label: Any, reduction: str
) -> None:
    """torch predicts a wrong shape for some of them."""
    made = []
    for scores in (torch.tensor([0.5, 0.25, 1]), flow.array([0.5, 0.25, 1])):
        scores.requires_grad_()
        value = loss(scores, torch.tensor(label), reduction=reduction)
        value.sum().backward()
        made.append((value.shape, value.tolist(), scores.grad.tolist()))
    assert made[0] == made[1]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.soft_margin_loss])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_targets_with_another_dtype(
    device: Cpu, loss: Callable[..., torch.Tensor], reduction: str
) -> None:
    """Targets that come from NumPy are often float64."""
    data, target = torch.randn(4, 3).t(), torch.randn(3, 4).double()
    scores, array = data.clone().requires_grad_(), flow.array(data).requires_grad_()
    expected = loss(scores, target, reduction=reduction)
    try:
        expected.sum().backward()
    except RuntimeError as error:  # torch 2.11: mse_loss
        pytest.skip(f"this version of torch: {error}")
    with flow.device(device):
        found = loss(array, target, reduction=reduction)
        found.sum().backward()
    assert torch.equal(found.detach().tensor(), expected.detach())  # type: ignore[attr-defined]
    assert scores.grad is not None and array.grad is not None
    assert array.grad.dtype is torch.float32 and array.grad.stride() == scores.grad.stride()
    assert torch.equal(array.grad.tensor(), scores.grad)  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_losses_of_no_samples_have_gradients(device: Cpu, loss: Callable[..., torch.Tensor]) -> None:
    """A mask may choose none: the mean is not a number, and the gradients are empty."""
    with flow.device(device):
        scores = flow.zeros((3, 2)).requires_grad_()
        loss(scores[:0], torch.zeros(0, 2)).backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0, 0]] * 3


def test_layer_norm_of_no_samples_with_less_precision_than_its_parameters(device: Cpu) -> None:
    with flow.device(device):
        layer = flow.arrays(nn.LayerNorm(4))
        layer(torch.zeros(0, 4, dtype=torch.bfloat16)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.dtype is torch.float32
        assert parameter.grad.tolist() == [0] * 4


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_images_are_enlarged(device: Cpu, mode: str, n: int) -> None:
    with flow.device(device):
        images = flow.zeros((0, 3, *[4] * n)).requires_grad_()
        made = F.interpolate(images, scale_factor=2, mode=mode)
        made.sum().backward()
    assert made.tolist() == [] and made.shape == (0, 3, *[8] * n)
    assert images.grad is not None and images.grad.shape == images.shape


def test_marks_of_parameters_stay(device: Cpu) -> None:
    layer = nn.Linear(2, 2)
    layer.bias.no_decay = True  # type: ignore[attr-defined]
    assert flow.arrays(layer).bias.no_decay  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["memory", "copied", "place", "wait"])
def test_a_mark_with_a_name_that_arrays_use_is_refused(device: Cpu, name: str) -> None:
    layer, marked = flow.arrays(nn.Linear(2, 2)), nn.Linear(2, 2)
    setattr(marked.bias, name, 1)
    with pytest.raises(UserError, match=f"attribute '{name}' has a name that arrays use themselves"):
        flow.arrays(marked)
    with pytest.raises(UserError, match=f"attribute '{name}' has a name that arrays use themselves"):
        setattr(layer.bias, name, 1)
    assert not isinstance(marked.weight, flow.Array)
    assert layer(torch.ones(2)).shape == (2,)


def test_marks_of_buffers_stay(device: Cpu) -> None:
    layer = nn.BatchNorm1d(2)
    layer.running_mean.shared = True  # type: ignore[union-attr]
    assert flow.arrays(layer).running_mean.shared  # type: ignore[union-attr]


def test_a_sparse_array_does_not_see_later_writes_to_what_it_was_made_of(device: Cpu) -> None:
    """SparseAdam changes the values behind an addition, which a checkpoint may hold back."""
    values, total, go = flow.array([1.0, 2.0]), flow.zeros((5,)), threading.Event()
    flow.call(lambda _: go.wait(limit(20)), total)
    total.add_(torch.sparse_coo_tensor(flow.array([[0, 3]]), values, (5,)))
    values.mul_(100).wait()
    go.set()
    assert total.tolist() == [1, 0, 0, 2, 0]


def test_views_of_a_sparse_array_share_its_memory_from_any_device() -> None:
    devices = flow.cpus(2)
    devices[1].memory = "far"
    with flow.Engine(devices):
        sparse = flow.array(torch.eye(2).to_sparse())
        with flow.device(devices[1]):
            sparse.detach().mul_(2)
            sparse._values().mul_(3)
            assert sparse.detach().place is devices[0]
            total = flow.zeros((2, 2)).add_(sparse)
    assert total.tolist() == sparse.to_dense().tolist() == [[6, 0], [0, 6]]


def test_writes_to_the_values_of_a_sparse_array_are_in_program_order(device: Cpu) -> None:
    """Sparse gradients are clipped so: p.grad._values().mul_(factor)."""
    sparse, factor, total = flow.array(torch.eye(2).to_sparse()), flow.ones(()), flow.zeros((2, 2))
    go = threading.Event()
    flow.call(lambda value: (go.wait(limit(20)), value.fill_(5)), factor, writes=[factor])
    sparse._values().mul_(factor)
    total.add_(sparse)
    (flow.ones(()) + 1).wait()  # the addition would have run before this one
    go.set()
    assert total.tolist() == [[5, 0], [0, 5]]


def test_an_output_whose_size_depends_on_values_has_it_or_fails(device: Cpu) -> None:
    x, fits, empty = flow.array([1.0, 0.0, 2.0]), flow.zeros((2,)), flow.zeros((0,))
    assert torch.masked_select(x, x > 0, out=fits) is fits and fits.tolist() == [1, 2]
    with pytest.raises(flow.OperationError, match=r"would change an array from \(0,\) to \(2,\) in place"):
        torch.masked_select(x, x > 0, out=empty)
    assert empty.fill_(7).tolist() == []


def test_views_of_arrays_in_inference_mode(device: Cpu) -> None:
    """A view of an ordinary tensor is one, as in torch, and can be written afterwards."""
    x, layer = flow.zeros((2, 3)), flow.arrays(nn.Linear(3, 2))
    with torch.inference_mode():
        x[0] = 5
        views = [x.detach(), x[1], x.t(), *x.chunk(2, 1), layer.state_dict()["weight"]]
        assert x.clone().t().is_inference() and copy.deepcopy(layer).weight.shape == (2, 3)
    assert not any(view.is_inference() for view in views)
    views[1].add_(1)
    assert x.tolist() == [[5, 5, 5], [1, 1, 1]]
    x.requires_grad_()[0].sum().backward()
    assert x.grad.tolist() == [[1, 1, 1], [0, 0, 0]]  # type: ignore[union-attr]


def test_views_of_arrays_made_in_inference_mode(device: Cpu) -> None:
    weight = flow.ones(3).requires_grad_()
    with torch.inference_mode(), flow.device(device):
        made = torch.ones(3) * 2
    for view in (made[:3], made.view(3), made.expand(3), made.detach()):
        assert view.is_inference()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            weight * view  # writes into it are not counted, and would change the gradient


def test_conjugates_in_inference_mode(device: Cpu) -> None:
    """To torch the copy is a view, so it has a version if its original has one."""
    z, ordinary = flow.array([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j, 3 - 1j])
    with torch.inference_mode(), flow.device(device):
        made = [z.conj(), z.view(2, 1).mH[0], ordinary.conj()]
        assert torch.vdot(z, z).item() == 15 and z.clone().conj().is_inference()
        assert torch._neg_view(z).tolist() == [-1 - 2j, -3 + 1j]
    assert all(each.tolist() == [1 - 2j, 3 + 1j] and not each.is_inference() for each in made)
    made[0].add_(1)  # it can be written outside, too


def test_operations_that_consist_of_others_in_inference_mode(device: Cpu) -> None:
    """Torch passes them on as a whole there. Some return a view only if they can, and else a copy."""
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(6),
        lambda x: x.t().flatten(),
        lambda x: x.double(),
        lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    ]
    x = torch.arange(6.0).view(2, 3)
    expected, layer = [function(x) for function in functions], nn.MultiheadAttention(4, 1)
    array = flow.array(x)
    with torch.inference_mode():
        outside = [function(array) for function in functions]
        attended, _ = layer(*[torch.ones(2, 1, 4)] * 3)
        with flow.device(device):
            inside = [function(array) for function in functions]
            counts = nn.functional.one_hot(array.long())  # it makes zeros, and writes them
            made, _ = flow.arrays(layer)(*[torch.ones(2, 1, 4)] * 3)
    for found in (outside, inside):
        assert all(torch.equal(one.tensor(), two) for one, two in zip(found, expected, strict=True))
    torch.testing.assert_close(made.tensor(), attended)
    assert torch.equal(counts.tensor(), nn.functional.one_hot(x.long()))


def test_a_trace_that_would_take_an_array_for_a_constant_is_refused(device: Cpu) -> None:
    x = torch.ones(3)
    assert torch.func.linearize(torch.sin, x)[1](x).allclose(x.cos())
    refused = r"would take an array for a constant: give it array.tensor\(\) outside of flow.device"
    with pytest.raises(UserError, match=refused):
        torch.func.linearize(torch.sin, flow.array(x))
    for given in (x, flow.array(x)):
        with flow.device(device), pytest.raises(UserError, match=refused):
            torch.func.linearize(torch.sin, given)[1](x)


def test_attention_leaves_ordinary_random_numbers_alone() -> None:
    """torch marks its kernel as random: a worker that ran it had the generator, which threads share."""
    torch.manual_seed(3)
    wanted = [torch.rand(()).item() for _ in range(40)]
    with flow.Engine(flow.cpus(1, threads=1)) as engine:
        x = flow.array(torch.randn(4, 8, 256, 64))
        x.wait()
        torch.manual_seed(3)
        with flow.device(engine.devices[0]):
            for _ in range(8):
                x = F.scaled_dot_product_attention(x, x, x)
        drawn = []
        for _ in range(40):
            drawn.append(torch.rand(()).item())
            time.sleep(2e-3)
        assert drawn == wanted


def test_attention_that_needs_no_weights(device: Cpu) -> None:
    """Without gradients torch computes it in one operation, which then makes no second result."""
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    lazy = flow.arrays(copy.deepcopy(layer))
    with torch.no_grad():
        made, arrays = layer(x, x, x, need_weights=False)[0], [flow.array(x)] * 3
        torch.testing.assert_close(lazy(*arrays, need_weights=False)[0].tensor(), made)


def test_storages_of_ordinary_tensors_are_copied_inside_of_a_device(device: Cpu) -> None:
    """Torch copies them in C++ as tensors, for instance to send a tensor to a spawned process."""
    x = torch.arange(3.0)
    with flow.device(device):
        clone = x.untyped_storage().clone()
        assert x.share_memory_().is_shared()
        with pytest.raises(flow.CaptureError, match="copy_ writes an ordinary tensor"):
            flow.capture(lambda y: (clone.copy_(x.untyped_storage()), y)[1], x)
    assert x.tolist() == [0, 1, 2] and clone.tolist() == x.untyped_storage().tolist()


def test_an_array_is_not_sent_to_another_process(device: Cpu) -> None:
    """Torch would send a file descriptor of a temporary tensor."""
    with flow.device(device):
        model = flow.arrays(nn.Linear(2, 1))
    for sent in (model.bias, model):
        with pytest.raises(UserError, match=r"can't be sent to another process: send array.tensor\(\)"):
            ForkingPickler.dumps(sent)


def test_a_file_of_torchs_old_format_is_refused_inside_of_a_device(device: Cpu) -> None:
    """For that format torch makes all tensors first, and reads their values into the memory afterwards."""
    file = io.BytesIO()
    torch.save([torch.ones(3)], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with flow.device(device), pytest.raises(UserError, match=r"format before torch 1\.6: load it outside"):
        torch.load(file)
    file.seek(0)
    assert torch.load(file)[0].tolist() == [1, 1, 1]
    with flow.device(device):  # this reads a memory before it makes the tensor
        assert pickle.loads(pickle.dumps(torch.ones(3))).tolist() == [1, 1, 1]


def test_integers_in_inference_mode_overflow_as_torchs_do(device: Cpu) -> None:
    heights, places = torch.tensor([200, 100], dtype=torch.uint8), torch.tensor([3, 1], dtype=torch.uint8)
    with torch.inference_mode():
        area = torch.trapezoid(flow.array(heights), flow.array(places))
        assert area.item() == torch.trapezoid(heights, places).item() > 0  # the width is not -2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x << 3,
        lambda x: x >> 1,
        lambda x: x[0] << 2,
        lambda x: x << torch.tensor([1, 2], dtype=torch.int8),
        lambda x: x**True,
    ],
)
def test_operators_of_bools_and_integers(device: Cpu, function: Callable[[Any], Any]) -> None:
    """torch's kernels have the dtypes of type promotion, and its prediction refuses bools or has others."""
    bools = torch.tensor([True, False])
    made, captured = function(flow.array(bools)), flow.capture(function, bools)(bools)
    wanted = function(bools)
    for found in (made, captured):
        assert found.dtype is wanted.dtype and found.tolist() == wanted.tolist()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_sums_of_bfloat16_embeddings(device: Cpu, mode: str) -> None:
    """Their kernel makes no notes for backward, which torch does not predict."""
    weight, rows, first = torch.randn(5, 3).bfloat16(), torch.tensor([1, 2, 4, 1]), torch.tensor([0, 3])
    results = []
    for own in (weight.clone(), flow.array(weight)):
        own.requires_grad_()
        made = nn.functional.embedding_bag(rows, own, first, mode=mode)
        made.sum().backward()
        results.append((made.tolist(), own.grad.tolist()))  # type: ignore[union-attr]
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_that_end_with_a_last_offset(device: Cpu, mode: str) -> None:
    """Without gradients torch predicts other shapes than its kernel makes."""
    weight, rows, first = torch.randn(5, 3), torch.tensor([1, 2, 4, 1]), torch.tensor([0, 0, 3, 4])
    results = []
    for make in (torch.clone, flow.array):
        for scope in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with scope():
                bags = nn.functional.embedding_bag(
                    rows, make(weight), first, mode=mode, include_last_offset=True
                )
                results.append(bags.tolist())
    assert results == [results[0]] * 6 and len(results[0]) == 3


def test_complex_numbers_have_gradients(device: Cpu) -> None:
    """Inside of a device, backward gives the conjugate of a number, and not of a tensor."""
    functions: list[Callable[[Any], Any]] = [
        lambda x: (x * (1.1 + 2j)).abs().sum(),
        lambda x: (2j / x).abs().sum(),
    ]
    for function in functions:
        gradients = []
        for scope in (contextlib.nullcontext(), flow.device(device)):
            with scope:
                x = torch.ones(3, dtype=torch.float64, requires_grad=True)
                function(x).backward()
                gradients.append(x.grad.tolist())  # type: ignore[union-attr]
        assert gradients[0] == gradients[1]


@pytest.mark.parametrize("kind", ["sparse_csr", "quantized", "mkldnn"])
def test_an_array_of_another_kind_of_tensor_is_refused(device: Cpu, kind: str) -> None:
    tensor = {
        "sparse_csr": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
        "mkldnn": torch.eye(2).to_mkldnn(),
    }[kind]
    with pytest.raises(UserError, match=f"an array is dense or sparse COO, not .*{kind}"):
        flow.array(tensor)


def test_a_copy_of_a_tensor_of_another_layout_keeps_it(device: Cpu) -> None:
    rows = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr()
    with flow.device(device):
        for made in (rows.clone(), rows.double()):
            assert type(made) is torch.Tensor and made.layout is torch.sparse_csr


def test_a_reduction_over_sparse_rows_refuses_arrays(device: Cpu) -> None:
    rows, dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(), torch.ones(2, 2)
    with flow.device(device):
        assert torch.sparse.mm(rows, dense, "amax").tolist() == [[2, 2], [3, 3]]
        with pytest.raises(UserError, match="with a reduction takes no arrays"):
            torch.sparse.mm(rows, flow.array(dense).requires_grad_(), "amax").sum().backward()


def test_a_program_takes_dense_inputs(device: Cpu) -> None:
    with pytest.raises(UserError, match="example 0 is sparse"):
        flow.capture(lambda x: x * 2, torch.eye(2).to_sparse())
    program = flow.capture(lambda x: x * 2, torch.eye(2))
    with pytest.raises(UserError, match="input 0 of the program is dense, not of layout"):
        program(torch.eye(2).to_sparse())


def test_a_deep_copy_of_a_pipeline_uses_the_same_devices(device: Cpu) -> None:
    class Stage(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with flow.device(self.device):
                return super().forward(x)

    stage = flow.arrays(Stage(2, 2))
    stage.device = device
    copied = torch.optim.swa_utils.AveragedModel(stage)
    assert copied.module.device is device and copied(torch.ones(1, 2)).place is device  # type: ignore[attr-defined]


def test_collectives_of_torch_are_for_ordinary_tensors(device: Cpu) -> None:
    """They neither wait for the value of an array, nor does an array wait for them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, out, ordinary = flow.ones((2,)), torch.zeros(2), torch.ones(2)
        for wrong in (lambda: dist.all_reduce(x), lambda: dist.all_gather([out], x)):
            with pytest.raises(
                UserError, match=r"c10d::.*does not wait for the values of arrays: use flow.send"
            ):
                wrong()
        with flow.device(device):
            dist.all_gather([out], ordinary)
            assert type(out) is torch.Tensor
            with pytest.raises(flow.CaptureError, match="writes an ordinary tensor"):
                flow.capture(lambda: dist.all_reduce(ordinary))
        assert out.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


def test_a_default_device_without_values_is_named(device: Cpu) -> None:
    with torch.device("meta"), pytest.raises(UserError, match="torch's default device is meta"):
        flow.zeros((2,))


def test_a_part_of_an_array_is_detached_in_place_in_inference_mode(device: Cpu) -> None:
    """Only there torch does that."""
    for x in (torch.zeros(2, 3), flow.zeros((2, 3))):
        part = x[0]
        with pytest.raises(RuntimeError, match="Can't detach views in-place"):
            part.detach_()
        with torch.inference_mode():
            assert part.detach_() is part
        part.add_(1)
        assert x.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_generators_are_taken_wherever_torchs_schema_has_them(device: Cpu) -> None:
    """`poisson` and `binomial` have them among the arguments by position."""
    own = torch.Generator().manual_seed(3)
    with flow.device(device):
        x = torch.full((20,), 5.0)
        for draw in (torch.poisson, lambda x, generator: torch.binomial(x, x / 10, generator)):
            first, second = draw(x, generator=own).tolist(), draw(x, generator=own).tolist()
            own.manual_seed(3)
            assert first == draw(x, generator=own).tolist() != second
            own.manual_seed(3)


def test_an_ordinary_tensor_cannot_get_the_data_of_an_array(device: Cpu) -> None:
    """torch would give it memory that does not exist, and crash at its next use."""
    layer = nn.Linear(2, 2)
    with flow.device(device), pytest.raises(UserError, match=r"call flow.arrays\(module\) before"):
        layer.double()
    assert layer(torch.ones(2)).dtype is torch.float32


def test_numpy_does_not_lose_a_gradient(device: Cpu) -> None:
    """Torch refuses to read such a tensor; an array can be read, and its product would be a constant."""
    factors = np.full((1, 3), 2, np.float32)
    layer = flow.arrays(nn.Linear(3, 1))
    for use in (
        lambda weight: weight * factors,
        lambda weight: weight @ factors[0],
        lambda weight: factors / weight,
        np.exp,
    ):
        with pytest.raises(UserError, match="NumPy would lose the gradient of an array"):
            use(layer.weight)
        wanted = use(layer.weight.tensor().detach())
        assert torch.equal(use(layer.weight.detach()), wanted)
        with torch.no_grad():
            assert torch.equal(use(layer.weight), wanted)
    (layer.weight * torch.from_numpy(factors)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[2, 2, 2]]
    assert np.array_equal(np.asarray(layer.weight), layer.weight.tensor().detach())


def test_a_lazy_module_without_a_batch_is_refused(device: Cpu) -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.LazyLinear(2))
    for use in (
        flow.arrays,
        lambda model: flow.ParallelExecutor(model, lambda own, x: own(x).mean(), torch.optim.SGD, [device]),
    ):
        with pytest.raises(UserError, match=r"^1\.weight has no values: give its lazy module a batch first$"):
            use(module)
        assert not any(isinstance(p, flow.Array) for p in module.parameters())
    module(torch.ones(1, 4))
    assert flow.arrays(module)(torch.ones(1, 4)).shape == (1, 2)


def test_writes_by_index_have_the_same_bits_in_every_run() -> None:
    """torch's threads write in the order in which they come."""
    torch.manual_seed(0)
    table, added, rows = torch.randn(333, 40), torch.randn(60000, 40), torch.randint(333, (60000,))

    def found(made: Any) -> list[torch.Tensor]:
        indexed, taken = made(table).requires_grad_(), made(table).requires_grad_()
        (indexed[rows] * added).sum().backward()
        (taken.take(rows) * added[:, 0]).sum().backward()
        written = made(table).index_put_((rows,), made(added), accumulate=True)
        copied = made(table).index_copy_(0, rows, made(added))
        return [indexed.grad, taken.grad, written, copied]

    def step(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(333, 40).index_put((rows,), values, accumulate=True)

    torch.use_deterministic_algorithms(True)
    try:
        wanted = [*found(torch.clone), step(added)]
    finally:
        torch.use_deterministic_algorithms(False)
    with flow.device(flow.cpus(1, threads=4)[0]):
        program = flow.capture(step, added)
        for _ in range(5):
            for value, own in zip([*found(flow.array), flow.array(program(added))], wanted, strict=True):
                assert torch.equal(value.tensor(), own)


def test_unpooling_has_the_same_bits_in_every_run() -> None:
    """torch's deterministic mode refuses it, so one thread of torch gives what is wanted."""
    torch.manual_seed(0)
    values, places = torch.randn(1, 1, 16, 256, 256), torch.randint(1 << 16, (1, 1, 16, 256, 256))
    flat = values.view(1, 1, 1024, 1024), places.view(1, 1, 1024, 1024)

    def found(make: Callable[[torch.Tensor], Any]) -> list[Any]:
        mask = torch.ones(1 << 20, dtype=torch.bool)
        added = make(torch.zeros(1 << 20)), make(mask), [make(places.view(-1))], make(values.view(-1))
        return [
            F.max_unpool2d(*map(make, flat), 1, output_size=(1024, 1024)),
            F.max_unpool3d(make(values), make(places), 1, output_size=(16, 256, 256)),
            torch.ops.aten._unsafe_masked_index_put_accumulate(*added),
        ]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = found(torch.clone)
    finally:
        torch.set_num_threads(threads)
    with flow.device(flow.cpus(1, threads=4)[0]):
        for _ in range(5):
            for value, own in zip(found(flow.array), wanted, strict=True):
                assert torch.equal(value.tensor(), own)
