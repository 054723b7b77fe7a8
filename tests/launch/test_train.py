"""The program as a user runs it: it trains, ends, leaves nothing, and resumes exactly where it stopped."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import ROOT, Program, Running, make_config, make_folder, wait_until
from dataset_folders import write_manifest
from limits import limit
from safetensors.numpy import load_file
from saved import assert_same, tensors

from lockstep.comm.messages import Progress, Validated
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.launch.children import ExitStatus
from lockstep.launch.console import Console, progress_line, show
from lockstep.runs.checkpoint_files import verify_checksum
from lockstep.runs.folder import open_run
from lockstep.text import escape_when_printing


def events(running: Running, kind: str) -> list[dict]:
    lines = (running.run_folder / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


WORDS = ("n_epochs=3", "snapshot_freq=1", "lr_step=[1]")


@pytest.fixture(scope="module")
def whole(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """An unbroken run of 3 epochs, which others are compared with."""
    return Program(shared_folder, tmp_path_factory.mktemp("whole")).run(*WORDS)


def test_a_run_ends_with_0_its_result_and_no_process(whole: Running) -> None:
    running = whole
    running.assert_nothing_left()
    assert running.last_line().startswith("done: validation error")
    assert running.last_line().endswith(f"on 33 images; files are in {running.run_folder}")
    saved = yaml.safe_load((running.run_folder / "config.yaml").read_text())
    assert saved["n_epochs"] == 3 and saved["devices"] == ["cpu", "cpu"]
    assert [event["n_images"] for event in events(running, "validated")] == [33, 33, 33]
    progress = events(running, "progress")
    # 90 images in minibatches of 16: 6 steps, a line every 2
    assert [event["step"] for event in progress] == 3 * [2, 4, 6]
    assert set(progress[0]["seconds"]) == {"load-wait", "compute", "barrier", "exchange"}
    lines = running.output().splitlines()
    assert len([line for line in lines if line.endswith("s per 20 iterations") or ", barrier " in line]) >= 1
    assert len([line for line in lines if re.match(r"epoch \d+ step ", line)]) == len(progress)
    assert max(len(line) for line in lines if line.startswith("epoch")) <= 100
    (started,) = events(running, "started")
    assert {"lockstep", "python", "torch", "numpy"} <= started["versions"].keys()
    assert started["machine"]["cpu"] and started["machine"]["cores"] >= 1
    names = sorted(os.listdir(running.run_folder / "checkpoints"))
    expected = [
        f"epoch_000{epoch}.{exit_status}" for epoch in (1, 2, 3) for exit_status in ("json", "safetensors")
    ]
    assert names == [*expected, "latest"]


@pytest.mark.parametrize("words", ["para_load=false", pytest.param("n_slots=5", marks=pytest.mark.slow)])
def test_loading_in_the_trainer_gives_the_same_bits(program: Program, whole: Running, words: str) -> None:
    other = program.run("n_epochs=1", "lr_step=[1]", words)
    assert_same(tensors(other, 1), tensors(whole, 1))


@pytest.mark.parametrize("devices", ["[cpu]", pytest.param("[cpu, cpu, cpu]", marks=pytest.mark.slow)])
def test_any_number_of_trainers_is_the_same_program(program: Program, devices: str) -> None:
    running = program.run("n_epochs=1", "lr_policy=auto", "print_train_error=false", devices=devices)
    assert "done: validation error" in running.last_line() and " error 0." not in running.output()


@pytest.mark.parametrize("words", [(), pytest.param(("compile=true",), marks=pytest.mark.slow)])
def test_sums_of_several_threads_have_the_same_bits_in_every_run(
    program: Program, words: tuple[str, ...]
) -> None:
    """By default torch adds the gradients of rows of a table in the order in which threads run."""
    keys = ("n_epochs=1", "cpu_threads=2", "model=small_networks:LooksUp", *words)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
    runs = [
        program.run(*keys, devices="[cpu]", name=name, environment=environment)
        for name in ("first", "second")
    ]
    assert_same(*(tensors(run, 1) for run in runs))


def test_a_resumed_run_ends_as_the_unbroken_one_bit_for_bit(program: Program, whole: Running) -> None:
    half = program.run("n_epochs=2", *WORDS[1:])
    assert half.last_line().startswith("done")
    resumed = program.run(*WORDS, "resume_train=true")
    assert "resuming from" in resumed.output()
    assert_same(tensors(whole, 3), tensors(resumed, 3))
    records = [
        verify_checksum(run.run_folder / "checkpoints" / "epoch_0003.json") for run in (whole, resumed)
    ]
    assert records[0].state.val_record == records[1].state.val_record


@pytest.mark.slow
def test_a_lone_trainer_that_is_resumed_ends_as_the_unbroken_one(program: Program) -> None:
    words = ["snapshot_freq=2", "lr_step=[1,3]"]
    unbroken = program.run("n_epochs=4", *words, name="unbroken", devices="[cpu]")
    program.run("n_epochs=2", *words, name="parts", devices="[cpu]")
    resumed = program.run("n_epochs=4", *words, "resume_train=true", name="parts", devices="[cpu]")
    assert_same(tensors(unbroken, 4), tensors(resumed, 4))


@pytest.mark.parametrize(
    ("words", "is_exact"),
    [
        (
            "optimizer=adamw learning_rate=0.001 ema_decay=0.9 accumulate=2 "
            "lr_policy=cosine warm_up_epochs=1",
            True,
        ),
        ("optimizer=lars model=resnet20 model_args={n: 1} clip_norm=1 label_smoothing=0.1 scale=0.01", False),
    ],
    ids=["adamw", "lars"],
)
@pytest.mark.slow
def test_every_state_is_resumed_bit_for_bit(program: Program, words: str, is_exact: bool) -> None:
    """The run says once what is not exact: here it is batch normalisation."""
    keys = ["n_epochs=3", "snapshot_freq=1", *re.split(r" (?=\w+=)", words)]
    whole = program.run(*keys)
    received = whole.output().count("2 trainers are not exactly one with 2 times the batch")
    assert received == (0 if is_exact else 1)
    program.run("resume_train=true", "load_epoch=1")
    branch = program.place / "runs" / "run-from-epoch_0001" / "checkpoints" / "epoch_0003.safetensors"
    assert_same(load_file(branch), tensors(whole, 3))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_one_signal_finishes_the_step_saves_and_the_rest_is_exact(
    program: Program, whole: Running, number: int
) -> None:
    broken = program.start(*WORDS)
    broken.wait_for_text("epoch 1 step 2/6")
    if number == signal.SIGINT:
        os.killpg(broken.process.pid, number)  # as a terminal does: to all processes at once
    else:
        broken.process.send_signal(number)
    assert broken.wait(20) == 128 + number
    broken.assert_nothing_left()
    assert "stopped as asked; saved" in broken.last_line()
    resumed = program.run(*WORDS, "resume_train=true")
    assert_same(tensors(whole, 3), tensors(resumed, 3))


@pytest.mark.slow
def test_load_epoch_goes_back_into_a_folder_of_its_own(program: Program, whole: Running) -> None:
    run = Path(shutil.copytree(whole.run_folder, program.place / "runs" / "run"))
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    program.run(*WORDS, "resume_train=true", "load_epoch=1", name="run")
    branch = run.with_name("run-from-epoch_0001")
    assert before == {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    name = "epoch_0003.safetensors"
    assert (branch / "checkpoints" / name).read_bytes() == before[name]


@pytest.mark.slow
def test_another_number_of_trainers_goes_on_without_losing_a_picture(program: Program) -> None:
    broken = program.start("n_epochs=2", "print_freq=1")
    broken.wait_for_text("epoch 1 step 1/6")
    broken.process.send_signal(signal.SIGINT)
    assert broken.wait(20) == 130
    resumed = program.run("n_epochs=2", "resume_train=true", devices="[cpu]")
    assert "the global batch size differs from before" in resumed.output()
    assert len(events(resumed, "validated")) == 2


@pytest.mark.slow
def test_going_on_from_another_seed_or_model_is_refused(program: Program) -> None:
    program.run("n_epochs=1", devices="[cpu]")
    for words, message in (
        (["seed=5"], "was made with seed: 0, the configuration says 5"),
        (["model_args={dropout: 0.1}"], "was made with model_args"),
        (["use_momentum=false"], "was made with use_momentum: True, the configuration says False"),
        (["momentum=0"], "was made with momentum: 0.9, the configuration says 0.0"),
        (["n_epochs=1"], "all 1 epochs are done; raise n_epochs"),
    ):
        epochs = [] if words == ["n_epochs=1"] else ["n_epochs=2"]
        refused = program.run(*epochs, "resume_train=true", *words, code=2, devices="[cpu]")
        assert message in refused.last_line()
    resumed = program.run("n_epochs=2", "resume_train=true", "learning_rate=0.003", devices="[cpu]")
    assert "note: learning_rate is 0.003 now, was 0.02 before" in resumed.output()


@pytest.mark.slow
def test_a_second_run_does_not_write_into_the_first_ones_folder(program: Program) -> None:
    running = program.start("n_epochs=500", "snapshot_freq=1")
    running.wait_for_text("saved")
    fresh = program.run("n_epochs=500", code=2)
    assert "already exists; run_name=run resume_train=True resumes it" in fresh.last_line()
    resumed = program.run("n_epochs=500", "resume_train=true", code=2)
    assert "another run is writing there now" in resumed.last_line()
    running.process.send_signal(signal.SIGINT)
    assert running.wait(20) == 130
    assert Path(running.run_folder / "config.yaml").exists()


def test_a_run_is_not_resumed_with_classes_of_other_names(folder: Path, tmp_path: Path) -> None:
    """A renamed class folder changes the labels of the others."""
    write_manifest(folder)
    program, manifest = Program(folder, tmp_path), folder / "manifest.json"
    run = program.run("n_epochs=1", devices="[cpu]").run_folder
    manifest.write_text(manifest.read_text().replace('"c"', '"x"'))
    refused = program.run("n_epochs=2", "resume_train=true", devices="[cpu]", code=2).last_line()
    assert f"{folder}: class 2 is 'x', and 'c' in the training data of {run}. Give the same" in refused


@pytest.mark.slow
def test_a_run_that_never_saved_can_be_started_again_or_resumed(program: Program) -> None:
    program.run("model_args={depth: 3}", devices="[cpu]", code=2)
    resumed = program.run("n_epochs=1", "model_args={}", "resume_train=true", devices="[cpu]")
    assert "has no checkpoint yet: starting from scratch" in resumed.output()
    program.run("model_args={depth: 3}", name="other", devices="[cpu]", code=2)
    assert program.run("n_epochs=1", name="other", devices="[cpu]").last_line().startswith("done")


@pytest.mark.slow
def test_a_run_killed_before_its_first_step_is_resumed_as_what_it_was(program: Program) -> None:
    """Or not at all where its configuration is gone; never as the one in the working tree."""
    killed = program.start("n_epochs=1", "learning_rate=0.003", "momentum=0.5")
    killed.pids()  # its processes are started; they import
    killed.process.kill()
    killed.wait()
    wait_until(lambda: killed.leftovers() == [], "them to be gone")
    assert not events(killed, "progress")
    resumed = program.run("resume_train=true")
    saved = yaml.safe_load((killed.run_folder / "config.yaml").read_text())
    assert (saved["n_epochs"], saved["learning_rate"], saved["momentum"]) == (1, 0.003, 0.5)
    assert "done" in resumed.last_line() and "resuming with the configuration in" in resumed.output()
    (killed.run_folder / "config.yaml").unlink()
    refused = program.run("resume_train=true", "n_epochs=2", code=2)
    assert f"{killed.run_folder}: has no config.yaml" in refused.last_line()


@pytest.mark.slow
def test_a_refused_start_replaces_no_good_runs_configuration(program: Program) -> None:
    good = program.run("n_epochs=1", "devices=[cpu]")
    before = (good.run_folder / "config.yaml").read_bytes()
    program.run("n_epochs=2", "resume_train=true", "n_classes=9", "devices=[cpu]", code=2)
    assert (good.run_folder / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "output",
    ["a reader that leaves", *(pytest.param(how, marks=pytest.mark.slow) for how in ("/dev/full", "closed"))],
)
@pytest.mark.slow
def test_a_run_does_not_need_its_terminal(program: Program, output: str) -> None:
    redirection = {
        "/dev/full": ">/dev/full 2>&1",
        "a reader that leaves": "2>&1 | head -1",
        "closed": ">&- 2>&-",
    }
    words = f"data_folder={program.data} n_classes=7 weights_dir={program.place} run_name=r n_epochs=1"
    command = f"set -o pipefail; {sys.executable} train.py {words} devices=[cpu] {redirection[output]}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, timeout=limit(60), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (program.place / "r" / "checkpoints" / "epoch_0001.json").exists()
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_resumed_run_keeps_its_own_configuration(program: Program) -> None:
    """Only what is given with resume_train changes; config.yaml is not looked at again."""
    keys = ("learning_rate=0.003", "lr_policy=auto", "momentum=0.5")
    first = program.run("n_epochs=1", *keys, devices="[cpu]")
    resumed = program.run("n_epochs=2", "resume_train=true", "momentum=0.6", devices="[cpu]")
    saved = yaml.safe_load((first.run_folder / "config.yaml").read_text())
    assert (saved["learning_rate"], saved["lr_policy"], saved["momentum"]) == (0.003, "auto", 0.6)
    assert "resuming with the configuration in" in resumed.output()
    assert "note: momentum is 0.6 now, was 0.5 before" in resumed.output()
    assert "learning_rate is" not in resumed.output()
    new = program.run("--config", str(first.run_folder / "config.yaml"), "n_epochs=1", name="new")
    assert "resuming" not in new.output() and new.last_line().startswith("done")


@pytest.mark.slow
def test_a_run_trains_in_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    make_folder(place / "data")
    words = ["data_folder=data", "n_classes=7", "devices=[cpu, cpu]", "batch_size=8", "run_name=run"]
    for more in ("n_epochs=1", "n_epochs=2 resume_train=true"):
        command = [sys.executable, ROOT / "train.py", *words, *more.split()]
        done = subprocess.run(command, cwd=place, timeout=limit(60), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_network_that_sees_little_of_a_picture_is_remarked_on(program: Program, tmp_path: Path) -> None:
    program.data = make_folder(tmp_path / "large", n_train=9, n_val=9, size=70)
    running = program.run("n_epochs=1", devices="[cpu]")
    assert (
        "takes 32 x 32 pixels, less than a quarter of an image: make the dataset with --size 36, "
        "or set a larger input_size" in running.output()
    )


@pytest.mark.slow
def test_crops_without_a_choice_are_remarked_on(program: Program, tmp_path: Path) -> None:
    program.data = make_folder(tmp_path / "small", n_train=9, n_val=9, size=32)
    words = "crop: random has no choice, because images are stored as 32 x 32 pixels: crop: padded moves them"
    assert words in program.run("n_epochs=1", devices="[cpu]").output()
    assert "has no choice" not in program.run("n_epochs=1", "crop=padded", devices="[cpu]", name="b").output()


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(program: Program) -> None:
    left = r"\[(\d\d:\d\d|\?) left, run [\d:]+ left, loss \d+\.\d{3}\]"
    bars = (
        rf"epoch \d+/99999: +\d+%\|.*\| \d+/12 {left}",
        rf"epoch \d+/99999 validation: .* {left}",
    )
    ours, theirs = pty.openpty()
    words = [f"data_folder={program.data}", "n_classes=7", f"weights_dir={program.place}", "n_epochs=99999"]
    command = [sys.executable, "train.py", *words, "devices=[cpu]", "batch_size=8", "print_freq=1000"]
    command += ["learning_rate=0.0001"]  # or the loss may soon be no number
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text, until = "", time.monotonic() + limit(60)
    try:
        while not all(re.search(bar, text) for bar in bars):  # they are drawn now and then
            assert time.monotonic() < until, text[-2000:]
            text += os.read(ours, 65536).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # EIO: no process has the other end any more
            while os.read(ours, 65536):
                pass
        assert process.wait(limit(20)) == 130
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once(shared_folder: Path, tmp_path: Path) -> None:
    """multiprocessing would import the script into each of the four children, where it would run again."""
    script = tmp_path / "mine.py"
    script.write_text(
        "import train\nfrom lockstep.signals import Interrupts\n"
        "print('the script runs', flush=True)\nprint('exit code', train.main(Interrupts()), flush=True)\n"
    )
    words = [f"data_folder={shared_folder}", "n_classes=7", f"weights_dir={tmp_path}", "devices=[cpu, cpu]"]
    result = subprocess.run(
        [sys.executable, script, *words, "n_epochs=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert result.stdout.count("the script runs") == 1, result.stdout
    assert result.stdout.endswith("exit code 0\n") and result.stderr == ""


@pytest.mark.slow
def test_the_screen_shows_what_is_not_the_default_and_the_file_all(program: Program) -> None:
    running = program.run("n_epochs=1", "learning_rate=0.003", "clip_norm=7", "print_freq=20")
    _, _, rest = running.output().partition("configuration, beside the defaults: ")
    shown, _, _ = rest.partition("all keys are in ")
    assert "learning_rate: 0.003" in shown and "clip_norm: 7" in shown and len(shown.splitlines()) < 10
    assert not any(f"{key}: " in shown for key in ("momentum", "snapshot_freq", "rand_mirror", "devices"))
    saved = yaml.safe_load((running.run_folder / "config.yaml").read_text())
    assert list(saved) == list(Config.__dataclass_fields__)


@pytest.mark.slow
def test_a_short_epoch_has_one_line_without_top_5_of_few_classes(program: Program, folder: Path) -> None:
    for path in (folder / "labels").glob("*_labels.npy"):
        np.save(path, np.load(path) % 3)
    running = program.run("n_epochs=2", f"data_folder={folder}", "n_classes=3", "print_freq=20")
    lines = [line for line in running.output().splitlines() if line.startswith("epoch")]
    number = r"\d+\.\d"
    pattern = rf"epoch \d: loss {number}+, error {number}+%; validation loss {number}+, error {number}+%"
    assert len(lines) == 2
    assert all(re.fullmatch(pattern + r"; [\d,]+ images/s", line) for line in lines), lines
    assert "top-5" not in running.output()
    assert [event["error_top5"] for event in events(running, "validated")] == [None, None]


@pytest.mark.parametrize("words", [(), ("rule=local", "rule_args={every: 2}")], ids=["weights", "local"])
@pytest.mark.slow
def test_the_line_of_a_short_epoch_is_of_all_its_steps(
    program: Program, shared_folder: Path, words: tuple[str, ...]
) -> None:
    last_step = len(np.load(shared_folder / "labels" / "train_labels.npy")) % 16
    steps = events(program.run("n_epochs=1", "print_freq=1", name="steps"), "progress")
    running = program.run("n_epochs=1", f"print_freq={len(steps) - 1}", *words, name="whole")
    [line] = events(running, "progress")
    assert line["step"] == line["n_steps"] == len(steps) > 3 and last_step
    if not words:
        sizes = [16] * (len(steps) - 1) + [last_step]
        for key in ("loss", "error"):
            assert line[key] == pytest.approx(np.average([step[key] for step in steps], weights=sizes))
        assert f"epoch 1: loss {line['loss']:.3f}, error {line['error']:.2%};" in running.output()


def test_lines_of_progress_fit_in_100_columns() -> None:
    seconds = {"load-wait": 55.0, "compute": 20.0, "barrier": 0.5, "exchange": 0.5}
    line = progress_line(Progress(150, 10000, 10000, 0.1, 1234.5, 0.9999, 1234567.0, 123.0, seconds))
    assert len(line) <= 100 and "99.99%" in line
    assert progress_line(Progress(1, 20, 90, 0.1, 1.0, 0.5, 400.0, 1.0, seconds)).endswith(", load-wait 72%")


@pytest.mark.parametrize("error", [0.1234, None], ids=["classes", "multilabel"])
def test_lines_of_validation_fit_in_100_columns(tmp_path: Path, error: float | None) -> None:
    means = {"mean_average_precision": 0.1234, "macro_f1": 0.1234, "micro_f1": 0.1234}
    validated = Validated(100, 1234.5, error, error, 50_000, 123.4, means=means)
    console = Console(tmp_path / "log.jsonl", make_config(n_epochs=100), 1000, True)
    line = console._epoch_line(validated)
    assert len(line) <= 100 and "12.34%" in line and "loss 1234.5" in line


@pytest.mark.parametrize(
    "ended", [ExitStatus(0), ExitStatus(1, "trainer 0 was killed")], ids=["done", "failed"]
)
def test_a_log_that_cannot_be_ended_is_named_in_the_last_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], ended: ExitStatus
) -> None:
    """Lines still wait then. A run that has failed for another reason names that."""
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    console = Console(tmp_path / "log.jsonl", Config(), 6, True)
    for number in range(1000):
        console.say(f"line {number}", "stderr")
    exit_status = console.log_ending(ended)
    assert exit_status.code == (ended.code or 2)
    assert console.close(console.last_line(exit_status), "stderr")
    reason = ended.message or f"{tmp_path}/log.jsonl: can't be written: No space left on device"
    assert capfd.readouterr().err.splitlines()[-2:] == ["line 999", f"lockstep: {reason}"]


def test_runs_without_a_name_that_start_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    runs = [open_run(Config(weights_dir=str(tmp_path)), 90) for _ in range(6)]
    assert len({run.folder for run in runs}) == 6
    assert any(run.folder.name.endswith("-2") for run in runs)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="weights_dir"):
        open_run(Config(weights_dir=str(tmp_path / "file")), 90)


@pytest.mark.parametrize("link", ["runs", "runs/mine"])
def test_a_link_that_leads_nowhere_is_not_said_to_be_another_run(tmp_path: Path, link: str) -> None:
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "not mounted")
    with pytest.raises(UserError, match="mine: can't be made: it, or a folder above it, is a link to"):
        open_run(Config(weights_dir=str(tmp_path / "runs"), run_name="mine"), 90)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"batch_size": 64}, {"batch_size": 16, "accumulate": 4}])
def test_a_step_larger_than_the_training_set_is_remarked_on(program: Program, keys: dict[str, int]) -> None:
    running = program.run("n_epochs=1", *(f"{key}={value}" for key, value in keys.items()))
    named = ", ".join(f"{key}: {value}" for key, value in keys.items())
    assert f"note: {named}: a step takes 128 images, the training set has 90" in running.output()


@pytest.mark.parametrize("n_saved", [0, 2])
@pytest.mark.parametrize("writes", [True, False])
def test_a_host_that_is_not_to_write_says_who_saved(tmp_path: Path, writes: bool, n_saved: int) -> None:
    (tmp_path / "checkpoints").mkdir()
    for number in range(n_saved):  # as host 0 has, of which another host hears nothing
        (tmp_path / "checkpoints" / f"epoch_000{number + 1}.json").touch()
    console = Console(tmp_path / "host1.jsonl", Config(), 6, writes)
    saved = "epoch_0002; resume_train=True resumes it" if n_saved else "nothing"
    expected = "saved nothing" if writes else f"host 0 saved {saved}"
    try:
        assert console.last_line(ExitStatus(130)) == f"lockstep: stopped as asked; {expected}"
    finally:
        assert console.close("", "stdout")


def test_printing_escapes_what_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    show("class \U0001f600, file caf\udce9", "stdout")
    escape_when_printing()
    print("\xe9")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"class \\U0001f600, file caf\\udce9\n\\xe9\n"
