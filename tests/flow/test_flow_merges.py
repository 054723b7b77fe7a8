"""Merges: compressed gradients, several processes, operations that send and receive."""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import limit
from torch import nn

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import collectives
from lockstep.flow.merge import BLOCK, Bits, Compression

ROOT = Path(__file__).resolve().parents[2]


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from(["int8", "int4"]), sizes=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_what_is_rounded_off_is_carried(bits: Bits, sizes: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    compression = Compression(bits, tuple(sizes))
    carried = torch.zeros(compression.n_blocks, BLOCK, dtype=torch.float64)
    wanted, found = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    for _ in range(5):
        gradients = [torch.randn(n, generator=random, dtype=torch.float64) for n in sizes]
        numbers, scales = compression.compress(*gradients, carried)
        assert numbers.dtype is torch.uint8 and numbers.shape == (compression.n_bytes,)
        wanted, found = wanted + torch.cat(gradients), found + torch.cat(compression.add_up(numbers, scales))
        left = carried.view(-1)[: sum(sizes)]
        torch.testing.assert_close(found + left, wanted)  # nothing is lost, ever
        assert (carried.abs() <= scales[:, None] / 2 + 1e-12).all()


def test_what_is_carried_averages_out() -> None:
    gradient = torch.randn(1000, dtype=torch.float64)
    for bits, steps in (("int8", 20), ("int4", 200)):
        compression = Compression(bits, (1000,))  # type: ignore[arg-type]
        carried = torch.zeros(compression.n_blocks, BLOCK, dtype=torch.float64)
        once = compression.add_up(*compression.compress(gradient, carried))[0]
        mean = once / steps
        for _ in range(steps - 1):
            mean += compression.add_up(*compression.compress(gradient, carried))[0] / steps
        assert (mean - gradient).abs().max() < (once - gradient).abs().max() / (steps / 3)


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Any:
    scores = model(images)
    return F.cross_entropy(scores, labels), {"wrong": scores.argmax(1) != labels}


def digits_error(**arguments: Any) -> tuple[float, list[dict[str, torch.Tensor]]]:
    """Return the validation error of scikit-learn's digits after ten epochs on two devices."""
    from sklearn.datasets import load_digits  # it takes a second

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images / 16).float()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    devices = flow.cpus(2, threads=1)
    with flow.Engine(devices):
        made = flow.ParallelExecutor(
            model, loss, lambda p: torch.optim.SGD(p, 0.1, 0.9), devices, bucket_mb=0.02, **arguments
        )
        for epoch in range(10):
            order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
            for rows in order[:1344].view(-1, 96):
                made.run({"images": images[rows], "labels": labels[rows]}, ())
        wrong = made.evaluate(loss, {"images": images[1437:], "labels": labels[1437:]}, ["wrong"])["wrong"]
        return wrong.double().mean().item(), [made.replica(0), made.replica(1)]


@pytest.mark.slow
def test_digits_learn_from_compressed_gradients() -> None:
    plain, _ = digits_error()
    for bits in ("int8", "int4"):
        found, replicas = digits_error(compress=bits)
        assert abs(found - plain) <= 0.0031
        assert all(torch.equal(value, replicas[1][name]) for name, value in replicas[0].items())


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_compressed_strategies_have_the_same_bits_and_resume(bits: Bits) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(30, 20), torch.randn(7, 30)
    results = []
    for strategy in ("all_reduce", "reduce"):
        devices = flow.cpus(2, threads=1)
        with flow.Engine(devices):

            def make(strategy: Any = strategy, devices: Any = devices) -> flow.ParallelExecutor:
                return flow.ParallelExecutor(
                    model, lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1), devices,
                    strategy=strategy, compress=bits,
                )  # fmt: skip

            first, second = make(), make()
            first.run({"x": x})
            second.load_state_dict(first.state_dict())
            for made in (first, second):
                made.run({"x": x})
            results += [first.replica(0), first.replica(1), second.replica(0)]
            names = {o.name for o in first.program.operations} if first.program else set()
            assert {"compress", "reduce"} <= names
    for other in results[1:]:
        assert all(torch.equal(value, results[0][name]) for name, value in other.items())


