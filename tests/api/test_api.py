"""lockstep.train and lockstep.resume: the runs of train.py, called from Python."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import saved
import torch
from campaigns.watching import processes_of_session
from conftest import ROOT, Program, wait_until
from limits import limit
from own_folders import write_classes
from PIL import Image

import lockstep
from lockstep.api.arguments import as_yaml
from lockstep.api.launch import Launch
from preprocessing.layouts import in_validation

pytestmark = pytest.mark.usefixtures("forked_runs")
KEYS = {"n_classes": 7, "batch_size": 8, "shuffle_block": 4, "print_freq": 2, "cpu_threads": 1}


def keys(folder: Path, **more: object) -> dict[str, object]:
    return {"weights_dir": str(folder / "runs"), "devices": ["cpu", "cpu"], "quiet": True, **KEYS, **more}


def script(text: str, *arguments: object, **options: object) -> "subprocess.Popen[str]":
    """A program in its own session, without a `__main__` guard."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes, **options)


@pytest.mark.parametrize(
    "n_trainers", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_run_has_the_bits_of_train_py(
    n_trainers: int, program: Program, shared_folder: Path, tmp_path: Path
) -> None:
    devices = ["cpu"] * n_trainers
    theirs = program.run("n_epochs=2", "cpu_threads=1", devices=f"[{', '.join(devices)}]")
    events: list[dict[str, object]] = []
    more = keys(tmp_path, n_epochs=2, run_name="api", devices=devices)
    run = lockstep.train(shared_folder, callback=events.append, **more)
    assert run.complete
    assert run.folder == tmp_path / "runs" / "api"
    name = "checkpoints/epoch_0002.safetensors"
    ours = saved.load_file(run.folder / name)
    saved.assert_same(ours, saved.load_file(theirs.run_folder / name))
    assert [record["epoch"] for record in run.history] == [1, 2]
    assert run.best == min(run.history, key=lambda record: record["error_top1"])
    assert [event for event in events if event["event"] == "validated"] == run.history
    assert any(event["event"] == "progress" for event in events)
    with torch.device("meta"):  # another default device of the caller's
        assert all(weights.is_cpu for weights in run.model().parameters())


@pytest.mark.slow
def test_the_network_answers_and_the_run_resumes(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lockstep.train(shared_folder, **keys(tmp_path, n_epochs=1))
    model = run.model()
    assert not model.training
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (50, 40), "red").save("-red.png")
    answers = run.predict("-red.png")
    with pytest.raises(lockstep.UserError, match="is a folder"):
        run.predict(tmp_path)
    assert len(answers) == 5
    assert answers == sorted(answers, key=lambda answer: -answer[1])
    assert lockstep.Run(run.folder).complete and not lockstep.Run(tmp_path).complete
    resumed = lockstep.resume(run.folder, n_epochs=2, quiet=True)
    assert resumed.complete
    assert [record["epoch"] for record in resumed.history] == [1, 2]
    branch = lockstep.resume(run.folder, n_epochs=3, load_epoch=np.int64(1), quiet=True)
    assert branch.folder.name == f"{run.folder.name}-from-epoch_0001"
    assert [record["epoch"] for record in branch.history] == [2, 3]


def test_damaged_lines_of_a_log_leave_the_history_as_it_is(tmp_path: Path) -> None:
    lines = ['{"event": "validated", "epoch": 1}', "{}", "[1]", "7", '{"event": 3}', '{"event": "progress"}']
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, ""]))
    assert [record["epoch"] for record in lockstep.Run(tmp_path).history] == [1]


