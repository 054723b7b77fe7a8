"""The examples of docs/extending.md, written into a copy of the program and run as a reader would."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collectives import Place, collect, expected_collectives
from conftest import ROOT, make_config
from limits import limit
from small_replicas import make_batch, make_replica, recorder

from lockstep.backends import Backend
from lockstep.backends.host import HostBackend
from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.data.preparing import Preparer
from lockstep.launch.ranks import run_ranks
from lockstep.network.replica import Replica
from lockstep.runs import checkpoint
from lockstep.sync import Rule, StepBarrier
from lockstep.sync.weights import WeightsRule

PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PARTS = ("lockstep", "models", "preprocessing", "train.py", "train_funcs.py", "proc_load.py", "config.yaml")


def follow(place: Path) -> Path:
    """A copy of the program in `place`, with everything that the page tells to write in it."""
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, place / part)
    to_write, _, _ = PAGE.read_text().partition("## A device of the dataflow engine")  # see test_flow_docs.py
    for language, text in BLOCK.findall(to_write):
        first, _, rest = text.partition("\n")
        if language == "diff":
            change(place / first, rest.splitlines())
        else:
            path = place / first.removeprefix("# ")
            assert not path.exists(), f"{first} would replace a file of the program"
            path.write_text(text)
    return place


def change(path: Path, lines: list[str]) -> None:
    """Applies a block of lines that begin with '-', '+' or ' ' (context), from the file's top down."""
    text, position = path.read_text(), 0
    for line in lines:
        sign, words = line[0], line[1:] + "\n"
        if sign == "+":
            text = text[:position] + words + text[position:]
        else:
            position = text.find(words, position)
            assert position >= 0, f"{path.name} has no line {words!r}"
        if sign == "-":
            text = text[:position] + text[position + len(words) :]
        else:
            position += len(words)
    path.write_text(text)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return follow(tmp_path_factory.mktemp("extended"))


