"""ParallelExecutor: N devices are one network, with the same bits on all, by any strategy, every time."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import wait_until
from limits import limit
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lockstep import flow
from lockstep.errors import UserError
from lockstep.flow import ParallelExecutor, replicas, steps

STRATEGIES = "all_reduce", "reduce"
Results = dict[str, torch.Tensor]


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).double()


def loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
    scores = model(x)
    return F.cross_entropy(scores, labels), {"scores": scores, "largest": scores.max()}


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=1e-3)


def batch(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=random, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, 3, (n,), generator=random)}


@contextmanager
def executor(n: int, model: nn.Module | None = None, **arguments: Any) -> Iterator[ParallelExecutor]:
    """Return an executor on n devices, with several small buckets."""
    made = flow.cpus(n, threads=1)
    settings: dict[str, Any] = {"loss": loss, "optimizer": momentum, "bucket_mb": 5e-4, **arguments}
    with flow.Engine(made):
        yield ParallelExecutor(model or network(), devices=made, **settings)


def trained(n: int, sizes: Sequence[int], **arguments: Any) -> Results:
    """Return the weights after a step on each batch; all replicas must be bitwise equal."""
    with executor(n, **arguments) as made:
        for step, size in enumerate(sizes):
            made.run(batch(size, step))
        replicas = [made.replica(d) for d in range(n)]
    for other in replicas[1:]:
        assert_same(other, replicas[0])
    return replicas[0]


def assert_same(one: Results, other: Results) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def one_network(sizes: Sequence[int]) -> Results:
    """Train with plain torch."""
    model = network()
    optimizer = momentum(list(model.parameters()))
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        loss(model, *batch(size, step).values())[0].backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_any_number_of_devices_and_samples_is_one_network(n: int) -> None:
    sizes = [1, 3, n + 1, 1, n + 1]
    wanted, found = one_network(sizes), [trained(n, sizes, strategy=strategy) for strategy in STRATEGIES]
    assert_same(*found)
    for name, value in wanted.items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_recurrent_network_is_one_network_on_any_number_of_devices(strategy: str) -> None:
    """oneDNN's LSTM returns a workspace whose size torch does not predict, in programs as well."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.scores = nn.LSTM(3, 5, 2, batch_first=True), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.scores(self.lstm(x.float().view(-1, 2, 3))[0][:, -1])
            return made

    torch.manual_seed(1)
    model, sizes = Last(), [4, 3, 1, 4]
    found = []
    for n in (1, 2):
        with executor(n, model, strategy=strategy) as made:
            for step, size in enumerate(sizes):
                made.run(batch(size, step))
            found.append(made.replica(0))
            assert_same(made.replica(n - 1), found[-1])
    optimizer = momentum(list(model.parameters()))
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        loss(model, *batch(size, step).values())[0].backward()
        optimizer.step()
    assert_same(found[0], dict(model.state_dict()))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)


def test_two_devices_are_two_eager_replicas_whose_halved_gradients_are_added() -> None:
    replicas = [network(), network()]
    optimizer, whole = momentum(list(replicas[0].parameters())), batch(8)
    for _ in range(3):
        for number, model in enumerate(replicas):
            model.load_state_dict(replicas[0].state_dict())
            model.zero_grad()
            own = slice(4 * number, 4 * number + 4)
            (loss(model, whole["x"][own], whole["labels"][own])[0] / 2).backward()
        for first, second in zip(*(model.parameters() for model in replicas), strict=True):
            assert first.grad is not None and second.grad is not None
            first.grad += second.grad
        optimizer.step()
    with executor(2) as made:
        for _ in range(3):
            made.run(whole)
        assert_same(made.replica(1), dict(replicas[0].state_dict()))


@pytest.mark.parametrize("n_times", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_are_repeatable_bit_for_bit(n_times: int) -> None:
    results = [trained(3, [7, 5], model=network(0.4), strategy=STRATEGIES[n % 2]) for n in range(n_times)]
    for other in results[1:]:
        assert_same(other, results[0])


def test_dropout_is_by_sample_whatever_the_number_of_devices() -> None:
    one, three = (trained(n, [7, 2, 7], model=network(0.4)) for n in (1, 3))
    for name, value in one.items():
        torch.testing.assert_close(three[name], value, rtol=1e-10, atol=1e-10)
    other = trained(1, [7, 2, 7], model=network(0.4), seed=1)
    assert not torch.equal(other["0.weight"], one["0.weight"])


def test_what_is_fetched_merged_and_of_each_device() -> None:
    model, whole = network(), batch(5)
    wanted, others = loss(model, *whole.values())
    wanted.backward()
    names = ("loss", "scores", "largest", "3.weight@GRAD")
    for strategy in STRATEGIES:
        with executor(2, strategy=strategy) as made:
            found = made.run(whole, names)
        assert list(found) == list(names)
        assert type(found["scores"]) is torch.Tensor
        torch.testing.assert_close(found["loss"], wanted.detach())
        torch.testing.assert_close(found["scores"], others["scores"].detach())
        assert found["largest"].shape == (2,) and found["largest"].max().item() == pytest.approx(
            others["scores"].max().item()
        )
        torch.testing.assert_close(found["3.weight@GRAD"], dict(model.named_parameters())["3.weight"].grad)
        with executor(2, strategy=strategy) as made:
            found = made.run(whole, names, merge=False)
        assert [part.shape[0] for part in found["scores"]] == [3, 2] and len(found["loss"]) == 2
        assert torch.equal(*found["3.weight@GRAD"])


def test_each_device_can_be_given_its_own_and_nothing() -> None:
    whole = batch(5)
    parts = [{name: value[:4] for name, value in whole.items()}, {}]
    parts.append({name: value[4:] for name, value in whole.items()})
    with executor(3) as made:
        found = made.run(parts, ("loss", "scores"))
        combined = made.replica(1)
    wanted = one_network_on(whole)
    assert found["scores"].shape == (5, 3)
    for name, value in wanted.items():
        torch.testing.assert_close(combined[name], value, rtol=1e-10, atol=1e-10)


def one_network_on(whole: dict[str, torch.Tensor]) -> Results:
    with executor(1) as made:
        made.run(whole)
        return made.replica(0)


def test_scales_of_gradients() -> None:
    gradients: dict[Any, torch.Tensor] = {}
    for scale in ("mean", "sum", (0.5, 0.5), (1.0, 0.0)):
        with executor(2, gradient_scale=scale) as made:
            gradients[scale] = made.run(batch(4), ("0.weight@GRAD",))["0.weight@GRAD"]
    assert torch.equal(gradients["sum"], 2 * gradients["mean"])
    assert torch.equal(gradients[0.5, 0.5], gradients["mean"])
    with executor(1) as made:
        first = made.run({k: v[:2] for k, v in batch(4).items()}, "0.weight@GRAD")["0.weight@GRAD"]
    torch.testing.assert_close(gradients[1.0, 0.0], first)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_optimizer_whose_hyperparameters_change(strategy: str) -> None:
    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 0.01)

    model, whole = network(), batch(6)
    optimizer = adam(list(model.parameters()))
    with executor(2, optimizer=adam, strategy=strategy) as made:
        for rate in (0.01, 0.01, 0.002, 0.002):
            made.set_hyperparameters(lr=rate)
            optimizer.param_groups[0]["lr"] = rate
            made.run(whole)
            optimizer.zero_grad()
            loss(model, *whole.values())[0].backward()
            optimizer.step()
        with pytest.raises(UserError, match=r"AdamW has no weight_decai \(did you mean 'weight_decay'\?\)"):
            made.set_hyperparameters(weight_decai=1)
        with pytest.raises(UserError, match="lr of AdamW is a number"):
            made.set_hyperparameters(weight_decay=0.0, lr="0.1")
        for name, value in made.replica(1).items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-9)


def test_hyperparameters_of_an_optimizer_that_takes_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
    with executor(1, model, optimizer=lambda own: torch.optim.Muon(own, lr=0.1)) as made:
        made.set_hyperparameters(lr=0.0)
        made.run(batch(4))
        assert_same(made.replica(0), dict(model.state_dict()))
        with pytest.raises(UserError, match="Muon has no betas"):
            made.set_hyperparameters(betas=(0.9, 0.99))


def test_hyperparameters_that_no_run_has_used_yet_are_in_the_state() -> None:
    with executor(2) as made:
        made.set_hyperparameters(lr=0.5)
        state = made.state_dict()
        made.run(batch(4))
        wanted = made.replica(0)
        assert {own["hyperparameters"]["lr"] for own in state["optimizer"].values()} == {0.5}
    with executor(2) as made:
        made.load_state_dict(state)
        again = made.state_dict()["optimizer"]
        assert {own["hyperparameters"]["lr"] for own in again.values()} == {0.5}
        made.set_hyperparameters(momentum=0.5)
        again = made.state_dict()["optimizer"]
        assert {own["hyperparameters"]["momentum"] for own in again.values()} == {0.5}
        made.load_state_dict(state)
        made.run(batch(4))
        assert_same(made.replica(1), wanted)


