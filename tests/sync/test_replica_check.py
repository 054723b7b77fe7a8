"""Replicas are compared bit for bit, however many tensors they have, and a difference is named."""

import pytest
import torch
from torch import nn

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.comm.pipes import Pipe
from lockstep.launch.ranks import run_ranks
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.sync.replica_check import ReplicaCheck, check_replicas

N_LAYERS = 4000  # so many names and digests do not fit into a pipe that no process reads


def compare(rank: int, pipes: dict[int, Pipe], changed: int | None) -> str:
    """Return the error if the last rank has changed one weight, or none."""
    torch.manual_seed(0)
    arena = Arena(nn.Sequential(*[nn.Linear(1, 1) for _ in range(N_LAYERS)]), HostMemory())
    if changed is not None and rank == len(pipes):
        arena.tensors[f"weights/{changed}.bias"].add_(1)
    try:
        check_replicas(Group.on_one_host(rank, pipes), arena, "the start")
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_a_network_of_thousands_of_tensors_is_compared(n_ranks: int) -> None:
    assert run_ranks(compare, n_ranks, None) == ["equal"] * n_ranks


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_the_first_tensor_that_differs_is_named_by_all(n_ranks: int) -> None:
    expected = f"replicas differ at the start: weights/1234.bias of trainer {n_ranks - 1} is not trainer 0's"
    assert run_ranks(compare, n_ranks, 1234) == [expected] * n_ranks


def take_steps(rank: int, pipes: dict[int, Pipe], equal: bool) -> list[str]:
    """Return the errors after seven steps; in the fourth, one bit changes in the last rank's memory."""
    torch.manual_seed(0)
    arena, said = Arena(nn.Linear(3, 5), HostMemory()), []
    replicas = ReplicaCheck(Group.on_one_host(rank, pipes), arena, 3)
    for step in range(1, 8):
        if step == 4 and rank == len(pipes):
            arena.tensors["weights/weight"].view(torch.int32)[2, 1] ^= 1
        try:
            replicas.after_step(Order("train", 1, step, 0, 1, 0, 1), equal=equal or step == 7)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_one_changed_bit_is_found_within_check_every_steps() -> None:
    found = "replicas differ at epoch 1, step 6: weights/weight of trainer 1 is not trainer 0's"
    assert run_ranks(take_steps, 2, True) == [["", "", "", "", "", found, ""]] * 2


def test_replicas_are_compared_where_they_are_to_be_equal() -> None:
    found = "replicas differ at epoch 1, step 7: weights/weight of trainer 1 is not trainer 0's"
    assert run_ranks(take_steps, 2, False) == [["", "", "", "", "", "", found]] * 2
