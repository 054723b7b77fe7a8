"""bfloat16 copies of weights beside their float32 masters: autocast's bits, for every optimizer."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_config
from small_replicas import TwoHeads, make_batch, make_replica, recorder, update

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.data.dataset import open_dataset
from lockstep.exchange.host import HostTransport
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory
from lockstep.network import low_precision
from lockstep.network.replica import Replica
from lockstep.sync import StepBarrier
from lockstep.sync.factory import make_rule

N_STEPS = 3


class UsedTwice(TwoHeads):
    """A network that uses a layer's weight outside of the layer, too, and more."""

    def __init__(self, n_classes: int) -> None:
        super().__init__(n_classes)
        self.aux.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, images: torch.Tensor) -> Any:
        x = torch.tanh(self.conv(images)).flatten(1)
        if torch.is_grad_enabled():  # a backward pass of its own
            self.fc(x).sum().backward(retain_graph=True)
            self.zero_grad()
        x = x + torch.func.grad(lambda x: self.fc(x).float().sum())(x)
        logits = self.fc(x) + F.linear(x.roll(1, 1), self.fc.weight)
        return (logits, self.aux(x)) if self.training else logits


class Clamping(TwoHeads):
    """A network that changes a weight before it uses it."""

    def forward(self, images: torch.Tensor) -> Any:
        with torch.no_grad():
            self.fc.weight.clamp_(-0.02, 0.02)
        return super().forward(images)


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "averages, without momentum": {"use_momentum": False, "ema_decay": 0.5},
    "nesterov, two minibatches a step": {"use_nesterov_momentum": True, "accumulate": 2},
    "clipped": {"clip_norm": 0.1},
    "adamw": {"optimizer": "adamw", "rule": "weights"},
    "sharded": {"rule": "gradients"},
    "sharded adamw, in parts": {"optimizer": "adamw", "logical_ranks": 4, "global_batch_size": 16},
    "outer": {"rule": "outer", "rule_args": {"every": 1}},
}


