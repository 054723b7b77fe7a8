"""Captured steps: when they are tried, and what happens if capturing fails. The rest needs a GPU."""

from pathlib import Path

import pytest
import torch
from conftest import make_config
from torch import nn

from lockstep.config import Layer, read_yaml, resolve
from lockstep.errors import UserError
from lockstep.network import step_graph
from lockstep.network.step_graph import StepGraph, why_not_captured


def test_auto_captures_what_is_the_same_in_every_step() -> None:
    def captures(on_gpu: bool = True, **keys: object) -> bool:
        return not why_not_captured(make_config(**keys), on_gpu)

    assert captures() and captures(model="torchvision:resnet18")
    assert not captures(False) and not captures(False, cuda_graph=True)  # the latter: CPUs beside GPUs
    assert not captures(model="mine.nets:Net") and captures(model="mine.nets:Net", cuda_graph=True)
    assert not captures(loss="mine.losses:focal") and captures(loss="mine.losses:focal", cuda_graph=True)
    assert not captures(augment_on="loader") and not captures(accumulate=2)
    assert not captures(cuda_graph=False)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_the_key_takes_three_values(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "config.yaml").write_text(f"cuda_graph: {text}")
    assert resolve([read_yaml(tmp_path / "config.yaml")])[0].cuda_graph == value
    with pytest.raises(UserError, match="cuda_graph"):
        resolve([Layer("here", {"cuda_graph": "maybe"})])


@pytest.mark.skipif(torch.cuda.is_available(), reason="capturing works here")
def test_a_network_that_cant_be_captured_trains_all_the_same_and_says_so_once() -> None:
    model, received, steps = nn.Linear(2, 1), [], []

    def step() -> None:
        steps.append(model.weight.grad is None)
        model(torch.ones(3, 2)).sum().backward()

    graph = StepGraph(model, must=False)
    for _ in range(6):
        graph.run(step, received.append)
        assert model.weight.grad is not None
        model.zero_grad()
    assert steps == [True] * 6  # each began without gradients, as the optimizer leaves them
    assert len(received) == 1 and "can't be captured" in received[0] and "one by one" in received[0]
    graph = StepGraph(model, must=True)
    for _ in range(3):
        graph.run(step, received.append)
    with pytest.raises(
        UserError, match=r"cuda_graph: this network can't be captured: .*; set cuda_graph: false"
    ):
        graph.run(step, received.append)


class DriverError(Exception):
    """PyCUDA's errors are no RuntimeErrors either."""


def test_an_error_of_the_driver_in_capturing_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(function: object) -> None:
        raise DriverError("cuLaunchKernel failed: operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graph, "_capture", capture)
    received: list[str] = []
    runs: list[int] = []
    graph = StepGraph(nn.Linear(2, 1), must=False)
    for _ in range(5):
        graph.run(lambda: runs.append(1), received.append)
    assert len(runs) == 5 and len(received) == 1 and "not permitted when stream is capturing" in received[0]