def run(place: Path, *command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def load(place: Path, module: str) -> Any:
    """A module out of the copy, among the modules of the program itself."""
    spec = importlib.util.spec_from_file_location(module, place / f"{module.replace('.', '/')}.py")
    assert spec and spec.loader
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def test_every_example_is_a_file_of_ten_to_thirty_lines(written: Path) -> None:
    names = []
    to_write, _, _ = PAGE.read_text().partition("## A device of the dataflow engine")  # see test_flow_docs.py
    for language, text in BLOCK.findall(to_write):
        if language == "python":
            first, *lines = [line for line in text.splitlines() if line.strip()]
            names.append(first)
            assert 10 <= len(lines) <= 30, first
    rooms = ["models", "", "lockstep/optim", "lockstep/sync", "lockstep/exchange", "lockstep/backends"]
    assert [name.removeprefix("# ").rpartition("/")[0] for name in names] == [*rooms, "", "preprocessing"]


def test_network_loss_optimizer_transport_back_end_and_data_train(written: Path) -> None:
    """One run with two trainers uses everything that the page adds."""
    run(written, "preprocessing/make_squares.py", "data/squares")
    keys = "data_folder=data/squares n_classes=4 model=squeeze optimizer=lion learning_rate=0.003 n_epochs=4"
    more = "batch_size=16 print_freq=8 run_name=squares lr_policy=cosine"
    own = "loss=my_losses:focal", "augmentation=cutout:cutout"
    output = run(written, "train.py", *keys.split(), *more.split(), *own, "devices=[cpu, cpu]")
    assert "exchange: through pipes: trainers share no memory" in output
    assert "lion's update is the sign of a mean of gradients" not in output  # rule: gradients is exact
    found = re.search(r"done: validation error ([\d.]+)% top-1", output)
    assert found and float(found[1]) < 25, output  # 75 by chance
    saved = checkpoint.load(next((written / "runs/squares/checkpoints").glob("epoch_0004.safetensors")))
    assert saved["momenta/classify.weight"].abs().max() > 0 and "weights/excite.0.weight" in saved


@pytest.mark.slow
def test_a_rule_whose_ranks_name_different_spans_is_no_rule_for_the_transport(written: Path) -> None:
    """Pipes would hand each of a pair what the other one has in the wrong half of its block."""
    run(written, "preprocessing/make_squares.py", "data/pairs")
    own = ["data_folder=data/pairs", "n_classes=4", "model=squeeze", "run_name=pairs"]
    with pytest.raises(AssertionError, match=r"trainer \d is at 'broadcast .*', not at 'broadcast "):
        run(written, "train.py", *own, "rule=gossip", "n_epochs=1", "devices=[cpu, cpu]")


def test_cutout_blackens_a_square_at_any_place(written: Path) -> None:
    load(written, "cutout")
    preparer = Preparer(make_config(augmentation="cutout:cutout"), (32, 32), (32, 32), np.zeros(3))
    preparer.draw(True, 1, 300)
    images, samples = np.full((300, 32, 32, 3), 200, np.uint8), np.arange(300)
    out = np.empty_like(images)
    preparer.apply(images, samples, samples, np.zeros((300, 3), np.int32), out)
    black = (out == 0).all(-1)
    assert set(np.unique(out)) == {0, 200} and black.any(0).all()
    assert black.sum((1, 2)).max() == 64 and black.sum((1, 2)).min() >= 16


def weights_of(replica: Replica) -> torch.Tensor:
    """All of them, copied into one tensor (n,)."""
    named = replica.arena.tensors.items()
    return torch.cat([tensor.flatten() for name, tensor in named if name.startswith("weights/")])


def take_two_steps(replica: Replica, rule: Rule, group: Group) -> torch.Tensor:
    """With other images in every rank. The weights afterwards."""
    for number in range(2):
        batch = make_batch(2 * number + group.world.rank)
        replica.forward_backward(batch, 6, group.world.rank, recorder())
        rule.update(
            replica.optimizer, StepBarrier(group, Order("train", 1, number + 1, 0, 6, 0, 6), None, str)
        )
    return weights_of(replica)


def look_ahead(rank: int, pipes: dict[int, Pipe], data: Path, written: Path) -> tuple[list[float], list[str]]:
    """Two steps by the page's rule, and by `weights`: it must have gone back half of the way."""
    group, ours, plain = Group.on_one_host(rank, pipes), make_replica(data), make_replica(data)
    start = weights_of(ours)
    transports = [
        HostBackend().open_transport("auto", replica.arena.block, replica.arena.flat, group)[0]
        for replica in (ours, plain)
    ]
    rule = load(written, "lockstep.sync.lookahead").Lookahead(transports[0], ours.arena, every=2)
    ahead = take_two_steps(plain, WeightsRule(transports[1], plain.arena), group)
    found = take_two_steps(ours, rule, group)
    assert not torch.equal(ahead, start)
    assert torch.equal(found, start.lerp(ahead, 0.5))
    assert rule.state()["lookahead/n_steps"] == 2
    assert torch.equal(torch.cat([slow.flatten() for slow in rule.slow]), found)
    return found.tolist(), sorted(rule.state())


def test_a_rule_keeps_two_ranks_one(shared_folder: Path, written: Path) -> None:
    first, second = run_ranks(look_ahead, 2, shared_folder, written)
    assert first == second


def broken_and_whole_run(place: Path, made: str) -> dict[str, torch.Tensor]:
    """The last checkpoint of a run by the rule `made`, which a run that was resumed has, too."""
    factory, kinds = place / "lockstep/sync/factory.py", place / "lockstep/config/rules.py"
    module, _, call = made.partition(":")
    name = call.partition("(")[0]
    text = factory.read_text().replace("return WeightsRule(transport, arena)", f"return {call}")
    factory.write_text(text.replace("sync.weights import WeightsRule", f"sync.{module} import {name}"))
    kinds.write_text(kinds.read_text().replace('("outer/", ', '("outer/", "lookahead/", '))
    run(place, "preprocessing/make_squares.py", "squares")
    data = ["data_folder=squares", "n_classes=4", "batch_size=12"]
    keys = [*data, "lr_step=[9]", "learning_rate=0.001", "rule=weights", "devices=[cpu, cpu]"]
    for name, epochs in (("whole", 2), ("broken", 1)):
        run(place, "train.py", *keys, f"run_name={name}", f"n_epochs={epochs}")
    run(place, "train.py", "run_name=broken", "resume_train=true", "n_epochs=2")
    whole, broken = (
        checkpoint.load(place / "runs" / name / "checkpoints/epoch_0002.safetensors")
        for name in ("whole", "broken")
    )
    assert whole.keys() == broken.keys() and all(torch.equal(whole[name], broken[name]) for name in whole)
    return whole


@pytest.mark.slow
def test_a_run_saves_and_resumes_the_pages_rule(written: Path, tmp_path: Path) -> None:
    """With room for its tensors in the checkpoints in memory."""
    place = shutil.copytree(written, tmp_path / "program")
    saved = broken_and_whole_run(place, "lookahead:Lookahead(transport, arena)")
    assert saved["lookahead/n_steps"] == 22


@pytest.mark.slow
def test_a_run_saves_and_resumes_the_rule_of_the_page_on_rules(written: Path, tmp_path: Path) -> None:
    place = shutil.copytree(written, tmp_path / "program")
    _, _, writing = (ROOT / "docs/rules.md").read_text().partition("## Writing one")
    ((language, text),) = BLOCK.findall(writing)
    assert language == "python"
    (place / "lockstep/sync/weights_only.py").write_text(text)
    made = 'weights_only:WeightsOnly(transport, arena, {"every": 1, "from_epoch": 0})'
    saved = broken_and_whole_run(place, made)
    first, second = (saved[f"replica{rank}/momenta/conv1.weight"] for rank in (0, 1))
    assert not torch.equal(first, second)


@dataclass(frozen=True)
class IsolatedPlace(Place):
    """The conformance tests' place on CPUs, with the page's back end and transport."""

    written: Path

    def start(self, rank: int) -> Backend:
        load(self.written, "lockstep.exchange.pipes")
        backend: Backend = load(self.written, "lockstep.backends.isolated").IsolatedBackend()
        backend.start_computing(make_config())
        return backend


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_the_transport_conforms(written: Path, n_ranks: int) -> None:
    place = IsolatedPlace("cpu", False, None, written)
    assert run_ranks(collect, n_ranks, place, "auto") == expected_collectives(n_ranks)