@pytest.mark.parametrize("n", [5, 300])  # errors of one block, and of several
def test_a_step_that_reaches_the_first_parameter_alone_has_its_own_rounding_errors(n: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(n, 4, bias=False), nn.Parameter(torch.ones(4))

    def loss(model: Scaled, x: torch.Tensor) -> torch.Tensor:
        scores = model.layer(x)
        return ((scores.detach() if len(x) == 2 else scores) * model.scale).square().mean()

    with flow.Engine(flow.cpus(2, threads=1)) as engine:
        made = flow.ParallelExecutor(
            Scaled(), loss, lambda p: torch.optim.SGD(p, 0.1), engine.devices, compress="int8"
        )
        made.run({"x": torch.randn(8, n)})
        before = made.state_dict()["carried"]
        with pytest.warns(UserWarning, match=r"no gradient reaches layer\.weight"):
            made.run({"x": torch.randn(4, n)})
        after = made.state_dict()["carried"]
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert len(after) == 2 * len(before)


def compressed(model: nn.Module, engine: flow.Engine) -> flow.ParallelExecutor:
    return flow.ParallelExecutor(
        model, lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1), engine.devices,
        compress="int8",
    )  # fmt: skip


def test_rounding_errors_of_another_order_are_not_used() -> None:
    """Under autocast gradients complete in another order, which is that of the bucket."""
    layers = nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4, bias=False)
    model, x = nn.Sequential(*layers), torch.randn(8, 5)
    with flow.Engine(flow.cpus(2, threads=1)) as engine:
        first, resumed, without = (compressed(model, engine) for _ in range(3))
        first.run({"x": x})
        state = first.state_dict()
        resumed.load_state_dict(state)
        without.load_state_dict(state | {"carried": {}})
        for made in (resumed, without):
            with torch.autocast("cpu", torch.bfloat16):
                made.run({"x": x})
        for name, value in without.replica(0).items():
            assert torch.equal(resumed.replica(0)[name], value)


def test_rounding_errors_that_no_step_has_used_are_saved_again() -> None:
    """A run that is stopped just after it resumed, before its first step, saves what it loaded."""
    model, x = nn.Linear(30, 20), torch.randn(7, 30)
    with flow.Engine(flow.cpus(2, threads=1)) as engine:
        first, resumed, again = (compressed(model, engine) for _ in range(3))
        first.run({"x": x})
        resumed.load_state_dict(first.state_dict())
        state = resumed.state_dict()
        assert len(state["carried"]) == 2
        again.load_state_dict(state)
        resumed.run({"x": x[:1]})  # the second device has no samples, so it keeps its errors
        assert all(map(torch.equal, state["carried"].values(), first.state_dict()["carried"].values()))
        kept = next(key for key in state["carried"] if key.startswith("1/"))
        assert torch.equal(resumed.state_dict()["carried"][kept], state["carried"][kept])
        for made in (first, again):
            made.run({"x": x})
        for name, value in first.replica(0).items():
            assert torch.equal(again.replica(0)[name], value)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x).double())
        return y


@pytest.mark.parametrize("strategy", ["all_reduce", "reduce"])
def test_gradients_of_two_dtypes_are_compressed(strategy: Any) -> None:
    model, x, replicas = TwoDtypes(), torch.randn(4, 3), []
    for bits in (None, "int8"):
        with flow.Engine(flow.cpus(2)) as engine:
            made = flow.ParallelExecutor(
                model, lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1), engine.devices,
                strategy=strategy, compress=bits,
            )  # fmt: skip
            made.run({"x": x})
            replicas.append(made.replica(1))
    for name, value in replicas[0].items():
        torch.testing.assert_close(replicas[1][name], value, rtol=0.01, atol=0.01)
        assert not torch.equal(replicas[1][name], model.state_dict()[name])


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of torch.distributed with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("peer", [0, 5, -1, None])  # this process is rank 0
def test_a_message_to_no_other_process_is_refused(peer: Any) -> None:
    with pytest.raises(UserError, match=r"flow.send: peer is the rank of another process, one of \[\]"):
        flow.send(flow.zeros(3), peer)
    with pytest.raises(UserError, match=r"flow.receive: peer is the rank of another process"):
        flow.receive(peer, torch.zeros(3))


@pytest.mark.usefixtures("alone")
def test_a_value_that_cannot_be_copied_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header was sent, and the receiver took the next message for the value."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "send", lambda value, peer, group, tag: sent.append(value))
    with flow.Engine(flow.cpus(1)):
        endless = flow.array([1.0]).expand(1 << 46)  # more than a process can address
        with pytest.raises(flow.OperationError, match=r"send on cpu.*, .*can't allocate memory"):
            flow.send(endless, 1).wait()
    assert not sent