@pytest.mark.parametrize("frozen", [0, 5])
def test_hyperparameters_of_a_state_are_loaded_beside_parameters_that_were_frozen(frozen: int) -> None:
    model = network()
    model[frozen].requires_grad_(False)  # type: ignore[index]
    with executor(1, model, bucket_mb=4) as made:
        made.run(batch(4))
        made.set_hyperparameters(lr=0.5)
        state = made.state_dict()
    with executor(2, bucket_mb=4) as made:
        made.load_state_dict(state)
        made.run(batch(4))
        found = made.state_dict()["optimizer"]
    assert len(found) == 6 and all(own["hyperparameters"]["lr"] == 0.5 for own in found.values())


def test_an_optimizer_may_write_its_gradients() -> None:
    def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, 0.9, nesterov=True, foreach=True)

    assert_same(*(trained(3, [7, 2, 7], optimizer=nesterov, strategy=strategy) for strategy in STRATEGIES))


class Replacing(torch.optim.SGD):
    """Gives each parameter other memory, as optimizers do that assign to `data`."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for own in group["params"]:
                own.data = own.data - group["lr"] * own.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_may_give_parameters_other_memory(strategy: str) -> None:
    found = trained(2, [4, 6, 4], optimizer=lambda own: Replacing(own, 0.1), strategy=strategy)
    wanted = trained(2, [4, 6, 4], optimizer=lambda own: torch.optim.SGD(own, 0.1), strategy=strategy)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def test_training_goes_on_from_a_state_with_other_devices() -> None:
    with executor(2, network(0.4)) as made:
        made.run(batch(6, 0))
        state = made.state_dict()
        for step in (1, 2):
            made.run(batch(6, step))
        wanted = made.replica(0)
    with executor(2, network(0.4), strategy="reduce") as made:
        made.load_state_dict(state)
        for step in (1, 2):
            made.run(batch(6, step))
        assert_same(made.replica(1), wanted)
    with executor(3, network(0.4)) as made:
        made.run(batch(4))
        made.load_state_dict(state)
        for step in (1, 2):
            made.run(batch(6, step))
        for name, value in made.replica(2).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.second(torch.tanh(self.first(x))) * self.scale + self.shift
        return scores


def test_a_loaded_state_may_change_before_the_first_run() -> None:
    found = []
    for is_changed in (False, True):
        with executor(1) as made:
            made.run(batch(2, 0))
            state = made.state_dict()
        with executor(1) as made:
            made.load_state_dict(state)
            if is_changed:
                for value in filter(torch.is_tensor, tree_leaves(state)):
                    value.zero_()
            made.run(batch(2, 1))
            found.append(made.replica(0))
    assert_same(*found)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_models_state_can_be_loaded_into_the_model(strategy: str) -> None:
    model = Tied().double()
    with executor(2, model, strategy=strategy) as made:
        made.run(batch(4))
        state = made.state_dict()
        assert list(state["model"]) == list(model.state_dict())
        assert state["model"]["first.weight"] is state["model"]["second.weight"]  # saved once
        model.load_state_dict(state["model"])
        assert_same(
            dict(model.named_parameters()), {n: made.replica(1)[n] for n, _ in model.named_parameters()}
        )
        made.run(batch(4, 1))
        wanted = made.replica(0)
        made.load_state_dict(state)
        made.run(batch(4, 1))
        assert_same(made.replica(1), wanted)


def test_an_optimizer_that_needs_a_closure_is_refused_when_the_executor_is_made() -> None:
    with pytest.raises(UserError, match=r"LBFGS.step needs a closure, .*such as SGD or AdamW"):
        ParallelExecutor(network(), loss, torch.optim.LBFGS, flow.cpus(1))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def test_a_scheduler_of_the_optimizer_is_no_reason_to_refuse_it() -> None:
    """It wraps the optimizer's step, whose signature then has self."""

    def scheduled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = momentum(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return optimizer

    assert_same(trained(2, [4, 3], optimizer=scheduled), trained(2, [4, 3]))


def penalty(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean squared gradient of the scores by the samples."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()


def test_a_loss_may_have_gradients_inside() -> None:
    model, other = network(), network()
    with executor(2, other, loss=penalty) as made:
        found = made.run(batch(4), ["loss", "0.weight@GRAD"])
    wanted = penalty(model, *batch(4).values())
    wanted.backward()
    torch.testing.assert_close(found["loss"], wanted.detach())
    torch.testing.assert_close(found["0.weight@GRAD"], next(model.parameters()).grad)


def test_gradients_inside_may_reach_a_parameter_that_the_loss_does_not() -> None:
    def watched(model: nn.ModuleDict, x: torch.Tensor, labels: torch.Tensor) -> Any:
        (slope,) = torch.autograd.grad(model["aside"](x).sum(), model["aside"].weight)
        return F.cross_entropy(model["used"](x), labels), {"slope": slope.norm()}

    model = nn.ModuleDict({"used": nn.Linear(6, 3), "aside": nn.Linear(6, 1)}).double()
    with executor(2, model, loss=watched) as made, pytest.warns(UserWarning, match="reaches aside.weight"):
        assert made.run(batch(4), ["slope"])["slope"].shape == (2,)


def test_a_loss_that_writes_its_batch_does_so_once() -> None:
    """The executor calls it once before the capture, which must not change the batch."""

    def scaled(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return loss(model, x.mul_(2).sub_(1), labels)

    whole = batch(5)
    with executor(2, loss=scaled) as made:
        made.run(whole)
        assert torch.equal(made.evaluate(scaled, whole, ["scores"])["scores"], scores_after(whole))
        found = made.replica(0)
    with executor(2) as made:
        made.run({**whole, "x": whole["x"] * 2 - 1})
        assert_same(made.replica(0), found)


def scores_after(whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the scores of an executor that is trained on and evaluated with scaled samples."""
    whole = {**whole, "x": whole["x"] * 2 - 1}
    with executor(2) as made:
        made.run(whole)
        return made.evaluate(loss, whole, ["scores"])["scores"]


def test_the_executors_seed_leaves_torchs_generators_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed would also change those of GPUs."""
    model, state = network(), torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", None)
    with executor(1, model) as made:
        made.run(batch(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dropout_layer_in_evaluation_mode_stays_in_it() -> None:
    model = network(0.5)
    model[2].eval()
    found = []
    for each in (model, network()):
        with executor(2, each) as made:
            made.run(batch(4))
            found.append(made.replica(0))
    assert_same(*found)


def test_a_model_of_arrays_is_copied_to_the_executors_devices() -> None:
    devices, whole = flow.cpus(3), batch(4)
    with flow.Engine(devices), flow.device(devices[2]):
        model = flow.arrays(Normalised().double())
        made = ParallelExecutor(model, loss, momentum, devices[:2])
        with flow.recording() as trace:
            found = made.run(whole)
            flow.wait_all()
    assert type(found["loss"]) is torch.Tensor
    assert {o.device for o in trace.operations if o.phase != "copy"} == {"cpu:0", "cpu:1"}


def test_a_model_that_keeps_results_of_the_step_is_refused() -> None:
    class Keeping(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept: torch.Tensor = super().forward(x)
            return self.kept

    message = r"kept by something.*change it in place \(copy_\)"
    with (
        executor(2, Keeping(nn.Linear(6, 3)).double()) as made,
        pytest.raises(flow.CaptureError, match=message),
    ):
        made.run(batch(4))


class Centred(nn.Module):
    """It subtracts a moving mean of its scores, which is a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.centre = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x)
        with torch.no_grad():
            self.centre.lerp_(scores.mean(0), 0.5)
        return scores - self.centre


def test_a_parameter_that_the_loss_writes_counts_as_a_buffer() -> None:
    """The call of the loss before the capture must not change it."""
    torch.manual_seed(0)
    model, feed = Centred().double(), batch(5)
    with torch.no_grad():
        centre = model.linear(feed["x"]).mean(0) / 2
    for n in (1, 3):
        with executor(n, model) as made:
            made.run(feed)
            replicas = [made.replica(d) for d in range(n)]
        torch.testing.assert_close(replicas[0]["centre"], centre)
        for other in replicas[1:]:
            assert_same(other, replicas[0])
    with (
        executor(2, model, strategy="reduce") as made,
        pytest.raises(UserError, match="the loss writes centre, which the devices share"),
    ):
        made.run(feed)


def test_a_parameter_that_the_loss_writes_on_one_device_only_counts_as_a_buffer() -> None:
    def seldom(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:  # the second device
            with torch.no_grad():
                model.centre.add_(1)
        return (model.linear(x) - model.centre).square().mean()

    with executor(2, Centred().double(), loss=seldom) as made:
        made.run(batch(3))
        assert_same(made.replica(0), made.replica(1))
        torch.testing.assert_close(made.replica(0)["centre"], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_embeddings_that_renormalise_their_rows_are_for_one_copy_of_the_weights() -> None:
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 3)).double()
    with executor(2, model, strategy="reduce") as made:
        made.run({"x": torch.arange(8).view(4, 2), "labels": torch.tensor([0, 1, 2, 0])})
    with pytest.raises(UserError, match="0 has max_norm, so its forward writes"), executor(2, model):
        pass


def test_a_resumed_executor_continues_random_numbers() -> None:
    def noisy(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x) + torch.randn(x.shape[0], 3), labels)

    def losses(made: ParallelExecutor, steps: range) -> list[float]:
        return [made.run(batch(4 + n % 2))["loss"].item() for n in steps]

    with executor(2, loss=noisy) as made:
        before, state = losses(made, range(2)), made.state_dict()
        wanted = losses(made, range(2, 5))
    with executor(2, loss=noisy) as made:
        made.load_state_dict(state)
        assert losses(made, range(2, 5)) == wanted
    assert len({*before, *wanted}) == 5


def test_executors_of_several_threads_draw_the_numbers_of_their_seeds() -> None:
    """Without turns, they would draw from one another's."""

    def noisy(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.dropout(model(x), 0.3) + torch.rand(x.shape[0], 3), labels)

    def train() -> None:
        found.append([trained(2, [size], loss=noisy, model=model) for size in (2, 3, 4, 5, 6)])

    found: list[list[Results]] = []
    model = network()
    train()
    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for other in found[1:]:
        for one, wanted in zip(other, found[0], strict=True):
            assert_same(one, wanted)


def test_a_run_that_is_interrupted_after_its_submission_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next run would repeat its masks of dropout."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with executor(2) as made:
        with monkeypatch.context() as patch:
            patch.setattr(ParallelExecutor, "_wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                made.run(batch(4))
        assert made.state_dict()["runs"] == 1
        made.run(batch(4))
        assert made.state_dict()["runs"] == 2


def test_an_interrupt_while_the_call_before_a_capture_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt(Exception):
        pass

    restore = steps._restoring._restore

    def slow(scope: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        restore(scope)

    def handle(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(steps._restoring, "_restore", slow)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with executor(2, Centred().double()) as made:
            with pytest.raises(Interrupt):
                made.run(batch(4))
            assert made.replica(0)["centre"].tolist() == [0, 0, 0]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_buffers_are_means_over_samples_on_all_devices() -> None:
    torch.manual_seed(0)
    model, whole = Normalised().double(), batch(5)
    parts = [copy.deepcopy(model) for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 3), slice(3, 5)), strict=True):
        part(whole["x"][rows])
    with executor(3, model, strategy="reduce") as made:
        made.run([{k: v[:3] for k, v in whole.items()}, {}, {k: v[3:] for k, v in whole.items()}])
        replicas = [made.replica(d) for d in range(3)]
    first, second = (dict(part.named_buffers()) for part in parts)
    for name in ("net.1.running_mean", "net.1.running_var"):
        torch.testing.assert_close(replicas[0][name], first[name] * 0.6 + second[name] * 0.4)
    assert replicas[1]["net.1.num_batches_tracked"] == 1
    for other in replicas[1:]:
        assert_same(other, replicas[0])


def test_buffers_that_the_loss_does_not_write_keep_their_bits() -> None:
    """A mean of three equal numbers is rounded, and can overflow."""
    model = network()
    torch.manual_seed(0)
    model.register_buffer("positions", torch.randn(100).bfloat16())
    model.register_buffer("mask", torch.tensor([torch.finfo(torch.half).min]).half())
    frozen = nn.BatchNorm1d(3).double().eval()
    frozen.running_mean.normal_()
    model.append(frozen)  # type: ignore[operator]
    wanted = dict(model.named_buffers())
    for n, n_samples in ((2, 3), (3, 5), (3, 6)):
        with executor(n, model) as made:
            for _ in range(3):
                made.run(batch(n_samples))
            for device in range(n):
                found = made.replica(device)
                assert_same({name: found[name] for name in wanted}, wanted)


def test_buffers_are_restored_if_the_loss_raises() -> None:
    def broken(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model(x)
        raise KeyError("user")

    with executor(2, Normalised().double(), loss=broken) as made:
        before = made.replica(0)
        with pytest.raises(KeyError):
            made.run(batch(4))
        assert_same(made.replica(0), before)


def test_buffers_are_restored_whatever_a_second_interrupt_hits() -> None:
    """The first raises in the loss, the second in one of the functions that are called from then on."""
    n_calls, number = [0], 0

    def interrupt(frame: Any, event: str, argument: object) -> None:
        n_calls[0] += 1
        if n_calls[0] > number:
            sys.settrace(None)
            raise KeyboardInterrupt

    def interrupted(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model(x)
        sys.settrace(interrupt)
        raise KeyboardInterrupt

    def is_restored() -> bool:
        return all(torch.equal(value, before[name]) for name, value in made.replica(0).items())

    with executor(2, Normalised().double(), loss=interrupted) as made:
        before = made.replica(0)
        while n_calls[0] >= number:
            n_calls[0], number = 0, number + 1
            try:
                made.run(batch(4))
            except KeyboardInterrupt:
                sys.settrace(None)
            torch.set_grad_enabled(True)  # torch.no_grad does not survive every interrupt
            wait_until(is_restored, "the restored buffers")
        assert number == 1  # no function of Python is called then


def test_evaluation_shares_the_variables_and_changes_none() -> None:
    torch.manual_seed(0)

    def errors(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"wrong": model(x).argmax(1) != labels}

    with executor(2, Normalised().double()) as made:
        made.run(batch(6))
        before = made.replica(0)
        found = made.evaluate(errors, batch(5), ["wrong"])
        scored = made.evaluate(loss, batch(5))
        with pytest.raises(UserError, match=r"a real scalar, .* not of shape \(2,\)"):
            made.evaluate(lambda model, x, labels: loss(model, x, labels)[0].expand(len(x)), batch(4))
        assert_same(made.replica(0), before)
        plain = Normalised().double()
        plain.load_state_dict(before)
        plain.eval()
        wanted, _ = loss(plain, *batch(5).values())
        torch.testing.assert_close(scored["loss"], wanted.detach())
        assert torch.equal(found["wrong"], errors(plain, *batch(5).values())["wrong"])


class Counting(nn.Linear):
    """Counts the samples that it has seen."""

    def __init__(self) -> None:
        super().__init__(6, 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return super().forward(x)


@pytest.mark.parametrize("fails", [False, True])
def test_no_evaluation_uses_masks_of_training(fails: bool) -> None:
    def broken(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if fails:
            raise KeyError
        return loss(model, x, labels)

    def sampled(model: nn.Module, x: torch.Tensor) -> Results:
        return {"scores": model.train()(x)}

    with executor(2, network(0.5), loss=broken) as made:
        with suppress(KeyError):
            made.run(batch(4))
        with pytest.raises(UserError, match="dropout layer 0 is in training mode outside of a training step"):
            made.evaluate(sampled, {"x": batch(4)["x"]}, ["scores"])


def test_an_evaluation_that_changes_buffers_does_so_once() -> None:
    with executor(1, Counting()) as made:
        for n in (1, 2):
            made.evaluate(loss, batch(5))
            assert made.replica(0)["seen"] == 5 * n


def single_precision() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    whole = batch(6)
    return network().float(), {"x": whole["x"].float(), "labels": whole["labels"]}


def test_autocast_converts_the_weights_of_the_present_step() -> None:
    """Autocast keeps converted weights until its outermost scope ends, also across optimizer.step."""
    model, whole = single_precision()
    optimizer, wanted, found = momentum(list(model.parameters())), [], []
    with executor(1, model) as made:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                found.append(made.run(whole)["loss"])
                value, _ = loss(model, *whole.values())
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            wanted.append(value.detach())
        assert torch.equal(torch.stack(found), torch.stack(wanted))
        assert_same(made.replica(0), dict(model.named_parameters()))


def test_a_program_belongs_to_its_precision() -> None:
    def scores(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": model(x), "zeros": torch.zeros(1)}

    def dtypes() -> list[torch.dtype]:
        return [value.dtype for value in made.evaluate(scores, whole, ["scores", "zeros"]).values()]

    model, whole = single_precision()
    with executor(2, model) as made:
        for _ in range(2):
            assert dtypes() == [torch.float32, torch.float32]
            with torch.autocast("cpu", torch.bfloat16):
                assert dtypes() == [torch.bfloat16, torch.float32]
                assert made.run(whole, ["scores"])["scores"].dtype is torch.bfloat16
            with torch.autocast("cpu", torch.float16):
                assert dtypes() == [torch.float16, torch.float32]
            assert made.run(whole, ["scores"])["scores"].dtype is torch.float32
            torch.set_default_dtype(torch.float64)
            try:
                assert dtypes() == [torch.float32, torch.float64]
            finally:
                torch.set_default_dtype(torch.float32)
        assert len(made._programs) == 6


def test_the_state_of_parameter_groups_lies_under_the_parameters_names() -> None:
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        biases = [parameter for parameter in parameters if parameter.dim() == 1]
        weights = [parameter for parameter in parameters if parameter.dim() > 1]
        return torch.optim.SGD([{"params": biases, "lr": 0.2}, {"params": weights}], 0.1, 0.9)

    with executor(2, optimizer=grouped, bucket_mb=4) as first:
        first.run(batch(5))
        state = first.state_dict()
        first.run(batch(5))
        wanted = first.replica(0)
    for name, own in state["optimizer"].items():
        assert own["state"]["momentum_buffer"].shape == state["model"][name].shape
        assert own["hyperparameters"]["lr"] == (0.2 if "bias" in name else 0.1)
    with executor(2, optimizer=grouped) as other:  # with other buckets
        other.load_state_dict(state)
        other.run(batch(5))
        assert_same(other.replica(0), wanted)


class WithExtraState(nn.Module):
    """A network whose state_dict has more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(6, 3), {"vocabulary": ["a"], "scale": torch.ones(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(x)
        return scores


def test_extra_state_of_modules_is_saved_and_restored() -> None:
    original = WithExtraState().double()
    with executor(2, original) as made:
        made.run(batch(5))
        state = made.state_dict()
        original.load_state_dict(copy.deepcopy(state["model"]))
        state["model"]["_extra_state"]["vocabulary"].append("b")
        made.load_state_dict(state)
        again = made.state_dict()["model"]
        assert again["_extra_state"]["vocabulary"] == ["a", "b"]
        assert again.keys() == original.state_dict().keys()
        del state["model"]["_extra_state"]
        with pytest.raises(UserError, match="the state has no _extra_state"):
            made.load_state_dict(state)
    assert original.extra["vocabulary"] == ["a"]


def test_an_interrupted_evaluation_restores_the_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: nn.Module, mode: bool = True) -> nn.Module:
        raise KeyboardInterrupt

    with executor(2, Normalised().double()) as made:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(nn.ReLU, "train", interrupted)
            made.evaluate(loss, batch(5))
        assert all(module.training for replica in made._replicas for module in replica.model.modules())


@pytest.mark.parametrize(("where", "name"), [(copy, "deepcopy"), (replicas.Buckets, "load_state")])
def test_nothing_runs_on_a_state_whose_loading_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """Only a part of the weights may be those of the state, or none."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with executor(2) as made:
        made.run(batch(4))
        state = made.state_dict()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(where, name, interrupted)
            made.load_state_dict(state)
        uses: list[Callable[[], object]] = [
            made.state_dict, lambda: made.run(batch(4)), lambda: made.evaluate(loss, batch(4)),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(UserError, match=r"load_state_dict was interrupted .* call it again"):
                use()
        made.load_state_dict(state)
        made.run(batch(4))


def test_hyperparameters_wait_for_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its updates must not use the old value on one device and the new one on the other."""
    may_update, rates = threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            may_update.wait()
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def interrupted(self: ParallelExecutor) -> None:
        raise KeyboardInterrupt

    with executor(2, optimizer=lambda parameters: Slow(parameters, 0.5), bucket_mb=1) as made:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ParallelExecutor, "_wait", interrupted)
            made.run(batch(4))
        opening = threading.Timer(0.2, may_update.set)
        opening.start()
        made.set_hyperparameters(lr=0.25)
        assert rates == [0.5, 0.5]
        opening.join()


def test_the_program_merges_a_bucket_as_soon_as_its_gradients_are_there() -> None:
    with executor(2) as made:
        made.run(batch(4))
        program = made.program
    assert program is not None
    merges = [o for o in program.operations if o.name == "all_reduce"]
    assert len(merges) > 2 and {o.name for o in program.operations} >= {"all_reduce", "update", "fetch"}
    assert {o.lane for o in merges} == {"communication"} and {o.device for o in merges} == {"cpu:0", "cpu:1"}
    needed = {after: [b for b, a in program.edges if a == after] for after in (o.number for o in merges)}
    backward = max(o.number for o in program.operations if o.phase == "backward" and o.device == "cpu:1")
    assert max(needed[merges[0].number]) < backward  # it does not wait for the end of backward
    with executor(2, strategy="reduce") as made:
        made.run(batch(4))
        assert made.program is not None
        updates = [o for o in made.program.operations if o.name == "update"]
        assert len(updates) == len(merges) and {o.device for o in updates} == {"cpu:0", "cpu:1"}


def test_reduce_keeps_one_copy_of_weights_and_state_in_one_memory() -> None:
    with executor(3, strategy="reduce") as made:
        made.run(batch(4))
        memories = [{id(p.memory) for p in replica.parameters.values()} for replica in made._replicas]
        assert memories[0] == memories[1] == memories[2]
        assert all(len(bucket.updates) == 1 for bucket in made._buckets.all)


def test_sparse_gradients_stay_sparse() -> None:
    def words(model: nn.Module, numbers: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(numbers).mean(1), wanted)

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.5)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2)).double()
    feed = {"numbers": torch.randint(0, 9, (7, 5)), "wanted": torch.randn(7, 2, dtype=torch.float64)}
    found = {}
    for n in (1, 3):
        for strategy in STRATEGIES:
            with executor(n, model, loss=words, optimizer=sgd, strategy=strategy) as made:
                for _ in range(2):
                    gradient = made.run(feed, "0.weight@GRAD")["0.weight@GRAD"]
                replicas = [made.replica(d) for d in range(n)]
            assert gradient.is_sparse and (n == 1 or len(gradient._values()) <= 9)
            found[n, strategy] = replicas[0]
            for other in replicas:
                assert_same(other, found[n, "all_reduce"])
    for name, value in found[1, "reduce"].items():
        torch.testing.assert_close(found[3, "reduce"][name], value, rtol=1e-10, atol=1e-10)


def test_a_failed_operation_raises_and_stops_until_a_state_is_loaded() -> None:
    class Moody(torch.optim.SGD):
        angry = False

        def step(self, closure: Any = None) -> Any:
            if Moody.angry:
                raise RuntimeError("not today")
            return super().step(closure)

    with executor(2, optimizer=lambda parameters: Moody(parameters, 0.1)) as made:
        made.run(batch(4))
        state = made.state_dict()
        Moody.angry = True
        with pytest.raises(flow.OperationError, match=r"update on cpu:\d.*not today") as caught:
            made.run(batch(4))
        assert any("also failed: update" in note for note in caught.value.__notes__)  # on the other device
        Moody.angry = False
        with pytest.raises(UserError, match=r"an earlier run has failed .*load_state_dict first"):
            made.run(batch(4))
        made.load_state_dict(state)
        made.run(batch(4))
        found = made.replica(1)
        made.load_state_dict(state)
        made.run(batch(4))
        assert_same(made.replica(0), found)


BAD_SETTINGS = [
    ({"gradient_scale": ["a", "b"]}, "a list of numbers"),
    ({"gradient_scale": 3}, "a list of numbers, one for each device, not 3"),
    ({"bucket_mb": "4"}, "bucket_mb is a number, more than 0, not '4'"),
    ({"model": "net"}, "model is an nn.Module, not 'net'"),
    ({"loss": None}, "loss is a function of the model and a batch, not None"),
    ({"optimizer": None}, "optimizer is a function that makes one from parameters, not None"),
    ({"group": "world"}, "group needs other processes"),
    ({"strategy": "al_reduce"}, r"strategy is all_reduce or reduce, not 'al_reduce' \(did you mean"),
    ({"compress": "int2"}, "compress is int8 or int4, not 'int2'"),
    (
        {"compress": "int8", "model": nn.Linear(6, 3, dtype=torch.complex64)},
        "compress: weight is torch.complex64: only real numbers",
    ),
    ({"gradient_scale": "average"}, "gradient_scale is mean or sum, not 'average'"),
    ({"gradient_scale": [1.0, float("nan")]}, "a list of numbers, one for each device, not .1.0, nan"),
    ({"gradient_scale": [1.0]}, "gradient_scale has 1 factors for 2 devices"),
    ({"bucket_mb": 0}, "bucket_mb is a number, more than 0"),
    ({"bucket_mb": float("inf")}, "bucket_mb is a number, more than 0, not inf"),
    ({"seed": -1}, "seed is a whole number, at least 0"),
    ({"optimizer": lambda parameters: None}, "makes a torch.optim.Optimizer, not NoneType"),
    ({"loss": lambda model, x, labels: model(x)}, r"the loss must be a real scalar.*not of shape \(2, 3\)"),
    (
        {"loss": lambda model, x, labels: model(x).sum() * 1j},
        "the loss must be a real scalar.*not torch.complex",
    ),
    (
        {"loss": lambda model, x, labels: torch.tensor(3.0)},
        "the loss depends on no parameter",
    ),
    ({"loss": lambda model, x, labels: 3.0}, "the loss must be a real scalar.*not float"),
    ({"loss": lambda model, x, labels: {"scores": model(x)}}, "the loss must be a real scalar.*not dict"),
    (
        {"loss": lambda model, x, labels: (model(x).sum(), {0: x})},
        "results have the name 0, which is no text",
    ),
    ({"loss": lambda model, x, labels: (model(x).sum(), {"loss": x})}, "the name of the loss itself"),
    ({"loss": lambda model, x, labels: x.mean()}, "the loss depends on no parameter"),
    ({"loss": lambda model: model}, "takes the model and a batch"),
    ({"loss": lambda model, *batch: model(*batch)}, r"loss takes \*args: name the arguments"),
]


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = network()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with (
        pytest.raises(UserError, match=r"model can't be copied to the devices: cannot pickle"),
        executor(2, model),
    ):
        pass


def test_a_generator_of_a_model_is_for_one_device() -> None:
    """Its state can't be copied, and copies would draw the same numbers."""
    model = network()
    model.generator = torch.Generator()  # type: ignore[assignment]
    with executor(1, model) as made:
        made.run(batch(4))
    with pytest.raises(UserError, match="model can't be copied to the devices"), executor(2, model):
        pass


@pytest.mark.parametrize("n_before", [0, 1])
@pytest.mark.parametrize(
    ("saved", "own", "difference"),
    [
        (momentum, torch.optim.Adam, "it has momentum, .* and no betas"),
        (torch.optim.Adam, momentum, "it has betas, .* and no momentum"),
        (torch.optim.RMSprop, torch.optim.Adam, "it has momentum, alpha, .* and no betas"),
    ],
    ids=["momenta", "Adam", "RMSprop"],
)
def test_another_optimizers_state_is_refused(n_before: int, saved: Any, own: Any, difference: str) -> None:
    with executor(1, optimizer=saved) as made:
        made.run(batch(4))
        state = made.state_dict()
    with executor(1, optimizer=own) as made:
        for _ in range(n_before):
            made.run(batch(4))
        with pytest.raises(UserError, match=f"can't use this optimizer's state: {difference}"):
            made.load_state_dict(state)
            made.run(batch(4))


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), executor(2, **settings) as made:
        made.run(batch(4))


def test_an_optimizer_of_the_models_own_parameters_is_refused() -> None:
    model = network()
    with pytest.raises(UserError, match="the devices train copies"), flow.Engine(flow.cpus(2)) as engine:
        ParallelExecutor(model, loss, lambda _: momentum(list(model.parameters())), engine.devices)


@pytest.mark.parametrize("place", [0, 99])
@pytest.mark.parametrize("alone", [False, True])
def test_an_optimizer_of_parameters_outside_of_the_model_is_refused(place: int, alone: bool) -> None:
    """Such as a temperature of the loss: every device would need its own, and its merged gradient."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kept = [] if alone else list(parameters)
        kept.insert(place, nn.Parameter(torch.ones(3)))
        return momentum(kept)

    with (
        pytest.raises(UserError, match=r"shape \(3,\) that it was not given"),
        executor(2, optimizer=optimizer),
    ):
        pass


def test_an_optimizer_that_was_made_before_is_refused() -> None:
    """It has other parameters, and no step would change those of the bucket."""
    kept: list[torch.optim.Optimizer] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if not kept:
            kept.append(momentum(parameters))
        return kept[0]

    with (
        executor(2, optimizer=optimizer) as made,
        pytest.raises(UserError, match="that it had returned before: let it make one"),
    ):
        made.run(batch(4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_sees_the_marks_of_parameters(strategy: str) -> None:
    """They are the only way to tell parameters of one shape apart."""
    model = network()
    for name, parameter in model.named_parameters():
        parameter.decay = 0.5 if name == "3.weight" else 0.0  # type: ignore[attr-defined]

    def optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": [own], "weight_decay": own.decay} for own in parameters]
        return torch.optim.SGD(groups, 0.1)

    own = optimizer(list(model.parameters()))
    with executor(2, model, optimizer=optimizer, strategy=strategy) as made:
        made.run(batch(4))
        found = made.replica(0), made.replica(1)
    loss(model, *batch(4).values())[0].backward()
    own.step()
    assert_same(*found)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-10, atol=1e-10)


def test_an_optimizers_tensors_stay_ordinary_ones() -> None:
    """torch copies them deeply when it loads a state, inside of a device and of the capture."""
    with executor(2, optimizer=lambda own: torch.optim.Adam(own, torch.tensor(0.1))) as made:
        made.run(batch(4))
        made.set_hyperparameters(lr=torch.tensor(0.05))
        made.run(batch(4))
        assert_same(made.replica(0), made.replica(1))
        rate = made.state_dict()["optimizer"]["0.weight"]["hyperparameters"]["lr"]
        assert type(rate) is torch.Tensor and rate == 0.05


def test_tensors_among_hyperparameters_belong_to_one_optimizer_each() -> None:
    """A scheduler writes them: a saved state and other optimizers must not see that."""
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = torch.optim.Adam(parameters, torch.tensor(0.5))
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(made, 0.5))
        return made

    def rates(state: dict[str, Any]) -> set[float]:
        return {float(own["hyperparameters"]["lr"]) for own in state["optimizer"].values()}

    with executor(2, optimizer=optimizer) as made:
        made.run(batch(4))
        first = made.state_dict()
        for scheduler in schedulers[1:]:  # the first optimizer is never used
            scheduler.step()
        assert rates(first) == {0.5} and rates(made.state_dict()) == {0.25}
        given = torch.tensor(1.0)
        made.set_hyperparameters(lr=given)
        for scheduler in schedulers[1:]:
            scheduler.step()
        assert rates(made.state_dict()) == {0.5} and given == 1
    with executor(2, optimizer=optimizer) as made:
        made.load_state_dict(first)
        for own in made.state_dict()["optimizer"].values():
            own["state"]["exp_avg"].zero_()
        assert all(own["state"]["exp_avg"].any() for own in made.state_dict()["optimizer"].values())


@pytest.mark.parametrize("result", ["text", torch.ones(1).expand])
def test_results_that_cannot_be_merged(result: Any) -> None:
    def function(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"result": result(len(x), len(x)) if callable(result) else result}

    with executor(2) as made:
        with pytest.raises(
            UserError, match=r"results 'result' can't be merged: .*merge=False returns a list"
        ):
            made.evaluate(function, batch(3), ["result"])
        assert len(made.evaluate(function, batch(3), ["result"], merge=False)["result"]) == 2


BAD_RUNS = [
    ({"x": torch.ones(2, 6), "label": torch.ones(2)}, "loss", r"has 'label' \(did you mean 'labels'\?\)"),
    ({"x": torch.ones(2, 6)}, "loss", "the feed lacks labels"),
    ({"x": torch.ones(2, 6), "labels": torch.ones(3)}, "loss", "2 samples of x and 3 of labels"),
    ({"x": torch.ones(0, 6), "labels": torch.ones(0)}, "loss", "the feed has no samples"),
    ({"x": torch.eye(6).to_sparse(), "labels": torch.ones(6)}, "loss", "'x' is sparse"),
    ({"x": torch.ones(()), "labels": torch.ones(2)}, "loss", "'x' is one number"),
    (3, "loss", "the feed is a dictionary"),
    ({"x": "six", "labels": torch.ones(2)}, "loss", "'x' can't be made a tensor"),
    ([batch(2)], "loss", "a list for 1 devices: there are 2"),
    ([{}, {}], "loss", "the feed has no samples"),
    ({3: torch.ones(2)}, "loss", "the feed has '3': it takes x, labels"),
    (batch(4), 3, "fetch is a name or a list of names, not 3"),
    (batch(4), ["loss", 3], "fetch is a name or a list of names"),
    (batch(4), "score", r"there is no 'score' \(did you mean 'scores'\?\)"),
    (batch(4), "3.weigth@GRAD", r"did you mean '3.weight@GRAD'\?"),
]


@pytest.mark.parametrize(("feed", "fetch", "message"), BAD_RUNS)
def test_runs_that_are_refused_change_nothing(feed: Any, fetch: Any, message: str) -> None:
    with executor(2) as made:
        with pytest.raises(UserError, match=message):
            made.run(feed, fetch)
        made.run(batch(4))
        assert_same(made.replica(0), trained(2, [4]))


def test_devices_that_cannot_be_used() -> None:
    with pytest.raises(UserError, match="devices: give at least one"):
        ParallelExecutor(network(), loss, momentum, [])
    device = flow.cpus(1)[0]
    with pytest.raises(UserError, match="is none"):
        ParallelExecutor(network(), loss, momentum, devices=[flow.cpus(1), flow.cpus(1)])
    with pytest.raises(UserError, match="devices: one is there twice"):
        ParallelExecutor(network(), loss, momentum, [device, device])


def test_a_parameter_that_no_gradient_reaches_is_named_and_left() -> None:
    model = network()
    model.register_parameter("idle", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    with executor(2, model, loss=lambda m, x, labels: loss(m, x, labels)[0]) as made:
        with pytest.warns(UserWarning, match="no gradient reaches idle") as warned:
            made.run(batch(4))
        assert warned[0].filename == __file__
        assert torch.equal(made.replica(1)["idle"], torch.ones(3, dtype=torch.float64))


def test_devices_whose_gradients_reach_other_parameters_are_refused() -> None:
    def uneven(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model[0](x) + (model[1](x) if len(x) > 2 else 0), labels)

    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]).double()
    with executor(2, model, loss=uneven) as made:
        with pytest.raises(UserError, match=r"reach 1\.bias, 1\.weight on one of devices 0 and 1 only"):
            made.run(batch(5))
        assert made.run(batch(6))["loss"] > 0


def test_a_state_that_is_taken_and_loaded_in_inference_mode_can_be_trained_on() -> None:
    with executor(2) as made:
        made.run(batch(6))
        with torch.inference_mode():
            state = made.state_dict()
        made.run(batch(6))
        expected = made.replica(1)
        with torch.inference_mode():
            made.load_state_dict(state)
        made.run(batch(6))
        assert_same(made.replica(1), expected)


def test_states_that_do_not_fit() -> None:
    with executor(1) as made:
        state = made.state_dict()
        short = {**state, "model": {k: v for k, v in state["model"].items() if k != "0.bias"}}
        with pytest.raises(UserError, match="the state has no optimizer: give what state_dict"):
            made.load_state_dict({"model": {}})
        with pytest.raises(UserError, match="NoneType is no state: give what state_dict"):
            made.load_state_dict(None)  # type: ignore[arg-type]
        for key in ("model", "optimizer", "carried", "runs"):
            with pytest.raises(UserError, match=f"load_state_dict: {key} is str: give what state_dict"):
                made.load_state_dict({**state, key: "a"})
        with pytest.raises(
            UserError, match=r"has no lrr \(did you mean 'lr'"
        ):  # before there are buckets, too
            made.set_hyperparameters(lrr=0.1)
        with pytest.raises(UserError, match="the state has no 0"):
            made.load_state_dict(short)
        with pytest.raises(UserError, match=r"0\.bias is None, not a tensor"):
            made.load_state_dict({**state, "model": {**state["model"], "0.bias": None}})
        with pytest.raises(UserError, match="runs is -1: it must be 0 or more"):
            made.load_state_dict({**state, "runs": -1})
        state["model"]["0.bias"] = torch.ones(3)
        with pytest.raises(UserError, match=r"0.bias is \(16,\) in the model, \(3,\) in the state"):
            made.load_state_dict(state)
        with pytest.raises(UserError, match=r"replica .*: there are 0 to 0, the numbers of the devices"):
            made.replica(made.devices[0])  # type: ignore[arg-type]
        with pytest.raises(UserError, match="replica 1: there are 0 to 0"):
            made.replica(1)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_state_is_saved_and_loaded_inside_of_a_device(n_before: int) -> None:
    """Inside, torch copies and loads tensors as arrays, which an optimizer in a worker cannot use."""
    with executor(2) as first:
        first.run(batch(4))
        with flow.device(first.devices[0]):
            state = first.state_dict()
            assert not any(isinstance(leaf, flow.Array) for leaf in tree_leaves(state))
            arrays = copy.deepcopy(state)
    with executor(2) as made:
        for _ in range(n_before):
            made.run(batch(4))
        for given in (state, arrays):
            with flow.device(made.devices[0]):
                made.load_state_dict(given)
            made.run(batch(3, 1))
            assert_same(made.replica(0), trained(2, [4, 3]))


def test_an_executor_is_not_copied() -> None:
    """The optimizers of a copy would update the weights of the original."""
    with executor(2) as made:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(UserError, match="a ParallelExecutor can't be copied or pickled"):
                make(made)
        made.run(batch(4))
        assert_same(made.replica(0), trained(2, [4]))


def channels_last_network() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 3)
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("n", [1, 2])
def test_a_fused_optimizer_updates_weights_of_any_layout(n: int) -> None:
    """It pairs weights and gradients by their places in memory, and merged gradients were contiguous."""

    def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, 0.9, fused=True)

    x = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(8) % 3
    model = channels_last_network()
    optimizer = fused(list(model.parameters()))
    with executor(n, channels_last_network(), optimizer=fused) as made:
        for _ in range(3):
            made.run({"x": x, "labels": labels})
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()
        found = made.replica(0)
    for name, value in model.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name


def test_a_run_without_gradients_names_the_scope() -> None:
    devices = flow.cpus(1)
    model = nn.Linear(2, 1)
    with flow.Engine(devices):
        executor = flow.ParallelExecutor(
            model, lambda model, x: model(x).mean(), lambda own: torch.optim.SGD(own, 0.1), devices
        )
        with torch.no_grad(), pytest.raises(UserError, match=r"run\(\) trains, and torch\.no_grad"):
            executor.run({"x": torch.ones(2, 2)})
        executor.run({"x": torch.ones(2, 2)})


class Checkpointed(nn.Module):
    def __init__(self, repeats: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.block, x, use_reentrant=False) if self.repeats else self.block(x)
        return made


def test_a_checkpointed_block_has_the_same_dropout_masks_in_backward() -> None:
    found = [trained(2, [4, 4], model=Checkpointed(repeats).double()) for repeats in (False, True)]
    assert_same(*found)


@pytest.mark.parametrize("before", [False, True])
def test_reentrant_checkpoints_are_refused(before: bool) -> None:
    """torch.autograd.grad passes over one that has only the batch as its input, with its parameters."""

    def checkpointed(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first, *others = model.children()
        inputs = first(x) if before else x.clone().requires_grad_()
        block = nn.Sequential(*others[:3]) if before else first
        made = nn.Sequential(*others[3 if before else 0 :])(checkpoint(block, inputs, use_reentrant=True))
        return F.cross_entropy(made, labels)

    with executor(2, loss=checkpointed) as made:
        for _ in range(2):
            with pytest.raises(UserError, match=r"reentrant checkpoint.*use_reentrant=False"):
                made.run(batch(4))


class _BufferIsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, ctx.buffer, None


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("buffer", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _BufferIsGradient.apply(x[:, :3], self.weight, self.buffer)  # type: ignore


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_buffer_that_a_custom_backward_returns_is_not_added_to(strategy: str) -> None:
    found = trained(2, [4, 4], model=WithBuffer(), strategy=strategy)
    assert torch.equal(found["buffer"], torch.ones(3, dtype=torch.float64))


def test_a_dropout_layer_keeps_its_hooks_and_attributes() -> None:
    model = network()
    model[2].scale = 2.0
    model[2].register_forward_hook(lambda layer, _, output: output * layer.scale)
    wanted, _ = loss(model, **batch(4))
    with executor(2, model) as made:
        torch.testing.assert_close(made.run(batch(4))["loss"], wanted.detach())


class Chain(nn.Module):
    """Keeps its layers in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 3), nn.Dropout(0.5)
        self.chain = [self.first, self.drop]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.chain:
            x = layer(x)
        return x


def test_dropout_in_a_list_of_the_model_rests_in_evaluation() -> None:
    model = Chain().double()
    wanted, _ = loss(model.eval(), **batch(6))
    with executor(2, model.train()) as made:
        torch.testing.assert_close(made.evaluate(loss, batch(6))["loss"], wanted.detach())


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_decides_which_samples_share_a_dropout_mask(randomness: str) -> None:
    """Eight features of one of four samples looked like two rows of each: all samples had the same mask."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Flatten(0))

    def loss(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = torch.func.vmap(model, randomness=randomness)(x)
        return y.mean(), {"zeros": y == 0}

    executor = flow.ParallelExecutor(model, loss, lambda p: torch.optim.SGD(p, 0.1), flow.cpus(1))
    for n_samples in (4, 3):
        zeros = executor.run({"x": torch.randn(n_samples, 8)}, fetch=["zeros"])["zeros"]
        assert (zeros == zeros[0]).all().item() == (randomness == "same"), n_samples


def test_dropout_that_an_evaluation_switches_on_is_refused() -> None:
    """It was not found as an nn.Dropout: all samples of Monte Carlo dropout were equal."""

    def sampled(model: nn.Module, x: torch.Tensor) -> Results:
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.train()
        return {"scores": model(x)}

    with (
        executor(1, network(0.5)) as made,
        pytest.raises(UserError, match=r"outside of a training step.*call F\.dropout there"),
    ):
        made.evaluate(sampled, {"x": batch(4)["x"]}, ["scores"])


class Lazy(nn.Module):
    """Makes a table, a buffer or a layer in its first forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.layer, self.kept = kind, network(), None, {"mean": None}
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> Any:
        if self.mean is None:
            self.mean = torch.zeros(6, dtype=torch.float64)
            self.others = torch.full((6,), torch.nan), torch.eye(2).to_sparse()
            self.layer = nn.Linear(6, 6).double() if self.kind == "layer" else None
        if self.kind == "attribute" and self.kept["mean"] is None:
            self.kept["mean"] = torch.zeros(6, dtype=torch.float64)
        if self.kind in ("written", "attribute"):
            (self.mean if self.kind == "written" else self.kept["mean"]).lerp_(x.detach().mean(0), 0.25)
        return self.inner((self.layer(x) if self.layer else x) - self.mean)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("written", "made the array mean"),
        ("attribute", "made the array kept"),
        ("layer", "made the parameter layer.w"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_first_call_makes_and_nothing_merges_is_refused(kind: str, message: str, n: int) -> None:
    with executor(n, Lazy(kind)) as trainer:
        for use in (partial(trainer.evaluate, loss), trainer.run, trainer.run):
            with pytest.raises(UserError, match=message):
                use(batch(8))
    called = Lazy("written" if kind == "attribute" else kind)
    called(batch(8)["x"])
    with executor(n, called) as trainer:  # as the message says
        trainer.run(batch(8))
        assert trainer.replica(0).keys() == dict(called.state_dict()).keys()


def test_a_table_that_a_first_call_makes_is_only_read() -> None:
    with executor(2, Lazy("table")) as trainer, executor(1) as plain:
        torch.testing.assert_close(trainer.run(batch(2))["loss"], plain.run(batch(2))["loss"])
        assert torch.equal(trainer.replica(1)["mean"], torch.zeros(6, dtype=torch.float64))


class Initialized(nn.Module):
    """Fills a buffer, or sets a parameter by its first batch, in the first forward pass only."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what, self.ready = network(), what, False
        self.register_buffer("table", torch.zeros(6, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        if not self.ready and self.what == "replaced":
            self.table = x.detach().mean(0)
        elif not self.ready and self.what == "attribute":
            self.own = x.detach().mean(0)
        elif not self.ready:
            getattr(self, self.what).data.copy_(x.detach().mean(0))
        self.ready = True
        return self.inner(x + self.table + getattr(self, "own", 0) - self.shift)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("what", ["table", "shift"])
def test_what_only_a_first_call_writes_is_refused(what: str, n: int) -> None:
    with executor(n, Initialized(what)) as trainer:
        for use in (partial(trainer.evaluate, loss), trainer.run, trainer.run):
            with pytest.raises(UserError, match=f"the (loss|function) writes {what} in its first call only"):
                use(batch(8))
    called = Initialized(what)
    expected = loss(called, **batch(8))[0]
    with executor(n, called) as trainer:  # as the message says
        torch.testing.assert_close(trainer.run(batch(8))["loss"], expected.detach())


@pytest.mark.parametrize("what, name", [("replaced", "table"), ("attribute", "own")])
def test_an_array_that_a_first_call_makes_from_its_samples_is_refused_on_several_devices(
    what: str, name: str
) -> None:
    with executor(2, Initialized(what)) as trainer:
        for use in (trainer.run, partial(trainer.evaluate, loss), trainer.run):
            with pytest.raises(UserError, match=f"made the array {name} with other values"):
                use(batch(8))
    with executor(2, Initialized(what)) as trainer, pytest.raises(UserError, match=f"the array {name} with"):
        trainer.evaluate(loss, batch(8))
    called = Initialized(what)
    expected = loss(Initialized(what), **batch(8))[0].detach()
    with executor(1, called) as trainer:
        torch.testing.assert_close(trainer.run(batch(8))["loss"], expected)
    called(batch(8)["x"])
    with executor(2, called) as trainer:
        torch.testing.assert_close(trainer.run(batch(8))["loss"], expected)


def test_what_only_a_first_call_that_failed_writes_is_refused() -> None:
    with executor(1, Initialized("shift")) as trainer:
        with pytest.raises(AssertionError, match="multi-target"):
            trainer.run({**batch(8), "labels": torch.zeros(8, 2).long()})
        for _ in range(2):
            with pytest.raises(UserError, match="the loss writes shift in its first call only"):
                trainer.run(batch(8))


def test_a_first_call_that_failed_is_not_missed_where_the_model_writes_always() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    with executor(2, model) as trainer, executor(2, model) as other:
        with pytest.raises(AssertionError, match="multi-target"):
            trainer.run({**batch(8), "labels": torch.zeros(8, 2).long()})
        for each in (trainer, other):
            each.evaluate(loss, batch(8))
            each.run(batch(8))
        for name, value in other.replica(0).items():
            assert torch.equal(trainer.replica(0)[name], value)


class Synchronized(nn.Module):
    """Gives a teacher the memory of its student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(), network().requires_grad_(False)
        nn.init.ones_(self.teacher[0].weight)

    def forward(self, x: torch.Tensor) -> Any:
        self.teacher[0].weight.data = self.student[0].weight.data
        return self.student(x) + self.teacher(x)


def test_a_parameter_that_gets_the_memory_of_another_is_refused_and_both_stay() -> None:
    model = Synchronized()
    with executor(2, model) as trainer:
        for use in (trainer.run, partial(trainer.evaluate, loss), trainer.run):
            with pytest.raises(flow.CaptureError, match="gives an array"):
                use(batch(8))
        for number in range(2):
            for name, value in model.state_dict().items():
                assert torch.equal(trainer.replica(number)[name], value)


def pruned(model: Any, x: torch.Tensor, labels: torch.Tensor, fails: bool) -> Any:
    model[0].weight = nn.Parameter(model[0].weight * (model[0].weight.abs() > 0.2))
    if fails:
        raise ValueError("after it")
    return loss(model, x, labels)


@pytest.mark.parametrize("fails", [True, False])
def test_a_function_that_replaces_a_parameter_is_refused_and_the_state_is_that_of_the_training(
    fails: bool,
) -> None:
    with executor(2) as trainer, executor(2) as other:
        for each in (trainer, other):
            each.run(batch(8))
        with pytest.raises(
            UserError if not fails else ValueError, match=r"made the parameter 0\.weight|after it"
        ):
            trainer.evaluate(lambda m, x, labels: pruned(m, x, labels, fails), batch(8))
        for each in (trainer, other):
            each.run(batch(8, 1))
        for found in (trainer.state_dict()["model"], trainer.replica(1)):
            for name, value in other.replica(0).items():
                assert torch.equal(found[name], value)
        other.load_state_dict(trainer.state_dict())


class Noisy(torch.optim.SGD):
    """SGD whose updates have noise."""

    random: torch.Generator | None = None

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn(parameter.shape, generator=self.random), alpha=0.1)


def seeded_noise(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = Noisy(parameters, 0.1)
    made.random = torch.Generator().manual_seed(3)
    return made


@pytest.mark.parametrize("strategy", ["all_reduce", "reduce"])
def test_an_optimizer_that_draws_needs_a_generator_of_its_own(strategy: Any) -> None:
    noisy = partial(Noisy, lr=0.1)
    with (
        executor(2, optimizer=noisy, strategy=strategy) as made,
        pytest.raises(flow.OperationError, match="draws random numbers"),
    ):
        made.run(batch(8))
    first, second = (trained(2, [8, 8, 8], optimizer=seeded_noise, strategy=strategy) for _ in range(2))
    assert_same(first, second)


class Growing(nn.Module):
    """Keeps a table for the longest batch that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("table", torch.zeros(0, 1))

    def forward(self, x: torch.Tensor) -> Any:
        if len(self.table) < len(x):
            self.table = torch.zeros(len(x), 1, dtype=torch.float64)
        return self.inner(x + self.table[: len(x)])


def test_a_state_that_does_not_fit_one_device_is_refused_before_any_is_changed() -> None:
    with executor(2, Growing()) as trainer:
        trainer.run(batch(3))
        assert [len(trainer.replica(number)["table"]) for number in (0, 1)] == [2, 1]
        with pytest.raises(UserError, match=r"table is \(1, 1\) in the model, \(2, 1\) in the state"):
            trainer.load_state_dict(trainer.state_dict())
        trainer.run(batch(3))


@pytest.mark.parametrize("data", [False, True])
def test_no_loss_writes_trained_weights_that_devices_share(data: bool) -> None:
    """Autograd does not count writes to `x.data`."""

    def shrinking(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = model[0].weight
            (weight.data if data else weight).mul_(0.5)
        return F.cross_entropy(model(x), labels)

    wanted = shrinking(copy.deepcopy(network()), **batch(4)).detach()
    with executor(2, loss=shrinking) as made:
        torch.testing.assert_close(made.run(batch(4))["loss"], wanted)
        made.run(batch(1))  # the second device has no samples, and does not call the loss
        assert_same(made.replica(0), made.replica(1))
    with (
        executor(2, loss=shrinking, strategy="reduce") as made,
        pytest.raises(UserError, match=r"the loss writes 0\.weight, which the devices share"),
    ):
        made.run(batch(4))


def test_no_evaluation_makes_replicas_differ_or_writes_shared_weights() -> None:
    def halving(model: nn.Module, x: torch.Tensor) -> Results:
        model[0].weight.mul_(0.5)  # type: ignore[index, union-attr]
        return {"scores": model(x)}

    model = network()
    with executor(2, model) as made:
        made.evaluate(halving, {"x": batch(1)["x"]}, ["scores"])
        assert_same(made.replica(0), made.replica(1))
        assert torch.equal(made.replica(0)["0.weight"], model[0].weight * 0.5)
    with (
        executor(2, model, strategy="reduce") as made,
        pytest.raises(UserError, match=r"the function writes 0\.weight, which the devices share"),
    ):
        made.evaluate(halving, {"x": batch(4)["x"]}, ["scores"])


@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_that_was_handled_is_not_raised_again(n: int) -> None:
    wrong = {**batch(4), "labels": torch.full((4,), 9)}
    with executor(n) as made:
        earlier = flow.call(int, "none")
        state = made.state_dict()
        for step in (made.run, lambda feed: made.evaluate(loss, feed)):
            with pytest.raises(flow.OperationError, match="nll_loss") as caught:
                step(wrong)
            assert any("also failed" in note for note in caught.value.__notes__)
            made.load_state_dict(state)
        with pytest.raises(flow.OperationError, match="int on cpu") as caught:
            flow.wait_all()
        assert not any("also failed" in note for note in caught.value.__notes__)
        assert earlier.done


def test_a_failed_run_does_not_wait_for_calls_that_began_before() -> None:
    ended = threading.Event()
    with executor(1) as made:
        flow.call(ended.wait, 60)
        with pytest.raises(flow.OperationError):
            made.run({**batch(4), "labels": torch.full((4,), 9)})
        assert not ended.is_set()
        ended.set()


@pytest.mark.slow
def test_an_executor_that_is_used_at_the_end_of_python_refuses() -> None:
    code = """if True:
        import torch
        from lockstep import flow

        class Last:
            def __del__(self):
                try:
                    made.run({"x": torch.ones(4, 3)})
                except Exception as error:
                    print(type(error).__name__, error)

        def mean(model, x):
            return model(x).mean()

        def sgd(parameters):
            return torch.optim.SGD(parameters, 0.1)

        made = flow.ParallelExecutor(torch.nn.Linear(3, 2), mean, sgd, flow.cpus(1))
        made.run({"x": torch.ones(4, 3)})
        last = Last()
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("UserError Python is ending")


def test_an_executor_refuses_a_dry_run_and_is_as_before() -> None:
    with executor(2) as made:
        made.run(batch(4))
        state = made.state_dict()
        uses: list[Callable[[], Any]] = [
            lambda: made.run(batch(4)), lambda: made.run(batch(5)), lambda: made.evaluate(loss, batch(4)),
            made.state_dict, lambda: made.load_state_dict(state),
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(UserError, match="a dry run makes none"), flow.dry_run():
                use()
        wanted = made.run(batch(4))["loss"]
        made.load_state_dict(state)
        assert torch.equal(made.run(batch(4))["loss"], wanted)


def test_state_of_no_parameter_is_not_lost_without_a_word() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["steps"] = {"n": 1}
            return super().step(closure)

    with executor(2, optimizer=lambda parameters: Counting(parameters, 0.1)) as made:
        made.run(batch(4))
        with pytest.raises(UserError, match=r"Counting keeps state of no parameter \('steps'\)"):
            made.state_dict()


def test_an_optimizer_whose_state_dict_has_other_parts_is_refused() -> None:
    """A resumed executor's optimizers would not get them."""

    class Slow(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"fast": super().state_dict(), "steps": 1}

    with (
        pytest.raises(UserError, match=r"Slow keeps state of no parameter \('fast'\), which can't be saved"),
        executor(2, optimizer=lambda parameters: Slow(parameters, 0.1)),
    ):
        pass


class Shampoo(torch.optim.Optimizer):
    """Keeps tensors and numbers in lists, and changes both in place."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "rates": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["rates"].append(group["lr"] / (1 + len(group["rates"])))
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sums"], state["past"] = [torch.zeros_like(parameter)], []
                state["sums"][0] += parameter.grad
                state["past"].append(1)
                parameter.sub_(state["sums"][0] * group["rates"][-1] / len(state["past"]))


def test_lists_in_an_optimizers_state_belong_to_one_device_each() -> None:
    """Not to the state that was taken or loaded either."""
    arguments = {"optimizer": lambda parameters: Shampoo(parameters, 0.1)}
    wanted = trained(2, [4, 5, 6, 4], **arguments)
    with executor(2, **arguments) as made:
        made.run(batch(4, 0))
        state = made.state_dict()
        n_bytes = made.memory()["optimizer"]
        assert n_bytes == 2 * sum(value.nbytes for value in state["model"].values())
        made.run(batch(5, 1))
    for _ in range(2):
        with executor(3, **arguments) as made:
            made.load_state_dict(state)
            for step, size in enumerate([5, 6, 4], start=1):
                made.run(batch(size, step))
            for name, value in made.replica(0).items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10)
            assert_same(made.replica(2), made.replica(0))


def test_numbers_in_tuples_stay_ordinary_inside_of_a_device() -> None:
    betas: Any = torch.tensor(0.9), torch.tensor(0.99)
    made = flow.cpus(2, threads=1)
    with flow.Engine(made), flow.device(made[1]):
        trainer = ParallelExecutor(network(), loss, lambda p: torch.optim.Adam(p, 0.1, betas), made)
        state = trainer.state_dict()
        assert not any(isinstance(leaf, flow.Array) for leaf in tree_leaves(state))


class KeepsALambda(nn.Module):
    """A network with a lambda, which in a copy still uses the original's scale."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        scale = self.scale
        self.activation = lambda x: torch.tanh(x * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.activation(self.layer(x))
        return found


def test_gradients_of_the_original_model_are_refused() -> None:
    """They were lost: nothing was trained, or only what the copy has."""
    devices, own, keeps = flow.cpus(2), nn.Linear(3, 2), KeepsALambda()
    start = own.weight.detach()

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1)

    def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean() + own.weight.square().sum()

    def near_start(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = own(x)
        return (model(x) - target).square().mean() + (model.weight - start).square().sum()

    with flow.Engine(devices):
        for model, loss, name in (
            (own, lambda model, x: own(x).mean(), "weight"),
            (own, penalized, "weight"),
            (keeps, lambda model, x: model(x).mean(), "scale"),
        ):
            executor = flow.ParallelExecutor(model, loss, sgd, devices)
            with pytest.raises(UserError, match=rf"reaches {name} of your own model"):
                executor.run({"x": torch.ones(4, 3)})
        executor = flow.ParallelExecutor(KeepsALambda(), lambda model, x: model(x).mean(), sgd, devices)
        with pytest.raises(UserError, match="reaches scale of your own model"):  # of which the weight is left
            executor.run({"x": torch.ones(4, 3)})
        executor = flow.ParallelExecutor(own, near_start, sgd, devices)
        assert executor.run({"x": torch.ones(4, 3)})["loss"].item() == 0


class Averaging(nn.Module):
    """It subtracts a moving average, which no state has, and scales by the numbers of an ordinary tensor."""

    def __init__(self, is_late: bool = False) -> None:
        super().__init__()
        self.embedding, self.is_late = nn.Embedding(5, 3), is_late
        self.register_buffer("centre", torch.zeros(0 if is_late else 3), persistent=False)
        self.scales = torch.tensor([1.0, 2.0])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = self.embedding(rows) * sum(self.scales.tolist())
        if self.is_late and not self.centre.numel():
            self.centre = found.detach().mean(0)
        with torch.no_grad():
            self.centre.mul_(0.5).add_(found.mean(0))
        return (found - self.centre).square().mean()


def looked_up(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows)  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [1, 3])
def test_training_goes_on_after_a_failure_of_a_buffer_that_no_state_has(n: int) -> None:
    rows = torch.tensor([0, 1, 2, 3, 4, 0])
    with executor(n, Averaging(), loss=looked_up) as made:
        made.run({"rows": rows})
        state = made.state_dict()
        with pytest.raises(flow.OperationError, match="index out of range"):
            made.run({"rows": rows + 1})
        made.load_state_dict(state)
        assert_same(made.replica(0), made.replica(n - 1))
        made.run({"rows": rows})
        assert_same(made.replica(0), made.replica(n - 1))


@pytest.mark.parametrize("n", [1, 2])
def test_an_empty_buffer_that_a_step_fills_and_writes_is_refused(n: int) -> None:
    with (
        executor(n, Averaging(is_late=True), loss=looked_up) as made,
        pytest.raises(UserError, match="the loss made the array centre"),
    ):
        made.run({"rows": torch.tensor([0, 1, 2])})


def test_ordinary_tensors_of_a_model_stay_so_on_all_devices() -> None:
    """The loss may read their numbers."""
    with executor(2, Averaging(), loss=looked_up) as made:
        assert [type(replica.model.scales) for replica in made._replicas] == [torch.Tensor] * 2
        made.run({"rows": torch.tensor([0, 1, 2])})


def test_weights_can_be_saved_after_a_step_that_was_refused() -> None:
    """It has put an array without a value in the place of a buffer."""

    class Replacing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3, dtype=torch.float64)
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 3:
                self.n = self.n + 1
            return super().forward(x)

    with executor(2, Replacing()) as made:
        made.run(batch(4))
        before = made.state_dict()["model"]
        with pytest.raises(UserError, match="kept by something outside of the step"):
            made.run(batch(8))
        assert_same(made.state_dict()["model"], before)
        made.load_state_dict(made.state_dict())
        made.run(batch(4))
        assert_same(made.replica(0), made.replica(1))