def test_epochs_that_a_resumed_run_takes_again_leave_the_history(tmp_path: Path) -> None:
    def history_after(*events: tuple[str, int, float]) -> list[tuple[int, float]]:
        lines = [json.dumps({"event": kind, "epoch": epoch, "loss": loss}) for kind, epoch, loss in events]
        (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
        return [(record["epoch"], record["loss"]) for record in lockstep.Run(tmp_path).history]

    former = [("validated", 1, 0.5), ("validated", 2, 0.6), ("validated", 3, 0.7)]
    assert history_after(*former) == [(1, 0.5), (2, 0.6), (3, 0.7)]
    resumed = [*former, ("progress", 2, 0.4)]
    assert history_after(*resumed) == [(1, 0.5)]
    assert history_after(*resumed, ("validated", 2, 0.4)) == [(1, 0.5), (2, 0.4)]


def test_best_of_a_run_without_a_validated_epoch_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match="has saved nothing"):
        _ = lockstep.Run(tmp_path).best
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch_0001_at_8.json").touch()
    with pytest.raises(lockstep.UserError, match="Resume the run"):
        _ = lockstep.Run(tmp_path).best


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("given", "variables"), [({"host_rank": 1}, {}), ({}, TORCHRUN)])
def test_a_host_that_is_not_the_first_has_the_history_and_the_events_of_its_own_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    events: list[dict[str, Any]] = []
    launched = {"weights_dir": str(tmp_path), "run_name": "run", **given}
    launch = Launch(launched, {}, events.append, quiet=True)
    (tmp_path / "run").mkdir()
    for name, times in (("log", (3.5, 4.5)), ("host1", (1.5, 2.5))):  # host 1 is host 0 in the end
        lines = [json.dumps({"event": "validated", "time": time, "epoch": int(time)}) for time in times]
        (tmp_path / "run" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    with subprocess.Popen(["true"], text=True) as process:
        launch._pass_events_on(process)
    assert [event["epoch"] for event in events] == [1, 2]
    assert [record["epoch"] for record in lockstep.Run(tmp_path / "run").history] == [1, 2, 3, 4]


def test_a_callback_may_change_the_working_directory(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {**keys(tmp_path, n_epochs=2, run_name="moved"), "weights_dir": "runs"}
    run = lockstep.train(shared_folder, callback=lambda event: os.chdir("/"), **more)
    assert run.folder == tmp_path / "runs" / "moved" and len(run.history) == 2


@pytest.mark.new_interpreter
@pytest.mark.slow
def test_a_module_in_the_working_directory_hides_none_of_pythons(
    shared_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the module of the working directory')")
    monkeypatch.chdir(tmp_path)  # the caller imports from another folder
    assert lockstep.train(shared_folder, **keys(tmp_path, n_epochs=1)).complete


def test_a_folder_of_images_is_converted_and_trained_on(tmp_path: Path) -> None:
    images = write_classes(tmp_path / "mine", {"cat": 20, "dog": 20})
    run = lockstep.train(images, **{**keys(tmp_path, n_epochs=1, val_split=0.3), "n_classes": None})
    assert run.complete
    assert run.history[0]["n_images"] == sum(
        in_validation(f"{path.parent.name}/{path.name}", 0.3) for path in images.glob("*/*")
    )
    assert {name for name, _ in run.predict(images / "cat" / "000.png")} == {"cat", "dog"}
    with pytest.raises(lockstep.UserError, match="holds no folders of classes and no table of labels"):
        lockstep.train(images / "cat", **keys(tmp_path, n_epochs=1))


@pytest.mark.slow
def test_a_callback_stops_a_run(shared_folder: Path, tmp_path: Path) -> None:
    run = lockstep.train(shared_folder, callback=lambda event: "stop", **keys(tmp_path, n_epochs=500))
    assert not run.complete
    assert not lockstep.Run(run.folder).complete
    assert list((run.folder / "checkpoints").glob("*.safetensors"))
    assert len(run.history) < 500


def test_an_error_of_the_callback_ends_all_processes(shared_folder: Path, tmp_path: Path) -> None:
    def fail(event: object) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        lockstep.train(shared_folder, callback=fail, **keys(tmp_path, n_epochs=500, run_name="failed"))
    events = map(json.loads, (tmp_path / "runs" / "failed" / "log.jsonl").read_text().splitlines())
    started = next(event for event in events if event["event"] == "started")
    pids = [pid for name, pid in started.items() if name.startswith(("trainer", "loader"))]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all processes to end", 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learnig_rate": 1}, "unknown key 'learnig_rate' .did you mean 'learning_rate'"),
        ({"data_folder": "/nowhere"}, "/nowhere: there is no such dataset folder"),
        ({"callback": "stop"}, "^callback: must be a function of a record, not 'stop'"),
        ({"model": 7}, "model: must be a name, or a class or function"),
        ({"model": torch.nn.Linear(3, 2)}, "^model: must be a name, or a class or function .*, not Linear"),
        ({"model": "models.mine:Net"}, "Lockstep has a package models of its own, without mine.*rename"),
        ({"model": lambda n_classes: None}, "must make a torch.nn.Module, not NoneType"),
        ({"train_data": []}, "train_data and val_data: one is missing"),
        ({"train_data": [], "val_data": [], "data_folder": "here"}, "given beside another dataset"),
        ({"train_data": [], "val_data": [], "mean_file": "here"}, "given beside another dataset's mean_file"),
        ({"momentum": object()}, "^momentum: must be a text, a number, a list or a mapping of these"),
        ({"data": (object(), object())}, "^data: must be a text.*Pass datasets as train_data and val_data"),
    ],
)
def test_what_cannot_be_used_is_named(
    given: dict[str, object], message: str, shared_folder: Path, tmp_path: Path
) -> None:
    folder = {} if "train_data" in given else {"data_folder": shared_folder}
    with pytest.raises(lockstep.UserError, match=message):
        lockstep.train(**keys(tmp_path, n_epochs=1), **folder | given)
    assert not list((tmp_path / "runs").glob("*/config.yaml")) or "NoneType" in message