def train(
    rank: int, pipes: dict[int, Pipe], folder: Path, values: dict[str, Any], kept: bool
) -> tuple[dict[str, str], list[float]]:
    """Return digests of all state after some steps, and validation results before and after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_precision, "_PIECE", 64)  # so that tensors are cut
        if not kept:
            patch.setattr(low_precision, "keeps_copies", lambda config, model: False)
        group, memory = Group.on_one_host(rank, pipes), HostMemory()
        keys = {
            "model": "small_networks:GroupedNet",
            "precision": "bf16",
            "data_folder": str(folder),
            "batch_size": 8,
        }
        config = make_config(
            **{**keys, "learning_rate": 0.05, "devices": ["cpu"] * group.world.size, **values}
        )
        replica = Replica(config, open_dataset(config), memory)
        arena = replica.arena
        assert (arena.low_precision is not None) == kept
        transport = HostTransport.open(arena.block, "f4", len(arena.flat), group)
        rule, found = make_rule(config, replica, transport, {}), []
        for epoch in (1, 2):
            replica.begin_epoch(epoch, 90, config.learning_rate)
            for step in range(N_STEPS):
                for part in range(config.accumulate):
                    batch = make_batch(100 * epoch + 10 * step + part + 1000 * rank, 8)
                    replica.forward_backward(batch, 8 * config.accumulate, rank, recorder())
                rule.end_backward()
                rule.update(
                    replica.optimizer, StepBarrier(group, Order("train", 1, step, 0, 1, 0, 1), None, str)
                )
            replica.begin_validation()
            found.append(float(replica.count_errors(make_batch(5))[0]))
        digests = arena.digests()
        if kept:
            replica.begin_epoch(1, 90, config.learning_rate)
            replica.forward_backward(make_batch(1, 8), 8, rank, recorder())
            assert arena.low_precision is not None
            assert torch.equal(arena.low_precision, arena.flat[: arena.n_weights].bfloat16())
        transport.close()
        return digests, found


@pytest.mark.parametrize(
    ("values", "n_trainers"),
    [
        (CASES["sgd"], 1),
        *(pytest.param(CASES[name], 1, marks=pytest.mark.slow) for name in CASES if name != "sgd"),
        (CASES["sgd"], 2),
        *(pytest.param(CASES[name], 2, marks=pytest.mark.slow) for name in ("sharded", "outer")),
    ],
    ids=[
        "sgd, 1 trainer",
        *(f"{name}, 1 trainer" for name in CASES if name != "sgd"),
        *(f"{name}, 2" for name in ("sgd", "sharded", "outer")),
    ],
)
def test_copies_that_are_kept_give_the_bits_of_autocasts(
    shared_folder: Path, values: dict[str, Any], n_trainers: int
) -> None:
    ours = run_ranks(train, n_trainers, shared_folder, values, True)
    theirs = run_ranks(train, n_trainers, shared_folder, values, False)
    assert ours == theirs


def test_a_lone_sgd_writes_the_copies_itself(shared_folder: Path) -> None:
    """No forward pass needs to refresh copies, and only masters and momenta are ever float32."""
    config = make_config(
        model="small_networks:GroupedNet", precision="bf16", data_folder=str(shared_folder), batch_size=8
    )
    replica = Replica(config, open_dataset(config), HostMemory())
    replica.begin_epoch(1, 90, 0.05)
    for number in range(3):
        replica.forward_backward(make_batch(number, 8), 8, 0, recorder())
        kept = replica._low_precision
        assert kept is not None and not kept.stale
        names = {name for name, value in replica.model.named_parameters() if value in kept.gradients}
        assert names == {
            f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc") for kind in ("weight", "bias")
        }
        assert {value.dtype for value in kept.gradients.values()} == {torch.bfloat16}
        replica.optimizer.step()
        assert not kept.stale and not kept.gradients
        arena = replica.arena
        copies = arena.views("weights", kept._flat)
        for name in names | {"unused.weight"}:
            copy, master = copies[f"weights/{name}"], arena.tensors[f"weights/{name}"]
            assert torch.equal(copy, master.bfloat16()), name


def test_a_weight_that_more_than_its_layer_uses_takes_one_step(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its gradient one part is in bfloat16, of the layer, and one is autograd's."""
    ends = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(low_precision, "keeps_copies", lambda config, model: False)
        replica = make_replica(shared_folder, model="test_low_precision:UsedTwice", precision="bf16")
        begin = replica.arena.flat.clone()
        for number in range(2):
            update(replica, number)
        ends.append(replica.arena.flat - begin)
    assert torch.allclose(*ends, rtol=0, atol=0.01 * float(ends[1].abs().max()))


@pytest.mark.parametrize("values", [{}, {"optimizer": "adamw"}, {"ema_decay": 0.5}], ids=str)
def test_a_weight_that_the_network_changes_is_used_as_it_is_then(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]
) -> None:
    ends = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(low_precision, "keeps_copies", lambda config, model: False)
        keys = {"model": "test_low_precision:Clamping", "precision": "bf16", **values}
        replica = make_replica(shared_folder, **keys)
        for number in range(3):
            update(replica, number)
        ends.append(replica.arena.flat.clone())
    assert torch.equal(*ends)


def test_with_trainers_on_other_hosts_alone_copies_are_made_from_the_mean(shared_folder: Path) -> None:
    keys = {"model": "small_networks:GroupedNet", "precision": "bf16", "data_folder": str(shared_folder)}
    config = dataclasses.replace(make_config(**keys, devices=["cpu"], rule="weights"), n_hosts=2)
    replica = Replica(config, open_dataset(config), HostMemory())
    replica.begin_epoch(1, 90, 0.05)
    replica.forward_backward(make_batch(1, 8), 8, 0, recorder())
    kept = replica._low_precision
    assert kept is not None and kept.gradients
    before = kept._flat.clone()
    replica.optimizer.step()
    assert kept.stale and torch.equal(kept._flat, before)


def test_a_layer_outside_autocast_takes_its_masters(shared_folder: Path) -> None:
    config = make_config(model="small_networks:GroupedNet", precision="bf16", data_folder=str(shared_folder))
    replica = Replica(config, open_dataset(config), HostMemory())
    images = torch.randn(2, 3, 8, 8)
    assert replica.model(images).dtype == torch.float32
    assert replica._forward(images)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert replica.model(images).dtype == torch.bfloat16