@pytest.mark.usefixtures("alone")
def test_a_message_in_a_group_of_other_processes_is_refused() -> None:
    others = dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` returns to those that are not in it
    with pytest.raises(UserError, match=r"flow.send: this process is not in the group"):
        flow.send(flow.zeros(3), 1, group=others)
    with pytest.raises(UserError, match=r"flow.receive: this process is not in the group"):
        flow.receive(1, torch.zeros(3), group=others)


@pytest.mark.usefixtures("alone")
def test_messages_are_dense() -> None:
    """The other process would wait for a message that can't be sent until the group's timeout."""
    with pytest.raises(UserError, match=r"flow.send: a sparse array can't be sent: send to_dense\(\)"):
        flow.send(flow.array(torch.eye(2).to_sparse()), 1)
    for like in (3, [1.0], torch.eye(2).to_sparse()):
        with pytest.raises(UserError, match=r"flow.receive: like is a dense tensor"):
            flow.receive(1, like)  # type: ignore[arg-type]


def test_exchanges_run_again_after_a_state_is_loaded(alone: None) -> None:
    devices, x, good = flow.cpus(2), torch.ones(4, 3), torch.tensor([0, 1, 1, 0])
    with flow.Engine(devices):
        made = flow.ParallelExecutor(
            nn.Linear(3, 2), lambda model, x, y: F.cross_entropy(model(x), y),
            lambda p: torch.optim.SGD(p, 0.1), devices, group=dist.group.WORLD,
        )  # fmt: skip
        made.run({"x": x, "y": good})
        state = made.state_dict()
        with pytest.raises(flow.OperationError, match="out of bounds") as caught:
            made.run({"x": x, "y": good + 7})
        assert any("also failed" in note for note in caught.value.__notes__)  # the other device's loss
        made.load_state_dict(state)
        assert made.run({"x": x, "y": good})["loss"] > 0


def test_a_handler_evaluates_beside_a_step_that_is_captured(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step ran the program of the evaluation, without a word, and did not train."""
    feed = {"x": torch.ones(4, 3)}
    with flow.Engine(flow.cpus(1)) as engine:
        made = flow.ParallelExecutor(
            nn.Linear(3, 2), lambda model, x: model(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1),
            engine.devices, group=dist.group.WORLD,
        )  # fmt: skip
        score = lambda model, x: {"loss": model(x).sum()}  # noqa: E731
        made.evaluate(score, feed)
        before = made.replica(0)["weight"]
        monkeypatch.setattr(
            collectives.ProcessCollectives, "check_merged", lambda *_: signal.raise_signal(signal.SIGUSR1)
        )
        with handling(signal.SIGUSR1, lambda *_: made.evaluate(score, feed)):
            made.run(feed)
        assert not torch.equal(made.replica(0)["weight"], before)


def test_no_handler_uses_an_executor_that_records_a_step() -> None:
    """Its state had the buffers of the call before the capture, and an evaluation took the step's masks."""
    feed, messages = {"x": torch.randn(4, 3)}, list[str]()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = model(x)
        signal.raise_signal(signal.SIGUSR1)
        return model[2](scores).square().mean()  # type: ignore[index,operator,no-any-return]

    def use(*_: Any) -> None:
        for use in (made.state_dict, lambda: made.evaluate(lambda model, x: {"scores": model(x)}, feed)):
            with pytest.raises(UserError, match="executor records a step: use it after the run"):
                use()
            messages.append("refused")

    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    with flow.Engine(flow.cpus(1)) as engine, handling(signal.SIGUSR1, use):
        made = flow.ParallelExecutor(model, loss, lambda p: torch.optim.SGD(p, 0.1), engine.devices)
        made.run(feed)
        made.state_dict()
    assert messages == ["refused"] * 4  # in the call before the capture, and in the capture


@pytest.mark.usefixtures("alone")
def test_a_group_of_other_processes_is_refused() -> None:
    with flow.Engine(flow.cpus(1)) as engine, pytest.raises(UserError, match="this process is not in it"):
        flow.ParallelExecutor(
            nn.Linear(3, 2), lambda model, x: model(x).sum(), lambda p: torch.optim.SGD(p, 0.1),
            engine.devices, group=dist.GroupMember.NON_GROUP_MEMBER,
        )  # fmt: skip


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"bucket_mb": 1}, "bucket_mb is 4 in this process and 1 in the group's process 1: make the same"),
        ({"gradient_scale": "sum"}, "gradient_scale is mean in this process and sum in the group"),
        ({"bias": "(3,) torch.float32"}, r"bias is \(2,\) torch.float32, trained in this process and \(3,\)"),
        ({"scale": "(3,) torch.float32"}, "scale is missing in this process"),
    ],
)
def test_processes_with_other_models_or_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], words: str
) -> None:
    def gather(self: Any, doing: str, value: tuple[dict[str, Any], int]) -> list[Any]:
        own, number = value
        return [value, ({**own, **other}, number)]

    monkeypatch.setattr(collectives.ProcessCollectives, "gather", gather)
    with flow.Engine(flow.cpus(1)) as engine, pytest.raises(UserError, match=words):
        flow.ParallelExecutor(
            nn.Linear(3, 2), lambda model, x: model(x).sum(), lambda p: torch.optim.SGD(p, 0.1),
            engine.devices, group=dist.group.WORLD,
        )  # fmt: skip


@pytest.mark.usefixtures("alone")
def test_the_first_messages_of_two_threads_to_a_peer_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is two of gloo's, so those of two threads must not run at once."""
    lanes, others = list[int](), list[threading.Thread]()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 23456])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)

    def send(value: torch.Tensor, peer: int, group: Any, tag: int) -> None:
        lanes.append(threading.get_ident())
        time.sleep(0.2)  # for another message to begin, which must not

    make = collectives._turn

    def make_while_another_thread_sends(*what: Any) -> Any:
        made = make(*what)
        if not others:
            others.append(threading.Thread(target=lambda: flow.send(flow.array(1.0), 23456)))
            others[0].start()  # its current device is the default one
            others[0].join()
        return made

    monkeypatch.setattr(dist, "send", send)
    monkeypatch.setattr(collectives, "_turn", make_while_another_thread_sends)
    with flow.Engine(flow.cpus(1)):
        flow.send(flow.array(2.0), 23456)
        flow.wait_all()
    assert lanes[0] == lanes[1] != lanes[2] == lanes[3]


@pytest.mark.usefixtures("alone")
def test_messages_are_sent_again_after_a_failure_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 12345])
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "send", lambda value, peer, group, tag: sent.append(value))
    with flow.Engine(flow.cpus(1)):
        bad = flow.array(1.0)
        flow.call(lambda value: 1 / 0, bad, writes=[bad])
        flow.send(bad, 12345)
        with pytest.raises(flow.OperationError, match="division by zero"):
            flow.send(flow.array(2.0), 12345).wait()  # the peer would take it for the first
        flow.send(flow.array(3.0), 12345).wait()
    with pytest.raises(KeyError), flow.Engine(flow.cpus(1)):
        late = flow.array(4.0)
        flow.call(lambda value: time.sleep(0.1), late, writes=[late])
        flow.send(late, 12345)
        raise KeyError  # which closes the engine
    with flow.Engine(flow.cpus(1)):
        flow.send(flow.array(5.0), 12345).wait()
    assert [value.item() for value in sent[1::2]] == [3, 5]  # behind their headers


@pytest.mark.usefixtures("alone")
def test_a_message_of_one_peer_does_not_wait_for_one_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peer may send only after it has heard of the second one's message."""
    heard, like = threading.Event(), torch.empty(3)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])

    def receive(value: torch.Tensor, peer: int, group: Any, tag: int) -> None:
        if peer == 2:
            heard.set()
        assert heard.wait(limit(5)), "waits for the other peer"
        value.copy_(collectives._header(like) if value.dtype == torch.uint8 else torch.full((3,), peer))

    monkeypatch.setattr(dist, "recv", receive)
    with flow.Engine(flow.cpus(1)):
        first, second = flow.receive(1, like), flow.receive(2, like)
        assert (first.tolist(), second.tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.usefixtures("alone")
def test_messages_of_the_default_group_keep_their_order_however_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message with group=None that was not ready arrived behind a later one with group=WORLD."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "send", lambda value, peer, group, tag: sent.append(value))
    with flow.Engine(flow.cpus(1)):
        late = flow.array(1.0)
        flow.call(lambda value: time.sleep(0.2), late, writes=[late])
        flow.send(late, 1)
        flow.send(flow.array(2.0), 1, group=dist.group.WORLD)
        flow.wait_all()
    assert [value.item() for value in sent[1::2]] == [1, 2]  # behind their headers


@pytest.mark.usefixtures("alone")
def test_another_executor_of_the_group_waits_for_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exchanges were made beside those of the run: in two processes, in different orders."""
    seen: list[str] = []
    all_reduce, gather = dist.all_reduce, dist.all_gather_object

    def interrupt(*values: Any, group: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)  # the other executor begins
        all_reduce(*values, group=group)
        seen.append("all-reduce")

    def see(*values: Any, group: Any) -> None:
        seen.append("gather")
        gather(*values, group=group)

    monkeypatch.setattr(dist, "all_reduce", interrupt)
    monkeypatch.setattr(dist, "all_gather_object", see)
    for devices in (flow.cpus(1), flow.cpus(1)):  # which have other lanes
        made = flow.ParallelExecutor(
            nn.Linear(3, 2), lambda model, x: model(x).mean(), lambda p: torch.optim.SGD(p, 0.1),
            devices, group=dist.group.WORLD,
        )  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            made.run({"x": torch.ones(4, 3)})
    flow.wait_all()
    of_a_run = ["gather"] * (seen.index("all-reduce")) + ["all-reduce"]
    assert seen == of_a_run * 2


# Each program of a process begins with this.
OPENING = """
import pickle, sys, datetime
import torch, torch.distributed as dist
from torch import nn
from lockstep import flow
from lockstep.errors import UserError

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=90))
"""


PROCESS = """
import copy
import torch.nn.functional as F

settings = eval(sys.argv[3])
torch.manual_seed(rank)  # rank 0's weights count
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3)).double()
if settings.pop("sparse", False):
    model = nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Flatten(), nn.Linear(24, 3)).double()
if settings.pop("strided", False):  # memory with gaps, memory that is shared, and a dtype that gloo lacks
    model[0].weight = nn.Parameter(torch.randn(16, 12).double()[:, ::2])
    model.register_buffer("same", torch.randn(3).expand(2, 3))
    model.register_buffer("short", torch.randint(99, (4,), dtype=torch.int16))
before = copy.deepcopy(model.state_dict())
random = torch.Generator().manual_seed(5)
x = torch.randint(0, 30, (9, 6), generator=random)
x = x if type(model[0]) is nn.Embedding else x.double() / 30
labels = torch.randint(0, 3, (9,), generator=random)
loss = lambda model, x, labels: F.cross_entropy(model(x), labels)
noisy = lambda model, x, labels: (loss(model, x, labels), {"noise": torch.rand(3)})
devices = flow.cpus(1 + rank, threads=1)
own = slice(0, 4) if rank == 0 else slice(4, 9)
with flow.Engine(devices):
    made = flow.ParallelExecutor(model, loss, lambda p: torch.optim.SGD(p, 0.1), devices, bucket_mb=5e-4,
                                 group=dist.group.WORLD, **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for _ in range(3):
        made.run({"x": x[own], "labels": labels[own]})
    result = made.replica(rank)
    if rank == 0:
        state = {name: value for name, value in model.state_dict().items()}
        alone = flow.ParallelExecutor(model, loss, lambda p: torch.optim.SGD(p, 0.1), devices, bucket_mb=5e-4)
        for _ in range(3):
            alone.run({"x": x, "labels": labels})
        one = alone.replica(0)
    else:
        one = None
    noise = made.evaluate(noisy, {"x": x[own][:1], "labels": labels[own][:1]}, ["noise"])["noise"].tolist()
    with flow.device(devices[0]):
        if rank == 0:
            sent = [flow.send(flow.array(torch.full((3,), n)), 1) for n in (1.0, 2.0)]
            message = flow.receive(1, torch.empty(2)).tolist()
            for each in sent:
                each.wait()
        else:
            first, second = (flow.receive(0, torch.empty(3)) for _ in range(2))
            message = (first + 10 * second).tolist()  # this waits, the engine does not
            flow.send(flow.array([7.0, 8.0]), 0).wait()
pickle.dump((result, one, message, noise), open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


BRANCHES = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))

def loss(model, x):
    if len(x) == 7:
        model.seen += 1
    return ((model.first if len(x) == 4 else model.second)(x)).square().mean()

devices, messages = flow.cpus(1), []
with flow.Engine(devices):
    try:
        flow.ParallelExecutor(Heads(), loss, lambda p: torch.optim.SGD(p, 0.1 + rank), devices,
                              group=dist.group.WORLD)
    except UserError as error:
        messages.append(str(error))
    made = flow.ParallelExecutor(Heads(), loss, lambda p: torch.optim.SGD(p, 0.1), devices,
                                 group=dist.group.WORLD)
    for n in (4, 4 + rank, 4 + rank, 6 + rank, 4, 5):
        try:
            made.run({"x": torch.ones(n, 6)})
        except UserError as error:
            messages.append(str(error))
    result = made.replica(0)
pickle.dump((messages, made.state_dict()["runs"], result), open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


ONE_FAILS = """
def loss(model, x):
    if len(x) == 5:
        raise ValueError("not 5")
    return model(x).square().mean()

devices, messages = flow.cpus(1), []
with flow.Engine(devices):
    made = flow.ParallelExecutor(nn.Linear(6, 3), loss, lambda p: torch.optim.SGD(p, 0.1), devices,
                                 group=dist.group.WORLD)
    begin = made.state_dict()
    for n, fetch in ((3, []), (4, [["loss"], ["los"]][rank]), (4 + rank, ["loss"]), (4, [])):
        try:
            made.run({"x": torch.ones(n, 6)}, fetch)
        except ValueError as error:  # a UserError, too
            messages.append(str(error))
    if rank == 1:
        made.load_state_dict(begin)
    try:
        made.run({"x": torch.ones(4, 6)})
    except UserError as error:
        messages.append(str(error))
    made.load_state_dict(begin)
    made.run({"x": torch.ones(4, 6)})
    result = made.replica(0)
pickle.dump((messages, made.state_dict()["runs"], result), open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


LIKES = """
found = []
likes = torch.zeros(3), torch.zeros(2), torch.zeros(3).int(), torch.zeros(4, 8), torch.zeros(3)
for n, like in enumerate(likes):
    if rank == 0:
        flow.send(flow.array(torch.full((3,), n + 1.0)), 1).wait()
    else:
        try:
            found.append(flow.receive(0, like).tolist())
        except flow.OperationError as error:
            found.append(str(error.__cause__))
pickle.dump(found, open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


BESIDE = """
import time

own = torch.full((64,), 7.0)  # as many bytes as a header
if rank == 0:
    flow.send(flow.array(torch.full((3,), 5.0)), 1)
    time.sleep(0.5)  # its lane sends
    dist.send(own, 1)
    found = None
else:
    dist.recv(own.zero_(), 0)
    found = own.tolist(), flow.receive(0, torch.empty(3)).tolist()
flow.wait_all()
pickle.dump(found, open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


LATE = """
import os, signal, threading, time

interrupted = sys.argv[3]
devices, found = flow.cpus(1), []
made = flow.ParallelExecutor(nn.Linear(6, 3), lambda model, x: model(x).mean(),
                             lambda p: torch.optim.SGD(p, 0.1), devices, group=dist.group.WORLD)
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: found.append("handled"))
    for after, number in ((0.5, signal.SIGTERM), (1, signal.SIGINT)):
        threading.Timer(after, os.kill, (os.getpid(), number)).start()
    try:
        made.run({"x": torch.ones(4, 6)})
    except KeyboardInterrupt:
        found.append("interrupted")
    open(interrupted, "w").close()
else:
    stop = time.monotonic() + 20
    while not os.path.exists(interrupted) and time.monotonic() < stop:
        time.sleep(0.1)
    found.append(os.path.exists(interrupted))
    dist.all_gather_object([None, None], (4, 0, None))  # what the other's step waits for
pickle.dump(found, open(sys.argv[4], "wb"))
devices[0].engine.close()
dist.destroy_process_group()
"""


STAGES = """
message, devices = "", flow.cpus(1)
made = flow.ParallelExecutor(nn.Linear(6, 3), lambda model, x: model(x).mean(),
                             lambda p: torch.optim.SGD(p, 0.1), devices, group=dist.group.WORLD)
try:
    if rank == 0:
        made.run({"x": torch.ones(4, 6)})
    else:  # as after an interrupt in its run
        flow.ParallelExecutor(nn.Linear(6, 3), lambda model, x: model(x).mean(),
                              lambda p: torch.optim.SGD(p, 0.1), devices, group=dist.group.WORLD)
except UserError as error:
    message = str(error)
pickle.dump(message, open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


SWAPPED = """
def make(seed):
    torch.manual_seed(seed)
    return flow.ParallelExecutor(nn.Linear(6, 3), lambda model, x: model(x).mean(),
                                 lambda p: torch.optim.SGD(p, 0.1), flow.cpus(1), group=dist.group.WORLD)


messages, first, second = [], make(1), make(2)
for made in (first, second) if rank == 0 else (second, first):
    try:
        made.run({"x": torch.ones(4, 6)})
    except UserError as error:
        messages.append(str(error))
for made in (first, second):
    made.run({"x": torch.ones(4, 6)})
pickle.dump((messages, [dict(made.replica(0)) for made in (first, second)]), open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


SHARED_DEVICES = """
import threading, time

groups = [dist.new_group(timeout=datetime.timedelta(seconds=30)) for _ in range(2)]
devices, found = flow.cpus(2), {}
made = [flow.ParallelExecutor(nn.Linear(6, 3), lambda model, x: model(x).mean(),
                              lambda p: torch.optim.SGD(p, 0.1), devices, group=group) for group in groups]


def train(number):
    time.sleep(0.5 * (number != rank))  # each process begins with another executor
    try:
        for _ in range(3):
            made[number].run({"x": torch.ones(4, 6)})
        found[number] = dict(made[number].replica(0))
    except flow.OperationError as error:
        found[number] = str(error)


threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
pickle.dump([found[number] for number in range(2)], open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


UNLIKE = """
messages, devices = [], flow.cpus(1)
with flow.Engine(devices):
    for layers, rates in ((("ab", "ba"), (0.1, 0.1)), (("ab", "ab"), torch.tensor([0.1, 0.2]))):
        model = nn.ModuleDict({name: nn.Linear(3, 3) for name in layers[rank]})
        try:
            flow.ParallelExecutor(model, lambda model, x: model["b"](model["a"](x)).mean(),
                                  lambda p: torch.optim.SGD(p, rates[rank]), devices, group=dist.group.WORLD)
        except UserError as error:
            messages.append(str(error))
pickle.dump(messages, open(sys.argv[4], "wb"))
dist.destroy_process_group()
"""


def two_processes(folder: Path, settings: str, program: str = PROCESS) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [folder / f"{rank}.pickle" for rank in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", OPENING + program, str(rank), str(port), settings, str(paths[rank])],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            _, errors = child.communicate(timeout=limit(120))
            assert child.returncode == 0, errors
    finally:
        for child in children:
            child.kill()
    return [pickle.loads(path.read_bytes()) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "{}",
        "{'strategy': 'reduce', 'sparse': True}",
        "{'compress': 'int8'}",
        "{'strided': True}",
    ],
)
def test_two_processes_are_one_network(tmp_path: Path, settings: str) -> None:
    """One has 4 samples on one device, the other 5 on two."""
    (first, one, message, noise), (second, _, other_message, other) = two_processes(tmp_path, settings)
    exact = "compress" not in settings
    for name, value in one.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(
            first[name], value, rtol=1e-10 if exact else 0.1, atol=1e-10 if exact else 0.01
        )
    assert message == [7.0, 8.0] and other_message == [21.0, 21.0, 21.0]
    assert noise != other


@pytest.mark.slow
def test_processes_that_would_merge_or_update_other_parameters_are_refused(tmp_path: Path) -> None:
    """One process would add up its gradients of one head and the other's of the other head.

    Or only one process would merge a buffer.
    """
    (messages, n_runs, weights), (others, n_others, other_weights) = two_processes(tmp_path, "", BRANCHES)
    assert messages[0] == (
        "group: lr of first.weight is 0.1 in this process and 1.1 in the group's process 1: "
        "make the same executor in all processes"
    )
    for own in (messages, others):
        assert len(own) == 4 and own[1] == own[2]
        assert own[1].startswith("group: gradients reach first.bias, first.weight, second.bias, second.w")
        assert own[3].startswith("group: gradients reach seen, or the loss writes it, in one of")
    assert n_runs == n_others == 3
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


@pytest.mark.slow
def test_a_step_that_one_process_cannot_record_is_refused_in_both(tmp_path: Path) -> None:
    """The others took what the next step exchanges for the missing names, and failed with a TypeError.

    A state that one process loads alone made the weights differ.
    """
    (messages, n_runs, weights), (others, n_others, other_weights) = two_processes(tmp_path, "", ONE_FAILS)
    refused = "group: the step can't be recorded in the group's process 1: "
    assert others[0].startswith("fetch: there is no 'los'") and messages[0].startswith(
        f"{refused}UserError: fetch: there is no 'los'"
    )
    assert (messages[1], others[1]) == (f"{refused}ValueError: not 5", "not 5")
    assert messages[2] == (
        "group: 2 steps lie behind this process and 0 behind the group's process 1: "
        "load the same state in all processes"
    )
    assert others[2].startswith("group: 0 steps lie behind this process and 2 behind the group's process 0")
    assert len(messages) == len(others) == 3 and n_runs == n_others == 1
    assert all(torch.equal(value, other_weights[name]) for name, value in weights.items())


@pytest.mark.slow
def test_signals_are_handled_while_another_process_is_late(tmp_path: Path) -> None:
    """The main thread waited inside of gloo, until the group's timeout."""
    found, others = two_processes(tmp_path, str(tmp_path / "interrupted"), LATE)
    assert (found, others) == (["handled", "interrupted"], [True])


@pytest.mark.slow
def test_processes_at_different_exchanges_are_told_so(tmp_path: Path) -> None:
    """The one that made an executor raised "'tuple' object is not a mapping"."""
    begins, makes = two_processes(tmp_path, "", STAGES)
    assert begins.startswith("group: this process begins a step and the group's process 1 makes an executor")
    assert makes.startswith("group: this process makes an executor and the group's process 0 begins a step")


@pytest.mark.slow
def test_processes_that_run_executors_in_different_orders_are_refused(tmp_path: Path) -> None:
    """Each took the gradients of the other executor, without a word, if their shapes were equal."""
    (messages, models), (others, other_models) = two_processes(tmp_path, "", SWAPPED)
    assert [m.partition(":")[2].partition(" begin")[0] for m in messages] == [
        " this process and the group's process 1"
    ] * 2
    assert len(others) == 2 and all("different executors: run them in the same order" in m for m in others)
    for own, other in zip(models, other_models, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in own.items())
    assert not torch.equal(models[0]["weight"], models[1]["weight"])


@pytest.mark.slow
def test_processes_with_modules_in_other_orders_or_other_tensors_as_rates_are_refused(tmp_path: Path) -> None:
    """A layer got the weights of another one; layers of other sizes ended the process."""
    for order, rate in two_processes(tmp_path, "", UNLIKE):
        assert order.startswith("group: the model's parameters and buffers have another order")
        assert rate.startswith("group: lr of a.weight is 0.")


@pytest.mark.slow
def test_executors_of_two_groups_share_devices(tmp_path: Path) -> None:
    """Each process waited in the only lane for the other's executor that waited behind, until the timeout."""
    models, others = two_processes(tmp_path, "", SHARED_DEVICES)
    assert not [found for found in (*models, *others) if isinstance(found, str)]
    for own, other in zip(models, others, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in own.items())


@pytest.mark.slow
def test_a_message_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    """A shorter one left a part of the array as memory was, and a longer one ended the process."""
    _, found = two_processes(tmp_path, "", LIKES)
    sent = "flow.receive: process 0 has sent (3,) torch.float32, and `like` is "
    assert found[1:4] == [
        sent + "(2,) torch.float32",
        sent + "(3,) torch.int32",
        sent + "(4, 8) torch.float32",
    ]
    assert (found[0], found[4]) == ([1.0, 1.0, 1.0], [5.0, 5.0, 5.0])


@pytest.mark.slow
def test_messages_of_torch_beside_those_of_flow_are_not_mixed_up(tmp_path: Path) -> None:
    """torch's recv took flow's header, without a word."""
    _, found = two_processes(tmp_path, "", BESIDE)
    assert found == ([7.0] * 64, [5.0] * 3)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_largest_gradient_keeps_its_sign_in_low_precision(bits: Bits, dtype: torch.dtype) -> None:
    """The scale of 177 is rounded down in bfloat16, and that of small numbers in float16."""
    for largest in (177.0, 189 * 2.0**-24, 10 * 2.0**-24):
        gradient = torch.full((BLOCK,), largest, dtype=dtype)
        compression, carried = Compression(bits, (BLOCK,)), torch.zeros(1, BLOCK, dtype=dtype)
        found = compression.add_up(*compression.compress(gradient, carried))[0]
        assert (found >= 0).all()
        torch.testing.assert_close(found.float() + carried[0].float(), gradient.float(), rtol=0.01, atol=0)


class SomeParameters(nn.Module):
    """A network that uses its first parameter only if the batch has two columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.second * x[:, :1]).square().mean()
        return y + (self.first * x[:, 1:]).square().mean() if x.shape[1] == 2 else y


@pytest.mark.filterwarnings("ignore:no gradient reaches")
def test_a_step_may_reach_a_part_of_a_compressed_bucket() -> None:
    with flow.Engine(flow.cpus(2, threads=1)) as engine:
        made = flow.ParallelExecutor(
            SomeParameters(), lambda m, x: m(x), lambda p: torch.optim.SGD(p, 0.1), engine.devices,
            compress="int8",
        )  # fmt: skip
        for columns in (2, 1, 2):
            made.run({"x": torch.randn(4, columns)})
        for name, value in made.replica(0).items():
            assert torch.equal(value, made.replica(1)[name])


@pytest.mark.usefixtures("alone")
def test_processes_train_inside_of_a_device() -> None:
    with flow.Engine(flow.cpus(1)) as engine:
        made = flow.ParallelExecutor(
            nn.Linear(3, 2), lambda m, x: m(x).square().mean(), lambda p: torch.optim.SGD(p, 0.1),
            engine.devices, group=dist.group.WORLD,
        )  # fmt: skip
        with flow.device(engine.devices[0]):
            assert made.run({"x": torch.ones(4, 3)})["loss"].item() >= 0