@pytest.mark.parametrize("image", [b"a.png", Image.new("RGB", (4, 4)), np.zeros((4, 4, 3), np.uint8), None])
def test_only_paths_of_images_are_predicted(image: Any, tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match=r"^image: must be the path of an image file, not \w+$"):
        lockstep.Run(tmp_path).predict(image)


def test_resuming_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(lockstep.UserError, match="is not a run's folder"):
        lockstep.resume(tmp_path)
    with pytest.raises(lockstep.UserError, match=r"^callback: must be a function"):
        lockstep.resume(tmp_path, callback=7)
    for call in (lockstep.resume, lockstep.Run):
        with pytest.raises(lockstep.UserError, match=r"^folder: must be .* not int"):
            call(5)


def test_a_failure_is_one_also_where_the_caller_ignores_the_end_of_children(
    shared_folder: Path, tmp_path: Path
) -> None:
    """Python takes the unknown exit code of a child for 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(lockstep.UserError, match="learning_rate must be above 0"):
            lockstep.train(shared_folder, **keys(tmp_path, learning_rate=-1))
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_lost_process_is_named(shared_folder: Path, tmp_path: Path) -> None:
    def kill(event: dict[str, object]) -> None:
        text = (tmp_path / "runs" / "lost" / "log.jsonl").read_text()
        started = json.loads(text.splitlines()[0])
        with suppress(ProcessLookupError):  # another event may come after the first kill
            os.kill(started["trainer 1"], signal.SIGKILL)

    with pytest.raises(lockstep.RunFailed, match="trainer 1"):
        lockstep.train(
            shared_folder, callback=kill, **keys(tmp_path, n_epochs=500, run_name="lost", on_failure="stop")
        )


SCRIPT = """
import sys, lockstep
print("once", flush=True)
keys = dict(weights_dir=sys.argv[2], run_name="r", devices=["cpu"], n_classes=7, batch_size=8, print_freq=2)
keys |= dict(callback=lambda event: print("event", flush=True))
run = lockstep.train(sys.argv[1], **keys, quiet=True, n_epochs=500)
print(run.complete, len(run.history), flush=True)
"""


def test_an_interrupt_saves_and_returns_the_run(shared_folder: Path, tmp_path: Path) -> None:
    process = script(SCRIPT, shared_folder, tmp_path)
    assert process.stdout
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    lines += process.communicate(timeout=limit(60))[0].splitlines()
    assert [line.strip() for line in lines].count("once") == 1
    assert lines[-1].startswith("False")
    assert list((tmp_path / "r" / "checkpoints").glob("*.safetensors"))


def test_a_callback_that_is_interrupted_gets_the_later_events(tmp_path: Path) -> None:
    seen: list[int] = []

    def callback(event: dict[str, Any]) -> None:
        seen.append(event["step"])
        if len(seen) == 1:
            raise KeyboardInterrupt

    launch = Launch({"weights_dir": str(tmp_path), "run_name": "r"}, {}, callback, True)
    (tmp_path / "r").mkdir()
    lines = [json.dumps({"event": "progress", "step": step}) for step in (1, 2, 3)]
    (tmp_path / "r" / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    launch._wait(SimpleNamespace(poll=lambda: 0, send_signal=lambda number: None))  # type: ignore[arg-type]
    assert seen == [1, 2, 3]


def test_an_interrupt_while_the_launcher_starts_returns_the_run(shared_folder: Path, tmp_path: Path) -> None:
    """Python has no handlers of the launcher's yet."""
    at_once = """
import os, signal
from lockstep.api.launch import Launch
start = Launch._start

def start_and_interrupt(self, environment):
    process = start(self, environment)
    os.kill(os.getpid(), signal.SIGINT)
    return process

Launch._start = start_and_interrupt
"""
    process = script(at_once + SCRIPT, shared_folder, tmp_path)
    output, errors = process.communicate(timeout=limit(60))
    assert output.splitlines()[-1].startswith("False 0"), output
    assert "Traceback" not in f"{output}{errors}"


