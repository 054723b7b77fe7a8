"""`compile: true`: the same training up to rounding, and the fallback where there is no compiler."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, make_config
from safetensors.torch import load_file

from lockstep.errors import UserError
from lockstep.network.layers import LocalResponseNorm, ReluMaxPool
from lockstep.network.step_graph import Compiled

WORDS = ("rand_mirror=true", "n_epochs=1", "lr_step=[]", "cpu_threads=1", "precision=fp32")
PLAIN = "compile: this network can't be compiled here, so torch computes it uncompiled: "


def notices(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["event"] == "warning"]


@pytest.mark.slow
def test_compiled_training_is_the_same_to_rounding(program: Program) -> None:
    found = []
    for compiled in ("true", "false"):
        run = program.run(*WORDS, f"compile={compiled}", devices="[cpu]", name=f"compile-{compiled}")
        found.append(load_file(run.run_folder / "checkpoints" / "epoch_0001.safetensors"))
        said = any("compile: the network is compiled" in text for text in notices(run.run_folder))
        assert said == (compiled == "true")
    for name, tensor in found[1].items():
        size = tensor.double().norm()
        assert (found[0][name].double() - tensor.double()).norm() <= 1e-4 * size, name


@pytest.mark.slow
def test_without_a_compiler_the_plain_way_is_taken_and_noted(program: Program, tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = program.run(*WORDS, "compile=true", devices="[cpu]", environment=environment)
    (line,) = [text for text in notices(run.run_folder) if text.startswith("compile")]
    assert line.startswith(PLAIN) and "No working C++ compiler" in line and "\n" not in line


def test_what_fails_to_compile_is_computed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole minibatches are compiled, and errors of the network itself are raised."""
    tries = []

    def fails(images: torch.Tensor) -> torch.Tensor:
        tries.append(len(images))
        raise RuntimeError("no compiler\nand many words")

    monkeypatch.setattr(torch, "compile", lambda model, dynamic: fails)
    said: list[str] = []
    double = Compiled(torch.nn.Flatten(), 4)
    for n_images in (3, 4, 4):
        assert double(torch.ones(n_images, 3, 2, 2), said.append).shape == (n_images, 12)
    assert tries == [4] and said == [f"{PLAIN}no compiler"]
    broken = Compiled(torch.nn.Linear(7, 7), 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        broken(torch.ones(4, 3), said.append)


@pytest.mark.slow
def test_layers_of_alexnet_have_the_same_gradient_compiled() -> None:
    """Their closed forms of gradients are for uncompiled layers; autograd differentiates compiled ones."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(LocalResponseNorm(), ReluMaxPool(3, 2))
    images = torch.randn(2, 8, 9, 9, requires_grad=True)
    plain, compiled = (
        torch.autograd.grad(way(images).square().sum(), images)[0]
        for way in (model, torch.compile(model, backend="aot_eager", fullgraph=True))
    )
    torch.testing.assert_close(compiled, plain)


@pytest.mark.slow
def test_outputs_of_compiled_layers_may_be_overwritten_by_the_next_step() -> None:
    """CUDA graphs of mode="reduce-overhead" do so: nothing of a step is used in the next one."""
    outputs: list[torch.Tensor] = []

    def reuse_memory(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def step(*inputs: Any) -> Any:
            for tensor in outputs:
                tensor.fill_(torch.nan)
            made = graph(*inputs)
            outputs[:] = [value for value in made if isinstance(value, torch.Tensor)]
            return made

        return step

    compiled, images = torch.compile(LocalResponseNorm(), backend=reuse_memory), torch.randn(2, 8, 3, 3)
    plain = LocalResponseNorm()  # another one, which keeps what it needs
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(images), plain(images))


def test_it_can_not_go_with_parts() -> None:
    with pytest.raises(UserError, match="logical_ranks gives the same bits"):
        make_config(logical_ranks=2, global_batch_size=8, compile=True)
