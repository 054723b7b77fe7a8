"""Programs have the same bits as torch, in any valid order; what cannot be captured is refused."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import wait_until
from limits import limit
from torch import nn

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow.devices import Cpu

Optimizer = Callable[..., torch.optim.Optimizer]
SGD: Optimizer = lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=1e-3)  # noqa: E731
ADAMW: Optimizer = lambda p: torch.optim.AdamW(p, 1e-2, fused=True)  # noqa: E731


@pytest.fixture
def devices() -> Iterator[list[Cpu]]:
    made, threads = flow.cpus(2, threads=1), torch.get_num_threads()
    torch.set_num_threads(1)
    with flow.Engine(made):
        yield made
    torch.set_num_threads(threads)


class Network(nn.Module):
    """Convolution, batch normalisation, in-place ReLU and dropout; its end can be on another device."""

    def __init__(self, dropout: float = 0.4) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
        self.end = nn.Sequential(
            nn.Linear(144, 8), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(8, 3)
        )
        self.place: Cpu | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        if self.place is None:
            return self.end(x)
        with flow.device(self.place):
            return self.end(x)


def make_step(model: nn.Module, make: Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    optimizer = make(model.parameters())

    def step(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step.optimizer = optimizer  # type: ignore[attr-defined]
    return step


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = list(model.state_dict().values())
    for parameter in model.parameters():
        tensors += [t for t in optimizer.state[parameter].values() if isinstance(t, torch.Tensor)]
    return tensors


X, LABELS = torch.linspace(-1, 1, 6 * 64).view(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_any_order_gives_one_result(devices: list[Cpu], make: Optimizer, n_devices: int) -> None:
    torch.manual_seed(0)
    with flow.device(devices[0]):
        model = flow.arrays(Network())
        model.place = devices[1] if n_devices == 2 else None
        step = make_step(model, make)
        step(X, LABELS)
        program = flow.capture(step, X, LABELS)
    tensors = state(model, step.optimizer)  # type: ignore[attr-defined]
    before = [t.tensor() for t in tensors]
    chance = random.Random(0)

    def run(order: list[int] | None) -> list[torch.Tensor]:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        program.n_runs = 0
        loss = program(X, LABELS, order=order)
        return [loss, *(t.tensor() for t in tensors)]

    expected = run(None)
    assert any(not torch.equal(a, b) for a, b in zip(before, expected[1:], strict=True))
    orders = set()
    for _ in range(125):
        order = random_order(len(program.operations), program.edges, chance)
        orders.add(tuple(order))
        for one, other in zip(run(order), expected, strict=True):
            assert torch.equal(one, other)
    assert len(orders) == 125
    assert {o.device for o in program.operations} == {d.name for d in devices[:n_devices]}


def random_order(n: int, edges: set[tuple[int, int]], chance: random.Random) -> list[int]:
    missing = [sum(after == number for _, after in edges) for number in range(n)]
    ready, order = [number for number in range(n) if not missing[number]], []
    while ready:
        order.append(ready.pop(chance.randrange(len(ready))))
        for before, after in edges:
            if before == order[-1]:
                missing[after] -= 1
                if not missing[after]:
                    ready.append(after)
    return order


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["SGD", "AdamW"])
def test_replaying_gives_torchs_bits(devices: list[Cpu], make: Optimizer) -> None:
    torch.manual_seed(0)
    model = Network(0.0)
    with flow.device(devices[0]):
        lazy = flow.arrays(copy.deepcopy(model))
        lazy_step = make_step(lazy, make)
        lazy_step(X, LABELS)
        program = flow.capture(lazy_step, X, LABELS)
    step = make_step(model, make)
    step(X, LABELS)
    for number in range(4):
        assert torch.equal(program(X + number, LABELS), step(X + number, LABELS))
    for array, tensor in zip(lazy.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(array.tensor(), tensor)


def test_random_numbers_of_a_program(devices: list[Cpu]) -> None:
    """They differ between runs, repeat with the seed, and agree in forward and backward."""
    x = torch.ones(1000, requires_grad=False)

    def mask(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = F.dropout(x, 0.5)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    torch.manual_seed(4)
    program = flow.capture(mask, x)
    first, second = program(x), program(x)
    assert torch.equal(*first) and torch.equal(*second) and not torch.equal(first[0], second[0])
    torch.manual_seed(4)
    again = flow.capture(mask, x)
    assert torch.equal(again(x)[0], first[0]) and torch.equal(again(x)[0], second[0])


def test_static_single_assignment(devices: list[Cpu]) -> None:
    with flow.device(devices[0]):
        w = torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = w * x
        w.add_(1)
        with flow.device(devices[1]):
            return y + w

    program = flow.capture(step, torch.ones(3))
    assert [o.name for o in program.operations] == ["mul", "add_", "add", "fetch"]
    assert program.edges == {(0, 1), (0, 2), (1, 2), (2, 3)}
    values = {(v.name, v.version): v for v in program.variables}
    old, new = (
        next(v for (name, at), v in values.items() if at == n and name.startswith("array")) for n in (0, 1)
    )
    assert old.name == new.name and old.device == "cpu:0"
    assert (old.generated_by, old.waiting) == (None, [0, 1]) and (new.generated_by, new.waiting) == (1, [2])
    assert values["input 0", 0].waiting == [0] and values["add 2", 0].device == "cpu:1"
    dot = program.to_dot()
    assert "cpu:1, version 0" in dot and "cpu:0, version 1" in dot and "o0 -> o1 [style=dashed]" in dot
    assert program(torch.full((3,), 2.0)).tolist() == [4, 4, 4]
    assert program(torch.full((3,), 2.0)).tolist() == [7, 7, 7] and w.tolist() == [3, 3, 3]
    with pytest.raises(UserError, match=r"operation 1 \(add_\) can't come before 0 \(mul\)"):
        program(torch.ones(3), order=[1, 0, 2, 3])
    with pytest.raises(UserError, match="numbers 0 to 3"):
        program(torch.ones(3), order=[0, 1])


def test_inputs_of_a_program(devices: list[Cpu]) -> None:
    program = flow.capture(lambda x, y: (x.t() @ y, {"x": x + 1}, 5), torch.ones(4, 2), torch.ones(4, 3))
    x = flow.array(torch.arange(8.0).view(4, 2))
    product, tree, five = program(x * 1, torch.ones(3, 4).t())
    assert torch.equal(product, x.tensor().t() @ torch.ones(4, 3)) and five == 5
    assert torch.equal(tree["x"], x.tensor() + 1) and type(tree["x"]) is torch.Tensor
    with pytest.raises(
        ValueError, match=r"captured as \(4, 2\) torch.float32 and is \(5, 2\) torch.float32 now"
    ):
        program(torch.ones(5, 2), torch.ones(4, 3))
    with pytest.raises(UserError, match="takes 2 inputs, not 1"):
        program(torch.ones(4, 2))
    with pytest.raises(UserError, match="is a tensor, not float"):
        program(torch.ones(4, 2), 1.0)


def test_an_input_requires_a_gradient_as_its_example_does(devices: list[Cpu]) -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor | None:
        (x * x).sum().backward()  # type: ignore[no-untyped-call]
        return x.grad

    for example in (torch.ones(3, requires_grad=True), flow.ones(3).requires_grad_()):
        program = flow.capture(gradient, example)
        for given in (torch.tensor([1.0, 2.0, 3.0]), flow.ones(3) * 4, example):
            assert torch.equal(program(given), torch.as_tensor(given.detach() * 2))
        assert example.grad is None
    result = flow.ones(3).requires_grad_() * 2
    assert torch.equal(flow.capture(lambda x: x.mul_(2), result)(result), torch.full((3,), 4.0))


GAPS = [
    torch.arange(60.0).view(6, 10)[:, :9],
    torch.arange(60.0).view(6, 10)[::2].t(),
    torch.arange(6.0)[:, None].expand(6, 3),
]


@pytest.mark.parametrize("example", GAPS, ids=["slice", "transposed", "expanded"])
@pytest.mark.parametrize("as_array", [False, True])
def test_inputs_with_gaps(devices: list[Cpu], example: torch.Tensor, as_array: bool) -> None:
    """A run reads a compact copy of its input, and a capture sees the strides of that copy."""
    whole = example.as_strided((example.untyped_storage().size() // 4,), (1,))
    given = flow.array(whole).as_strided(example.size(), example.stride()) if as_array else example
    program = flow.capture(lambda x: (x[1:] + 0, x.t().contiguous()), given)
    for other in (given, example.contiguous(), example.t().contiguous().t()):
        row, turned = program(other)
        assert torch.equal(row, example[1:]) and torch.equal(turned, example.t())


def test_what_cannot_be_captured_is_refused_at_the_users_line(devices: list[Cpu]) -> None:
    x = torch.ones(3)
    counter, kept, state = torch.zeros(1), [], flow.ones(3)
    program = flow.capture(lambda x: x + 1, x)

    def branches(x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x

    cases: list[tuple[Callable[..., object], str]] = [
        (branches, "depends on values"),
        (lambda x: x * x.sum().item(), "depends on values"),
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: (counter.add_(1), x * counter)[1], "writes an ordinary tensor"),
        (lambda x: counter.add_(x.detach()[0]), "writes an ordinary tensor"),
        (lambda x: x.numpy(), "reading a value"),
        (lambda x: x * len(state.tolist()), "reading a value"),
        (lambda x: x * torch.tensor([state[0]]), "reading a value"),
        (lambda x: flow.call(lambda v: 1, x).result(), "waiting for <lambda>"),
        (lambda x: kept.append(x * 2), "kept by something outside"),
        (lambda x: program(x) * 1, "calling a program"),
    ]
    for function, words in cases:
        with pytest.raises(flow.CaptureError, match=f"test_flow_orders.py:[0-9]+: .*{words}"):
            flow.capture(function, x)
    with pytest.raises(UserError, match="inside a captured program"):
        kept[0] + 1
    with pytest.raises(UserError, match="example 0 is a tensor, not int"):
        flow.capture(lambda x: x, 1)
    assert program(x).tolist() == [2, 2, 2]


def test_momentum_that_the_capture_would_make_is_refused(devices: list[Cpu]) -> None:
    model = flow.arrays(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with pytest.raises(flow.CaptureError, match="run the step once before"):
        flow.capture(step, torch.ones(4, 3))


@pytest.mark.parametrize(
    "make", [lambda: nn.Conv2d(1, 2, 3), lambda: nn.Linear(8, 2)], ids=["conv", "linear"]
)
def test_gradients_that_the_step_does_not_use_are_refused(
    devices: list[Cpu], make: Callable[[], nn.Module]
) -> None:
    """An optimizer outside of the program would not see them. Gradients that exist before are state."""
    model = flow.arrays(make())
    optimizer, before = torch.optim.SGD(model.parameters(), 0.1), model.weight.tensor()

    def backward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach(), model.weight.grad.norm()

    with pytest.raises(
        flow.CaptureError, match=r"gradient of (weight|bias), is kept .*put optimizer.step into"
    ):
        flow.capture(backward, X)
    assert model.weight.grad is None and model.bias.grad is None
    backward(X)
    program = flow.capture(backward, X)
    optimizer.zero_grad(set_to_none=False)
    program(X)
    optimizer.step()
    assert not torch.equal(model.weight.tensor(), before)


def test_eager_training_after_a_failed_capture(devices: list[Cpu]) -> None:
    """Arrays that the capture left behind are refused; no later operation disappears in its program."""
    model, x = flow.arrays(nn.Linear(3, 2)), torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)

    def step(x: torch.Tensor) -> float:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with pytest.raises(flow.CaptureError, match="depends on values"):
        flow.capture(step, x)
    assert model.weight.grad is None and model.bias.grad is None
    with pytest.raises(UserError, match="the optimizer that keeps it, anew"):
        step(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9)
    optimizer.zero_grad()
    assert step(x) > step(x) > step(x)


def swap(x: Any, y: Any) -> None:
    x.data, y.data = y.data, x.data


@pytest.mark.parametrize("move", [swap, lambda x, y: x.t_(), lambda x, y: x.set_(y + 1)])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_that_moves_an_array_is_refused(
    devices: list[Cpu], move: Callable[..., Any], fails: bool
) -> None:
    """The capture alone would move it. Afterwards the array is as it was."""
    with flow.device(devices[0]):
        x, y = flow.array(torch.arange(4.0).view(2, 2)), flow.zeros((2, 2))

        def step() -> Any:
            move(x, y)
            x.add_(1)
            return x.sum().item() if fails else x * 1

        with pytest.raises(
            flow.CaptureError,
            match=r"depends on values" if fails else r"^.*test_flow_orders.py:\d+: the step gives an array",
        ):
            flow.capture(step)
    assert x.tolist() == [[0, 1], [2, 3]] and y.tolist() == [[0, 0], [0, 0]]


def test_a_step_may_move_an_array_and_back(devices: list[Cpu]) -> None:
    with flow.device(devices[0]):
        x = flow.array(torch.arange(3.0).view(1, 3))

        def step() -> torch.Tensor:
            x.squeeze_(0).add_(1)
            view = x.detach()
            view.unsqueeze_(1)
            return x.unsqueeze_(0) * 1

        program = flow.capture(step)
    for n in (1, 2):
        assert program().tolist() == [[n, n + 1, n + 2]]
    assert x.tolist() == [[2, 3, 4]]


def test_a_collected_object_is_not_finalized_in_a_capture(devices: list[Cpu]) -> None:
    import gc

    count = flow.zeros((1,))

    class Counting:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            count.add_(1)

    def step(x: torch.Tensor) -> torch.Tensor:
        Counting()
        return x + len([[] for _ in range(10_000)])  # many new objects: garbage is collected

    program = flow.capture(step, torch.zeros(1))
    gc.collect()
    wait_until(gc.isenabled, "a worker that starts, until which no garbage is collected", 10)
    assert count.item() == 1
    assert program(torch.zeros(1)).item() == 10_000 and count.item() == 1


def test_a_program_is_not_copied(devices: list[Cpu]) -> None:
    """A copy of its state would change, which no array shows."""
    state = flow.array([1.0])
    program = flow.capture(lambda: state.add_(1) * 1)
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UserError, match="a program can't be copied or pickled"):
            make(program)
    assert program().item() == state.item() == 2


def test_an_output_that_is_a_constant_is_the_callers_own(devices: list[Cpu]) -> None:
    program = flow.capture(lambda x: (x, torch.tensor([1.0, 2.0])), torch.ones(2))
    program(torch.ones(2))[1].zero_()
    assert program(torch.ones(2))[1].tolist() == [1, 2]


@pytest.mark.parametrize("make", [flow.array, lambda data: copy.deepcopy(torch.tensor(data))])
def test_an_array_of_data_is_made_anew_in_each_run(
    devices: list[Cpu], make: Callable[..., flow.Array]
) -> None:
    program = flow.capture(lambda x: make([0.0, 1.0]).add_(x), torch.ones(2))
    for _ in range(3):
        assert program(torch.ones(2)).tolist() == [1, 2]


def test_calls_in_a_program(devices: list[Cpu]) -> None:
    seen: list[list[float]] = []
    w = flow.ones((2,))

    def step(x: torch.Tensor) -> torch.Tensor:
        w.mul_(2)
        flow.call(lambda value: seen.append(value.tolist()), w)
        flow.call(lambda value: value.add_(1), w, writes=[w])
        return w * x

    program = flow.capture(step, torch.ones(2))
    assert program(torch.ones(2)).tolist() == [3, 3] and program(torch.ones(2)).tolist() == [7, 7]
    assert seen == [[2, 2], [6, 6]]


def test_backward_refuses_what_a_program_has_overwritten(devices: list[Cpu]) -> None:
    w, unused = flow.ones((2,)), flow.ones((2,))
    p = flow.ones((2,)).requires_grad_()

    def step() -> None:
        w.detach()[1:].add_(1)

    def call() -> None:
        flow.call(lambda value: value.add_(1), w, writes=[w])

    for program in (flow.capture(step), flow.capture(call)):
        for _ in range(2):
            product, other = (p * w).sum(), (p * unused).sum()
            program()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
            assert torch.autograd.grad(other, p)[0].tolist() == [1, 1]
            wanted = w.tolist()
            assert torch.autograd.grad((p * w).sum(), p)[0].tolist() == wanted
    assert w.tolist() == [3, 5]


def test_backward_works_after_a_program_has_changed_running_statistics(devices: list[Cpu]) -> None:
    """Torch does not count these writes either."""
    net = flow.arrays(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    images = torch.randn(5, 3)
    program = flow.capture(lambda x: net(x).detach().sum(), images)
    loss = net(flow.array(images)).sum()
    program(images)
    loss.backward()
    assert net[0].weight.grad is not None and net[1].num_batches_tracked.item() == 2


def test_a_program_keeps_no_array_that_it_changes(devices: list[Cpu]) -> None:
    import gc
    import weakref

    parameters = [flow.ones((2,)).requires_grad_()]
    kept = weakref.ref(parameters[0])

    def step() -> None:
        with torch.no_grad():
            parameters[0].add_(1)

    program = flow.capture(step)
    program()
    parameters.clear()
    gc.collect()
    assert kept() is None
    program()


def test_a_checkpoint_holds_back_the_update_only(devices: list[Cpu]) -> None:
    import threading

    w, go = flow.ones((2,)), threading.Event()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (w * x).sum()
        w.add_(1)
        return loss

    program = flow.capture(step, torch.ones(2))
    program(torch.ones(2))
    saved = flow.call(lambda value: (go.wait(limit(20)), value.tolist())[1], w)
    assert program(torch.ones(2)).item() == 4  # while the call still reads
    assert not saved.done
    go.set()
    assert saved.result() == [2, 2] and w.tolist() == [3, 3]


def test_copies_of_state_are_made_anew_when_it_changes() -> None:
    made = flow.cpus(2)
    made[1].memory = "far"
    with flow.Engine(made):
        w = flow.ones((2,))

        def step(x: torch.Tensor) -> torch.Tensor:
            with flow.device(made[1]):
                first, second = w + x, w * x
            w.add_(1)
            with flow.device(made[1]):
                return first + second + w

        program = flow.capture(step, torch.zeros(2))
        assert sum(o.name == "copy" for o in program.operations) == 3  # the input, and two versions
        assert program(torch.ones(2)).tolist() == [5, 5] and program(torch.ones(2)).tolist() == [8, 8]
        with flow.device(made[1]):
            assert (w * 1).tolist() == [3, 3]


def test_intermediates_are_dropped_after_their_last_use(devices: list[Cpu]) -> None:
    import weakref

    alive, seen = weakref.WeakSet(), []

    def look(value: torch.Tensor) -> None:
        alive.add(value.untyped_storage())
        seen.append(len(alive))

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x + 1
            flow.call(look, x, writes=[x])
        return x

    program = flow.capture(step, torch.zeros(2))
    assert program(torch.zeros(2)).tolist() == [30, 30]
    assert max(seen) <= 4
