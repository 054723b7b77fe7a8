"""verify.py: a true run passes with any devices; each changed bit and a forged state are named."""

import argparse
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Program, Running, make_config, make_folder
from dataset_folders import write_true_manifest
from forked_programs import forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import limit
from safetensors.numpy import load_file, save_file
from two_hosts import end_well, start

import verify
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.runs import checkpoint_files, receipts
from lockstep.runs.folder import open_run
from lockstep.runs.receipts import ReceiptFile
from lockstep.signals import Interrupts
from lockstep.trainer.receipts import add_written_out, machine_of
from lockstep.verify.files import _missing_of, check_data
from lockstep.verify.intervals import reasons

KEYS = ("logical_ranks=4", "global_batch_size=8", "check_every=3", "snapshot_freq=1", "cpu_threads=1")


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset folder with a manifest."""
    folder = make_folder(tmp_path_factory.mktemp("data") / "set")
    write_true_manifest(folder)
    return folder


@pytest.fixture(scope="module")
def trained(whole_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    program = Program(whole_folder, tmp_path_factory.mktemp("run"))
    return program.run(*KEYS, "n_epochs=2", "learning_rate=0.001")


@pytest.fixture
def copied(trained: Running, whole_folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the run, and one of its data."""
    return (
        Path(shutil.copytree(trained.run_folder, tmp_path / "run")),
        Path(shutil.copytree(whole_folder, tmp_path / "data")),
    )


def call(*words: object, code: int = 0) -> str:
    command = forked([sys.executable, str(ROOT / "verify.py"), *map(str, words)])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=limit(100))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def problems_of(folder: Path, data: Path) -> list[str]:
    words = {"replay": None, "step": None, "json": True, "overrides": [f"data_folder={data}"]}
    found: list[str] = verify.verify(argparse.Namespace(run=folder, **words), Interrupts())["problems"]
    return found


@pytest.mark.slow
def test_a_true_run_is_verified_and_replayed_on_other_devices(trained: Running) -> None:
    text = call(trained.run_folder, "--replay", 2, "devices=[cpu, cpu, cpu]")
    assert ": verified; " in text and " steps computed again" in text
    found = json.loads(call(trained.run_folder, "--json"))
    assert found["verified"] and found["receipts"] >= 5 and found["problems"] == []


@pytest.mark.slow
def test_a_run_is_replayed_from_its_beginning(trained: Running) -> None:
    found = json.loads(call(trained.run_folder, "--step", 7, "--json", "devices=[cpu]"))
    (replay,) = found["replays"]
    assert replay["from"] == 0 and replay["equal"] and replay["receipts"] >= 3