@pytest.mark.slow
def test_a_second_interrupt_ends_the_run_at_once(shared_folder: Path, tmp_path: Path) -> None:
    text = SCRIPT.replace('print("event", flush=True)', '(print("event", flush=True), time.sleep(60))')
    process = script(f"import time\n{text}", shared_folder, tmp_path)
    assert process.stdout
    lines = [process.stdout.readline(), process.stdout.readline()]
    process.send_signal(signal.SIGINT)  # the callback may end its work
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    lines += process.communicate(timeout=limit(20))[0].splitlines()
    assert lines[-1] == "KeyboardInterrupt"
    wait_until(lambda: processes_of_session(process.pid) == [], "all of the run's processes to end", 2)


@pytest.mark.slow
def test_the_callers_death_ends_everything(shared_folder: Path, tmp_path: Path) -> None:
    process = script(SCRIPT, shared_folder, tmp_path)
    assert process.stdout
    process.stdout.readline()
    process.stdout.readline()  # an event: it trains
    process.kill()
    process.wait()
    wait_until(lambda: processes_of_session(process.pid) == [], "all of the run's processes to end", 2)


@pytest.mark.slow
def test_runs_in_threads_do_not_meet(shared_folder: Path, tmp_path: Path) -> None:
    runs: dict[str, lockstep.Run] = {}

    def one(name: str) -> None:
        more = keys(tmp_path, n_epochs=1, run_name=name, devices=["cpu"])
        runs[name] = lockstep.train(shared_folder, **more)

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: run.complete for name, run in runs.items()} == {"a": True, "b": True}


def test_another_folder_for_a_run_to_resume_is_refused_and_its_own_accepted(
    shared_folder: Path, tmp_path: Path
) -> None:
    mine = keys(tmp_path, n_epochs=1, run_name="mine", devices=["cpu"])
    run = lockstep.train(shared_folder, **mine)
    for other in ({"run_name": "other"}, {"weights_dir": str(tmp_path / "others")}):
        with pytest.raises(lockstep.UserError, match=r"is not .*mine, the run to resume"):
            lockstep.resume(run, n_epochs=2, quiet=True, **other)
    assert [record["epoch"] for record in run.history] == [1]
    assert lockstep.resume(run, **{**mine, "n_epochs": 2}).folder == run.folder


def test_a_refused_call_leaves_the_folder_of_the_run_that_trains(shared_folder: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "runs" / "mine" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with open(checkpoints.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(lockstep.UserError, match="another run is writing there now"):
            lockstep.train(shared_folder, **keys(tmp_path, run_name="mine"))
    assert checkpoints.is_dir()


@pytest.mark.slow
def test_a_run_resumed_from_an_older_checkpoint_is_the_one_that_is_returned(
    shared_folder: Path, tmp_path: Path
) -> None:
    run = lockstep.train(shared_folder, **keys(tmp_path, n_epochs=2, run_name="a", snapshot_freq=1))
    events: list[dict[str, object]] = []
    older = lockstep.resume(run.folder, load_epoch=1, callback=events.append, quiet=True)
    assert older.folder.name == "a-from-epoch_0001" and older.complete
    assert [event["epoch"] for event in events if event["event"] == "validated"] == [2]
    newest = lockstep.train(shared_folder, **keys(tmp_path, n_epochs=3, resume_train=True))
    assert newest.folder == older.folder and newest.history[-1]["epoch"] == 3


def test_training_a_complete_run_again_with_auto_returns_it(tmp_path: Path, shared_folder: Path) -> None:
    words = keys(tmp_path, n_epochs=1, resume_train="auto", run_name="a")
    first, again = (lockstep.train(shared_folder, **words) for _ in range(2))
    assert again.folder == first.folder and again.complete and again.history == first.history


def test_mappings_keep_their_order() -> None:
    """Of several patterns of `learning_rates` that match, the last one counts."""
    assert as_yaml("learning_rates", {"fc1.*": 0.1, "*.bias": 3}) == "{fc1.*: 0.1, '*.bias': 3}"


def test_values_of_numpy_are_keys_too() -> None:
    assert (
        as_yaml("momentum", np.float32(0.5)) == "0.5" and as_yaml("item_size", np.array([1, 2])) == "[1, 2]"
    )
    assert as_yaml("class_weights", [np.float64(2), np.array([0.5])]) == "[2.0, [0.5]]"
    assert as_yaml("learning_rates", {"fc1.*": np.float64(0.1)}) == "{fc1.*: 0.1}"
    with pytest.raises(lockstep.UserError, match="must be a text, a number, a list or a mapping"):
        as_yaml("momentum", object())
