"""Checkpoints in memory: what is copied, what shows damage, and what replaces a damaged one."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from conftest import make_config

from lockstep.errors import UserError
from lockstep.launch.attempts import Attempt, next_attempt
from lockstep.launch.children import ExitStatus
from lockstep.memory.host import HostBlock, HostMemory
from lockstep.network.arena import Arena
from lockstep.runs import snapshot
from lockstep.runs.checkpoint import save
from lockstep.runs.folder import RunFolder
from lockstep.runs.snapshot import MemoryCheckpoint, Retained, Snapshots
from lockstep.runs.state import State

LOST = ExitStatus(1, lost="trainer 1")


def make_arena() -> Arena:
    """Return an arena with a weight that lies channels last, and an integer buffer outside of it."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model[0].to(memory_format=torch.channels_last)
    return Arena(model, HostMemory(), ("momenta",))


def state_at(position: int) -> State:
    return State(1, position, 90, 0.1, [], 2, {"seed": 1}, {"python": "3"})


def take(snapshots: Snapshots, position: int) -> MemoryCheckpoint:
    others = {"outer/0.weight": torch.full((4, 3, 3, 3), float(position)), **snapshots._arena.outside()}
    snapshots.copy(others)
    return snapshots.complete(state_at(position))


def in_another_process(snapshots: Snapshots, checkpoint: MemoryCheckpoint) -> Retained:
    """Return a checkpoint as a process sees it that has only the descriptor."""
    block = HostBlock(os.dup(snapshots.block.descriptor), snapshots.block.n_bytes)
    return Retained(block, checkpoint)


def test_a_checkpoint_has_every_tensor_and_the_state_as_they_were() -> None:
    arena = make_arena()
    snapshots = Snapshots(arena, 4 * 108, 2)
    arena.local["buffers/1.num_batches_tracked"].fill_(7)
    before = {name: tensor.clone() for name, tensor in arena.state().items()}
    retained = in_another_process(snapshots, take(snapshots, 16))
    arena.flat.fill_(-1.0)
    assert retained.is_whole() and retained.state() == state_at(16)
    tensors = retained.tensors()
    assert torch.equal(tensors.pop("outer/0.weight"), torch.full((4, 3, 3, 3), 16.0))
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    arena.load(tensors, "memory")
    assert all(torch.equal(tensor, before[name]) for name, tensor in arena.state().items())


def test_a_torn_copy_leaves_the_one_before_whole() -> None:
    """Trainer 0 may die at any moment of the next copy."""
    arena = make_arena()
    snapshots = Snapshots(arena, 4 * 108, 2)
    take(snapshots, 16)
    retained = in_another_process(snapshots, take(snapshots, 32))
    arena.flat.fill_(5.0)
    snapshots.copy({})  # not completed
    assert retained.is_whole() and retained.state() == state_at(32)
    snapshots.copy({})  # the same slot again: the control
    assert not retained.is_whole()


@pytest.mark.parametrize("place", [0, 1000, -1])
def test_one_wrong_bit_anywhere_shows(place: int) -> None:
    snapshots = Snapshots(make_arena(), 4 * 108, 2)
    retained = in_another_process(snapshots, take(snapshots, 16))
    content = retained._bytes()
    content[place] ^= 1
    assert not retained.is_whole()
    content[place] ^= 1
    assert retained.is_whole()


def test_a_run_resumes_from_memory_and_from_the_disk_if_that_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path, {"weights/a": torch.ones(3)}, state_at(8))
    snapshots = Snapshots(make_arena(), 4 * 108, 2)
    retained = in_another_process(snapshots, take(snapshots, 16))
    with open(tmp_path / "lock", "w") as lock:
        run = RunFolder(tmp_path, None, [], lock)
    attempt = Attempt(make_config(on_failure="restart"), run)
    again = next_attempt(attempt, LOST, 0, retained)
    assert again and again.source == "memory" and again.state == state_at(16) and again.run.notes == []
    retained._bytes()[100] ^= 1
    again = next_attempt(attempt, LOST, 0, retained)
    assert again and again.source == "epoch_0001_at_8" and again.retained is None
    assert "the memory checkpoint is damaged" in again.run.notes[0]
    assert again.state and again.state.position == 8


def test_memory_is_used_again_by_the_next_trainer_if_it_fits() -> None:
    snapshots = Snapshots(make_arena(), 4 * 108, 2)
    retained = in_another_process(snapshots, take(snapshots, 16))
    fits = Snapshots(make_arena(), 4 * 108, 2, retained=retained)
    assert not fits.is_new and fits.block is retained.block
    take(fits, 24)
    assert retained.is_whole()  # the other slot was written
    assert Snapshots(make_arena(), 1 << 20, 2, retained=retained).is_new


@pytest.mark.parametrize("n_slots", [1, 2])
def test_too_little_memory_is_refused_in_one_line(n_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with memory_checkpoint_seconds: null, which has one slot, is not advised to set it."""
    monkeypatch.setattr("lockstep.memory.host.allowed_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"no room for 1 MiB .* \(copies of the weights") as error:
        snapshot._allocate(1 << 20, n_slots)
    assert ("memory_checkpoint_seconds: null" in str(error.value)) == (n_slots == 2)
    assert "\n" not in str(error.value)


def test_a_record_that_is_too_long_is_refused_and_not_cut() -> None:
    snapshots = Snapshots(make_arena(), 4 * 108, 2)
    snapshots.copy({})
    state = dataclasses.replace(state_at(16), config={"model_args": "x" * (2 << 20)})
    with pytest.raises(UserError, match="set memory_checkpoint_seconds: null"):
        snapshots.complete(state)


def test_the_validations_of_thousands_of_epochs_have_room() -> None:
    """Every record has all of them: about 190 bytes for each."""
    entry = {"epoch": 9999, "loss": 1 / 3, "error_top1": 1 / 7, "error_top5": 2 / 3}
    record = [{**entry, "balanced_accuracy": 1 / 3, "macro_f1": 1 / 7}] * 10_000
    state = dataclasses.replace(state_at(16), val_record=record)
    snapshots = Snapshots(make_arena(), 4 * 108, 2, n_validations=10_000)
    snapshots.copy({})
    assert in_another_process(snapshots, snapshots.complete(state)).state() == state
    assert Snapshots(make_arena(), 0, 2, n_validations=2**31).block.n_bytes < 16 << 20