PLACES = (
    "receipts.jsonl",
    "checkpoints/epoch_0001.safetensors",
    "checkpoints/epoch_0002.json",
    "config.yaml",
)
FILES = ("manifest.json", "labels/train_labels.npy", "train_hkl/0000.hkl", "misc/img_mean.npy")


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    place %= 8 * len(content)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", [*PLACES, *FILES])
def test_a_changed_bit_is_found_and_named(copied: tuple[Path, Path], name: str) -> None:
    folder, data = copied
    assert problems_of(folder, data) == []
    path = (folder if name in PLACES else data) / name
    content = path.read_bytes()
    for place in (0, 4 * len(content) + 3, 8 * len(content) - 1):
        flip(path, place)
        problems = problems_of(folder, data)
        assert problems, place
        expected = "receipt" if name == "receipts.jsonl" else str(path)
        assert any(expected in problem for problem in problems), problems
        path.write_bytes(content)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_of_the_dataset_is_called_missing(copied: tuple[Path, Path], name: str) -> None:
    folder, data = copied
    (data / name).unlink()
    assert problems_of(folder, data) == [f"{data / name}: is missing"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(place=st.integers(0, 1 << 20))
def test_any_bit_of_the_receipts_counts(trained: Running, tmp_path: Path, place: int) -> None:
    shutil.copy(trained.run_folder / receipts.NAME, tmp_path)
    assert receipts.read(tmp_path)[1] == []
    flip(tmp_path / receipts.NAME, place)
    assert receipts.read(tmp_path)[1]


@pytest.mark.slow
def test_a_forged_state_with_a_true_chain_is_found_by_a_replay(copied: tuple[Path, Path]) -> None:
    """The chain is no proof alone: a forger makes it anew, and the replay names the interval."""
    folder, data = copied
    tensors = folder / "checkpoints" / "epoch_0002.safetensors"
    values = load_file(tensors)
    name = next(name for name in values if name.startswith("weights/"))
    values[name].view("u4").flat[0] ^= 1
    save_file(values, tensors)
    record = tensors.with_suffix(".json")
    content = {**json.loads(record.read_text()), "sha256": checksum(tensors)}
    record.write_text(json.dumps(content, indent=1))
    seal_anew(folder, tensors)
    assert problems_of(folder, data) == []
    text = call(folder, "--replay", 20, f"data_folder={data}", "devices=[cpu]", code=1)
    assert "give another state when replayed (data, configuration, versions and machine are those" in text


def seal_anew(folder: Path, tensors: Path) -> None:
    """Write the chain with the digests of another checkpoint, each receipt with a true hash."""
    found, _ = receipts.read(folder)
    lines, previous = [], ""
    for receipt in found:
        forged: dict[str, Any] = {}
        if receipt.step == found[-1].step:
            record = checksum(tensors.with_suffix(".json")) if receipt.record else ""
            forged = {"state": checksum(tensors), "record": record}
        sealed = dataclasses.replace(receipt, previous=previous, **forged).sealed()
        lines, previous = [*lines, sealed.line()], sealed.hash
    (folder / receipts.NAME).write_text("\n".join(lines) + "\n")


def test_a_difference_while_the_run_trains_is_no_verdict(copied: tuple[Path, Path]) -> None:
    """A run writes and removes files while they are read, so that they may differ for a moment."""
    run, data = copied
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ": verified; " in call(run, f"data_folder={data}")
        (run / "checkpoints" / "epoch_0001.json").unlink()
        text = call(run, f"data_folder={data}", code=2)
        assert f"lockstep: {run}: trains now. Verify it when it has ended. Until then: {run}" in text
    assert "epoch_0001.json: is missing, and receipt" in call(run, f"data_folder={data}", code=1)


def test_what_cant_be_verified_says_what_to_do(copied: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = copied
    assert "there is no such run" in call(tmp_path / "none", code=2)
    assert "can't share 4: raise logical_ranks" in call(
        folder, "--replay", 1, "devices=[cpu, cpu, cpu, cpu, cpu]", code=2
    )
    assert "--replay must be at least 1" in call(folder, "--replay", 0, code=2)
    for options in ([], ["--replay", 1], ["--step", 1]):
        shown = call(folder, *options, "learning_rate=0.5", code=2)
        assert "leave out the keys that change results" in shown
    moved = data.with_name("moved")
    assert "Name the folder: data_folder=FOLDER" in call(folder, f"data_folder={moved}", code=2)
    data.rename(moved)
    last_step = receipts.read(folder)[0][-1].step
    shown = call(folder, f"data_folder={moved}")
    assert ": verified; " in shown and f" receipts up to step {last_step}" in shown
    lines = (folder / receipts.NAME).read_text().splitlines(keepends=True)
    (folder / receipts.NAME).write_text(lines[0])
    assert "has no receipt" in (text := call(folder, code=1))
    assert "receipts.jsonl lacks receipts at its end" in text
    (folder / receipts.NAME).write_text("")
    assert "is empty: the run has not begun, or its receipts were removed" in call(folder, code=2)
    (folder / receipts.NAME).write_text(lines[0])
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").mkdir()
    assert "there is no interval between two receipts of this dataset" in call(folder, "--replay", 1, code=2)
    (folder / receipts.NAME).unlink()
    assert "has no receipts, so it can't be verified" in call(folder, code=2)


@pytest.mark.slow
def test_a_resumed_run_continues_its_chain(program: Program) -> None:
    program.run(*KEYS, "n_epochs=1")
    running = program.run(*KEYS, "n_epochs=2", "resume_train=true", devices="[cpu]")
    kinds = [receipt.kind for receipt in receipts.read(running.run_folder)[0]]
    assert kinds.count("start") == 2 and kinds[-1] == "checkpoint"
    assert ": verified; " in call(running.run_folder)


@pytest.mark.slow
def test_a_refused_resume_leaves_the_run_as_it_was(program: Program) -> None:
    folder = program.run(*KEYS, "n_epochs=1").run_folder
    path = folder / receipts.NAME
    whole, config = path.read_bytes(), (folder / "config.yaml").read_bytes()
    path.write_bytes(whole + b"\n")
    refused = program.run(*KEYS, "n_epochs=2", "learning_rate=0.02", "resume_train=true", code=2)
    assert "its last receipt is damaged. Move the file away to go on." in refused.last_line()
    assert (folder / "config.yaml").read_bytes() == config
    path.write_bytes(whole)
    call(folder)


@pytest.mark.slow
def test_a_run_that_was_killed_before_a_receipt_is_verified_once_it_has_resumed(program: Program) -> None:
    running = program.run(*KEYS, "n_epochs=2")
    chain = running.run_folder / receipts.NAME
    *lines, last = chain.read_text().splitlines(keepends=True)
    assert '"checkpoint":"epoch_0002"' in last
    chain.write_text("".join(lines))
    problem = "epoch_0002.json: has no receipt. A run that was killed while it saved this adds one when it"
    assert problem in call(running.run_folder, code=1)
    program.run(*KEYS, "n_epochs=3", "resume_train=true")
    assert ": verified; " in call(running.run_folder, "--replay", 2)


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_gets_no_receipt_when_the_run_resumes(program: Program) -> None:
    """The second part is trained without logical_ranks, so no receipt vouches for its checkpoint."""
    program.run(*KEYS, "n_epochs=1")
    program.run(*KEYS[1:], "logical_ranks=null", "n_epochs=2", "resume_train=true")
    folder = program.run(*KEYS, "n_epochs=3", "resume_train=true").run_folder
    text = call(folder, code=1)
    assert "epoch_0002.json: has no receipt" in text
    assert "begins with a state that no receipt before it has" in text
    own = {
        path.stem: receipts.digest_of_settings(Config(**checkpoint_files.read_state(path).config))
        for path in checkpoint_files.records(folder)
    }
    of_checkpoints = [receipt for receipt in receipts.read(folder)[0] if receipt.checkpoint]
    assert {receipt.checkpoint for receipt in of_checkpoints} == {"epoch_0001", "epoch_0003"}
    assert all(receipt.settings == own[receipt.checkpoint] for receipt in of_checkpoints)


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_receipt_can_be_resumed(program: Program) -> None:
    """It had a checkpoint, was resumed with logical_ranks, and opened the file of receipts."""
    running = program.run(*KEYS[1:], "n_epochs=1")
    (running.run_folder / receipts.NAME).touch()
    program.run(*KEYS, "n_epochs=2", "resume_train=true")
    found, problems = receipts.read(running.run_folder)
    assert found[0].kind == "start" and found[0].step > 0 and problems == []


def test_a_checkpoint_from_memory_is_written_without_a_first_receipt(tmp_path: Path) -> None:
    (tmp_path / receipts.NAME).touch()
    add_written_out(tmp_path, tmp_path / "checkpoints" / "epoch_0001_at_8.safetensors")
    assert (tmp_path / receipts.NAME).read_bytes() == b""


@pytest.mark.slow
def test_each_part_of_a_run_is_judged_by_its_own_settings(program: Program) -> None:
    """The first part may remove its checkpoints, and the second may not.

    A better epoch of the second part removes the first part's last checkpoint, if that was saved only because
    it was the best. Then no record of the first part's keep_checkpoints is left.
    """
    program.run(*KEYS, "n_epochs=3", "keep_checkpoints=1")
    running = program.run(*KEYS, "n_epochs=4", "keep_checkpoints=null", "resume_train=true")
    records = running.run_folder / "checkpoints"
    assert len(list(records.glob("*.json"))) < 4
    text = call(running.run_folder)
    assert ": verified; " in text and "note: " not in text
    for name in ("epoch_0001", "epoch_0002", "epoch_0003"):
        for suffix in (".json", ".safetensors"):
            (records / f"{name}{suffix}").unlink(missing_ok=True)
    text = call(running.run_folder)
    assert ": verified; " in text
    assert f"note: {records}: 3 checkpoint(s) up to epoch_0003 are missing. The run may have" in text
    (records / "epoch_0004.json").unlink()
    assert "epoch_0004.json: is missing, and receipt" in call(running.run_folder, code=1)


@pytest.mark.slow
def test_the_newest_checkpoints_may_not_be_missing_with_keep_checkpoints(
    program: Program, tmp_path: Path
) -> None:
    """The run has kept the newest two of five checkpoints, and may have kept the best one."""
    running = program.run(*KEYS, "n_epochs=5", "keep_checkpoints=2")
    for name in ("epoch_0004.json", "epoch_0005.safetensors"):
        folder = Path(shutil.copytree(running.run_folder, tmp_path / name))
        (folder / "checkpoints" / name).unlink()
        assert f"{name}: is missing, and receipt" in call(folder, code=1)
    for path in (running.run_folder / "checkpoints").glob("epoch_000[123].*"):
        path.unlink()
    assert ": verified; " in call(running.run_folder)


@pytest.mark.slow
def test_newer_checkpoints_count_in_all_parts_of_a_run(program: Program) -> None:
    """The second part keeps four, of which the first part had removed one before."""
    program.run(*KEYS, "n_epochs=2", "keep_checkpoints=1")
    running = program.run(*KEYS, "n_epochs=4", "keep_checkpoints=4", "resume_train=true")
    place = running.run_folder / "checkpoints"
    (place / "epoch_0001.json").unlink(missing_ok=True)
    (place / "epoch_0001.safetensors").unlink(missing_ok=True)
    assert ": verified; " in call(running.run_folder)
    (place / "epoch_0002.json").unlink()
    (place / "epoch_0002.safetensors").unlink()
    assert "note: " in call(running.run_folder)  # no record is left that tells what the first part kept
    (place / "epoch_0003.json").unlink()
    assert "epoch_0003.json: is missing, and receipt" in call(running.run_folder, code=1)


@pytest.mark.parametrize("left", [".json", ".safetensors"])
def test_a_checkpoint_of_two_files_is_missing_without_one_of_them(tmp_path: Path, left: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / f"epoch_0001{left}").touch()
    (note,) = _missing_of(tmp_path, ["epoch_0001"])
    assert "1 checkpoint(s) up to epoch_0001 are missing" in note


@pytest.mark.slow
def test_checkpoints_from_before_the_receipts_get_a_note(program: Program) -> None:
    """The run began without logical_ranks. As of a host that lost its disk, the receipts begin later."""
    program.run(*KEYS[1:], "n_epochs=2")
    running = program.run(*KEYS, "n_epochs=3", "resume_train=true")
    note = "epoch_0001.safetensors: is older than the receipts. Only its own checksum was checked"
    text = call(running.run_folder)
    assert ": verified; " in text and note in text
    folder = running.run_folder / "checkpoints"
    for suffix in (".json", ".safetensors"):
        shutil.copy(folder / f"epoch_0001{suffix}", folder / f"epoch_0004{suffix}")
    assert "epoch_0004.json: has no receipt" in call(running.run_folder, code=1)
    flip(folder / "epoch_0001.safetensors", 8000)
    assert "epoch_0001.safetensors: is damaged" in call(running.run_folder, code=1)


@pytest.mark.slow
def test_a_recovered_run_is_verified_across_its_recovery(program: Program) -> None:
    """The receipt of the state in memory that the run went on from joins the two parts of the chain."""
    words = ("n_epochs=3", "learning_rate=0.001", "memory_checkpoint_seconds=1e-6")
    running = program.start(*KEYS, *words)
    running.wait_for_text("epoch 1 step 4/")
    os.kill(running.pids()["trainer 1"], signal.SIGKILL)
    assert running.wait() == 0, running.output()
    assert "resumed from memory" in running.output()
    kinds = [receipt.kind for receipt in receipts.read(running.run_folder)[0]]
    assert kinds.count("start") == kinds.count("recovery") == 1
    text = call(running.run_folder, "--replay", 3)
    assert ": verified; " in text and "computed again" in text


@pytest.mark.slow
def test_a_preempted_run_is_verified_across_its_checkpoint_from_memory(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher writes the checkpoint and its receipt, since the trainers stand still."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    words = (*KEYS, "model=small_networks:StopsAtSixthStep", "n_epochs=2", "memory_checkpoint_seconds=1e-6")
    seconds = f"preempt_seconds={min(limit(4), 60):g}"  # less than `timeout`
    running = program.start(*words, seconds, environment={**os.environ, "STAND_STILL": "1"})
    running.wait_for_text("epoch 1 step 2/")  # each trainer has two logical ranks, so two passes a step
    time.sleep(2)  # it stands still in the sixth pass now
    running.process.send_signal(signal.SIGTERM)
    assert running.wait() == 143, running.output()
    last = receipts.read(running.run_folder)[0][-1]
    assert last.kind == "recovery" and last.checkpoint and last.position > 0
    program.run(*words, "resume_train=true")
    text = call(running.run_folder, "--replay", 3)
    assert ": verified; " in text and "computed again" in text


def example() -> receipts.Receipt:
    texts = dict.fromkeys(("state", "checkpoint", "record", "config", "settings", "manifest", "labels"), "x")
    return receipts.Receipt(0, "step", 1, 1, 8, versions={}, machine={"threads": "1"}, **texts)


def test_a_line_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    file = ReceiptFile(tmp_path)
    for _ in range(2):
        file.add(example())
    path = tmp_path / receipts.NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"half')
    ReceiptFile(tmp_path).add(example())
    found, problems = receipts.read(tmp_path)
    assert path.read_bytes().startswith(whole) and len(found) == 3 and problems == []
    path.write_bytes(whole.replace(b'"number":1', b'"number":"a"'))
    with pytest.raises(UserError, match="its last receipt is damaged"):
        ReceiptFile(tmp_path)


def test_a_variable_that_limits_instructions_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN then computes other bits on the same processor."""
    config = make_config()
    receipt = dataclasses.replace(example(), machine=machine_of(config))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    differences = reasons(receipt, receipt.versions, machine_of(config))
    assert differences == ["machine's ONEDNN_MAX_CPU_ISA: none then, SSE41 now"]


def test_a_run_without_logical_ranks_keeps_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Runs with logical_ranks keep them"):
        receipts.read(tmp_path)


def test_the_hash_is_of_all_other_fields() -> None:
    sealed = example().sealed()
    content: dict[str, Any] = dataclasses.asdict(sealed)
    content.pop("hash")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert sealed.hash == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("machine", [{}, {"threads": "some"}, {"threads": "0"}, {"threads": [1]}])
def test_a_receipt_with_a_true_hash_and_no_number_of_threads_is_damaged(machine: dict[str, Any]) -> None:
    """A replay takes the number from there."""
    assert receipts.parse(example().sealed().line())
    assert receipts.parse(dataclasses.replace(example(), machine=machine).sealed().line()) is None


@pytest.mark.slow
def test_a_replay_that_ends_early_is_no_proof(program: Program) -> None:
    running = program.run(*KEYS, "n_epochs=2", "lr_step=[5]")  # a schedule that does not span the run
    text = call(running.run_folder, "--step", 24, "n_epochs=1", code=2)
    assert "ended before step" in text and "leave out n_epochs" in text


def test_patience_ends_no_replay() -> None:
    """A run may be resumed with a patience that would have ended it earlier."""
    config = make_config(logical_ranks=2, global_batch_size=8, patience=1)
    assert verify.on_devices(config, [], example()).patience is None


@pytest.mark.slow
def test_a_run_resumed_with_another_batch_size_is_verified(program: Program) -> None:
    program.run("logical_ranks=4", "global_batch_size=16", "cpu_threads=1", "n_epochs=1")
    words = ("logical_ranks=4", "global_batch_size=30", "cpu_threads=1", "resume_train=true")
    running = program.run(*words, "n_epochs=2")
    assert ": verified; " in call(running.run_folder, "--replay", 5)


@pytest.mark.slow
def test_a_run_resumed_on_another_dataset_is_replayed_on_that_one(program: Program, tmp_path: Path) -> None:
    keys = (*KEYS, "lr_step=[9]")  # else the number of epochs is a setting
    program.run(*keys, "n_epochs=1")
    other = Path(shutil.copytree(program.data, tmp_path / "other"))
    np.save(other / "misc" / "img_mean.npy", np.zeros((36, 36, 3)))
    write_true_manifest(other)
    program.data = other
    folder = program.run(*keys, "n_epochs=2", "resume_train=true").run_folder
    text = call(folder, "--replay", 99)
    assert ": verified; " in text and "note: only 4 intervals can be replayed" in text
    assert "the settings of config.yaml and this dataset" in call(folder, "--step", 3, code=2)


@pytest.mark.slow
def test_a_run_resumed_within_an_epoch_with_another_batch_size_is_verified(program: Program) -> None:
    """The last two steps of that epoch end at images 85 to 89 and 90, in the same thirteenth seven."""
    words = ("logical_ranks=4", "check_every=1", "snapshot_freq=1", "cpu_threads=1")
    running = program.start(*words, "global_batch_size=8", "n_epochs=2")
    running.wait_for_text("epoch 1 step 2/")
    running.process.send_signal(signal.SIGINT)
    assert running.wait() == 130, running.output()
    program.run(*words, "global_batch_size=7", "resume_train=true", "n_epochs=1")
    assert ": verified; " in call(running.run_folder, "--replay", 20)


@pytest.mark.slow
def test_receipts_that_begin_within_the_first_step_are_not_of_the_beginning(program: Program) -> None:
    """The run began without logical_ranks, and stopped after fewer images than a step has now."""
    saves = ("checkpoint_minutes=1e-9", "n_epochs=1", "devices=[cpu]", "batch_size=16")
    running = program.run(*saves)
    for path in (running.run_folder / "checkpoints").glob("epoch_*"):
        if path.stem != "epoch_0001_at_16":
            path.unlink()
    program.run(
        *KEYS[:1], "global_batch_size=64", "checkpoint_minutes=null", "n_epochs=2", "resume_train=true"
    )
    text = call(running.run_folder, "--replay", 9)
    assert ": verified; " in text and "epoch_0001_at_16.safetensors: is older than the receipts" in text
    for path in (running.run_folder / "checkpoints").glob("epoch_0001_at_16.*"):
        path.unlink()
    assert ": verified; " in call(running.run_folder, "--replay", 9)
    assert "its receipts do not begin at step 0" in call(running.run_folder, "--step", 3, code=2)


@pytest.mark.slow
def test_a_run_on_datasets_is_verified(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    running = program.run("data=own_datasets:make_squares", "n_classes=4", "n_epochs=1", *KEYS)
    assert ": verified; " in call(running.run_folder)


def test_datasets_that_were_objects_are_no_problem_of_the_run() -> None:
    config = make_config(data="caller:datasets", n_classes=4)
    receipt = dataclasses.replace(example(), manifest="")
    with pytest.raises(UserError, match="or name it: data="):
        verify.check_data(config, receipt, is_quiet=True, has_problems=False)
    assert len(verify.check_data(config, receipt, is_quiet=True, has_problems=True)) == 1


def test_changed_datasets_are_named_by_their_function() -> None:
    config = make_config(data="own_datasets:make_squares", n_classes=4)
    receipt = dataclasses.replace(example(), manifest="")
    (problem,) = check_data(config, receipt, lambda total: None, lambda name: None)
    assert problem.startswith("own_datasets:make_squares: has other labels")


def test_receipts_of_a_run_without_a_checkpoint_go_when_another_begins(tmp_path: Path) -> None:
    config = make_config(weights_dir=str(tmp_path), run_name="run")
    for resumes in (False, True):
        begun = open_run(dataclasses.replace(config, resume_train=resumes), 10)
        begun.lock.close()
        assert not (begun.folder / receipts.NAME).exists()
        (begun.folder / receipts.NAME).write_text("of a run that was killed")


@pytest.mark.parametrize(
    "word", ["read_threads=2", "preempt_seconds=30", "memory_checkpoint_seconds=null", "exchange=staged"]
)
def test_keys_that_change_no_bit_change_no_settings(word: str) -> None:
    key, _, value = word.partition("=")
    config, names = make_config(), {field.name for field in dataclasses.fields(Config)}
    other = dataclasses.replace(config, **{key: value})
    assert receipts.digest_of_settings(other) == receipts.digest_of_settings(config)
    assert names > receipts._FREE_KEYS, "a key has another name now"


def test_the_order_of_learning_rates_is_one_of_the_settings() -> None:
    """Of several patterns that match, the last one counts, so a replay needs their order."""
    one, other = (
        receipts.digest_of_settings(make_config(learning_rates=rates))
        for rates in ({"fc*": 0.1, "*.bias": 3}, {"*.bias": 3, "fc*": 0.1})
    )
    assert one != other


@pytest.mark.slow
def test_a_run_on_two_hosts_is_replayed_on_one(program: Program) -> None:
    hosts = start(program, "n_epochs=2", *KEYS)
    end_well(hosts)
    assert ": verified; " in call(hosts[0].run_folder, "--replay", 2, "devices=[cpu, cpu, cpu]")


@pytest.mark.slow
def test_intervals_whose_checkpoint_is_gone_are_left_out(program: Program) -> None:
    """The run begins at a checkpoint of another run."""
    program.run(*KEYS, "n_epochs=2", "snapshot_freq=1")
    words = ("n_epochs=3", "resume_train=true", "load_epoch=1")
    program.run(*KEYS, *words)
    begun = program.place / "runs" / "run-from-epoch_0001"
    assert "note: only 4 intervals can be replayed, not 9" in call(begun, "--replay", 9)  # those of epoch 3
