"""benchmarks/gpu.sh: a rehearsal of all sections on the simulated driver, and sections that crash or hang."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import build
import pytest
import torch
from conftest import ROOT, make_config, wait_until
from limits import limit
from simulated import Simulation
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import harness, loading, lone, machine, report, roofline, table1, tests, turns
from benchmarks.gpu.harness import Outcome, Section
from benchmarks.gpu.record import Record
from benchmarks.gpu.section import NAMES, PARTS
from benchmarks.gpu.setting import REAL, REHEARSAL
from benchmarks.lone import NEVER
from benchmarks.lone import LoneTrainer as CpuTrainer
from models.alexnet import Model

SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def run_script(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=environment)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "LOOK_SECONDS", 0.2)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a rehearsal's results."""
    if build.toolkit() is None:
        pytest.skip("no CUDA toolkit here (nvcc with its headers, and g++) to build PyCUDA with")
    folder = tmp_path_factory.mktemp("rehearsal")
    done = run_script(str(folder), "--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def content_of(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


@pytest.mark.timeout(600)  # PyCUDA is built the first time
@pytest.mark.slow
def test_a_rehearsal_runs_all_sections(rehearsal: Path) -> None:
    content = content_of(rehearsal)
    assert {name: section["status"] for name, section in content["sections"].items()} == dict.fromkeys(
        NAMES, "ran"
    )
    figures = {name: section["figures"] for name, section in content["sections"].items()}
    assert {key: figures["tests"]["counts"][key] for key in ("passed", "failed", "skipped")} == {
        "passed": 2,
        "failed": 0,
        "skipped": 1,
    }
    steps = {"Lockstep bf16", "plain PyTorch, same network"}
    assert steps <= figures["alexnet"]["steps"].keys() == figures["alexnet"]["stages"].keys()
    assert figures["alexnet"]["profiles"].keys() == figures["alexnet"]["steps"].keys()
    assert figures["precisions"]["steps"].keys() == {"Lockstep fp32", "Lockstep tf32"}
    assert figures["tests2"]["counts"]["passed"] == 1
    assert figures["preflight"]["IPC events"]["records"] == 1000
    left = figures["preflight"]["/dev/shm after a kill"]
    assert left["while"] == left["after"] == left["removed"] and len(left["after"]) == 3
    rows = {"conv2, dense", "LRN 96 x 27 x 27: our kernel", "augment, forward: blocks for conv1"}
    rows |= {"augment, forward: resized crops", "augment, forward: resized crops, erased and mixed"}
    assert rows <= figures["layers"]["layers"].keys()
    assert len(figures["compiled"]["steps"]) == 4
    assert figures["loading"]["reader"].keys() == {f"{n} threads, images/s" for n in (1, 2, 4)}
    assert figures["loading"]["faster"] in figures["loading"]["cases"]
    assert figures["loading"]["cases"].keys() == loading._CASES.keys()
    assert figures["loading"]["peer"].keys() == {"DataLoader, 12 workers, pin_memory", "DALI"}
    assert len(figures["table1"]["runs"]) == 2
    assert len(figures["flow"]["steps"]) == 3 and len(figures["flow"]["images_per_second"]) == 2
    assert figures["flow"]["us an operation"].keys() >= {"eager torch", "replayed on one lane"}
    assert figures["flow"]["merging"].keys() >= {"beside backward", "at its end", "alone"}
    for place in ("one GPU", "two GPUs"):
        exchanges = figures["exchange"][f"exchanges on {place}"]
        assert exchanges["equals the mean"] == dict.fromkeys(
            ("peer to peer", "swap", "staged through host memory"), True
        )
    assert "gloo" in exchanges["ms"]
    assert figures["functions"]["calls"].keys() >= {"an empty function"}
    assert len(figures["functions"]["calls"]) == 6 and len(figures["functions"]["steps"]) == 2
    assert figures["hosts"]["sums of a group of one"]["ms"].keys() >= {"sum, bfloat16", "all-gather"}
    assert figures["hosts"]["two hosts, one GPU, gloo"]["from one host with two trainers, relative"] < 1e-4
    assert figures["hosts"]["two hosts, a GPU each, NCCL"] == "not rehearsed: there is no NCCL for CPUs"
    assert all(target["met"] is not None for target in content["targets"])


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_rehearsal_can_not_pass_for_a_measurement(rehearsal: Path) -> None:
    assert content_of(rehearsal)["rehearsal"] is True
    assert all(path.name.startswith("rehearsal-") for path in rehearsal.iterdir())
    (path,) = rehearsal.glob("*.md")
    assert path.read_text().startswith("# REHEARSAL on a simulated driver: no figure below means anything\n")
    refused = run_script("docs/results", "--rehearse")
    assert refused.returncode == 2 and "not in docs/results" in refused.stderr


KEEP = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu.record import Record
record = Record(Path(sys.argv[1]), float(sys.argv[2]))
record.keep("measured", 1)
print("what it said last", flush=True)
"""
CRASH = "os.kill(os.getpid(), 11)"
LEAVE = "sys.exit(0)"
FAIL = """
with record.attempt("a part"): raise ValueError("broken")
record.keep("measured", 2)
record.complete()
"""
# A child in its own session, whose parent is gone: nothing but its environment tells whose it is.
HANG = """
code = "import os, time; open(os.environ['PLACE'], 'w').write(str(os.getpid())); time.sleep(99)"
subprocess.Popen(f"{sys.executable} -c \\"{code}\\" & exit", shell=True, start_new_session=True).wait()
time.sleep(99)
"""


def make_section(name: str, code: str, limit: float = 30.0, least: float = 0.0) -> Section:
    return Section(name, (sys.executable, "-c", KEEP + code), limit, least)


def run_sections(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *sections: Section, seconds: float = 60.0
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(program, "_sections", lambda *_: list(sections))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = program.main([str(folder), "--seconds", str(seconds)])
    return code, content_of(folder)


def test_a_section_that_crashes_or_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = [make_section("crashes", CRASH), make_section("leaves", LEAVE), make_section("fails", FAIL)]
    sections.append(make_section("works", "record.complete()"))
    code, content = run_sections(tmp_path, monkeypatch, *sections)
    assert code == 1 and content["rehearsal"] is False
    found = content["sections"]
    assert [found[name]["status"] for name in found] == ["failed", "failed", "failed", "ran"]
    assert found["crashes"]["reason"] == "killed by SIGSEGV"
    assert found["leaves"]["reason"] == "it left before its end, and without an error"
    assert found["fails"]["reason"] == "failed in it: a part"
    assert found["fails"]["problems"] == {"a part": "ValueError: broken"}
    assert [section["figures"]["measured"] for section in found.values()] == [1, 1, 2, 1]
    assert found["crashes"]["last_lines"] == ["what it said last"]
    assert "ValueError: broken" in (tmp_path / f"gpu-{content['machine']['date']}.log").read_text()


@pytest.mark.slow
def test_a_section_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path / "pid"))
    begin = time.monotonic()
    sections = make_section("hangs", HANG, limit=3), make_section("works", "record.complete()")
    code, content = run_sections(tmp_path / "results", monkeypatch, *sections)
    assert code == 1 and time.monotonic() - begin < limit(20)
    assert content["sections"]["works"]["status"] == "ran"
    hung = content["sections"]["hangs"]
    assert (hung["status"], hung["reason"]) == ("failed", "still running after 3 s")
    assert hung["figures"] == {"measured": 1} and hung["last_lines"] == ["what it said last"]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), "its child to be gone", 5)


# Its imports take longer than the traceback comes before the end.
HANG_LATE = """
import sys, time, types
time.sleep(4)
from benchmarks.gpu import section
sys.modules["benchmarks.gpu.flow"] = types.SimpleNamespace(run=lambda *_: time.sleep(999))
sys.exit(section.main("flow", ".", "real", *sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_section_that_hangs_says_where(tmp_path: Path) -> None:
    section = Section("hangs", (sys.executable, "-c", HANG_LATE), limit(8), 0.0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    outcome = harness.run(section, section.limit, tmp_path, tmp_path / "log", environment)
    assert outcome.status == "failed" and any("in main" in line for line in outcome.last_lines)


def test_figures_are_on_disk_while_their_section_runs(tmp_path: Path) -> None:
    """The whole call may be killed, by a limit of its own: what was measured till then is kept."""
    seen = []
    section = make_section("slow", "time.sleep(1.5)\nrecord.complete()")
    outcome = harness.run(
        section, 30, tmp_path, tmp_path / "log", {**os.environ, "PYTHONPATH": str(ROOT)}, seen.append
    )
    assert outcome.status == "ran"
    assert seen[-1].figures == {"measured": 1} and seen[-1].reason == "still running"


def test_parts_hold_every_section_once_in_the_order_of_worth() -> None:
    assert program._read_words([]).only.split(",") == list(NAMES) == list(program._LIMITS)
    parts = [program._read_words(["--part", str(part)]).only.split(",") for part in PARTS]
    assert tuple(itertools.chain(*parts)) == NAMES and parts[0][:2] == ["preflight", "alexnet"]
    for names in parts:
        assert sum(program._LIMITS[name] for name in names) <= program.SECONDS, names


def test_a_section_for_which_there_is_no_time_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = make_section("first", "record.complete()"), make_section("long", LEAVE, least=40)
    code, content = run_sections(tmp_path, monkeypatch, *sections, seconds=30)
    assert code == 1
    assert [section["status"] for section in content["sections"].values()] == ["ran", "not run"]
    assert content["sections"]["long"]["reason"] == "out of time"
    (path,) = tmp_path.glob("*.md")
    assert "| long | not run: out of time | 0 |" in path.read_text()


def test_results_of_tests_are_counted_as_they_come(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest, os\n"
        "@pytest.fixture\ndef untidy():\n    yield\n    assert False, 'untidy'\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_untidy(untidy): pass\n"
        "def test_elsewhere(): pytest.skip('needs 2 GPUs')\n"
        "def test_crash(): os._exit(9)\n"
    )
    (tmp_path / "test_broken.py").write_text("import nowhere_to_be_found\n")
    reports = tmp_path / "reports"
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.reports"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**outer, "PYTHONPATH": str(ROOT), "TEST_REPORTS": str(reports)}
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 9
    counts = tests.count(reports)
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 3, 1)
    assert "assert 1 == 2" in counts["failures"]["test_some.py::test_bad"]
    assert "untidy" in counts["failures"]["test_some.py::test_untidy"]
    assert "nowhere_to_be_found" in counts["failures"]["test_broken.py"]
    assert counts["reasons"] == {"test_some.py::test_elsewhere": "Skipped: needs 2 GPUs"}


@pytest.mark.slow
def test_the_roofline_counts_what_the_network_does() -> None:
    with torch.device("meta"):
        model, images = Model(1000, "theano_alexnet"), torch.empty(256, 3, 227, 227)
    model.norm = torch.nn.Identity()  # counted by its bytes: it may be computed as a convolution, or not
    with FlopCounterMode(display=False) as forward:
        model(images)
    with FlopCounterMode(display=False) as first:  # its input needs no gradient
        model.conv1(images)
    counted = 3 * forward.get_total_flops() - first.get_total_flops()
    assert sum(2 * layer.macs * 256 * layer.n_products for layer in roofline.LAYERS) == counted
    assert round(roofline.images_per_second(), -3) == 129_000
    assert roofline.images_per_second(395e12, 4.3e12) < 0.7 * roofline.images_per_second()


def test_the_first_line_of_progress_does_not_count() -> None:
    def line(seconds: float) -> dict[str, Any]:
        phases = {"load-wait": 0.25 * seconds, "compute": 0.75 * seconds}
        rates = {"seconds_per_20": seconds, "images_per_second": 5120 / seconds}
        return {"event": "progress", "seconds": phases, **rates}

    lines = [{"event": "warning", "text": "exchange: swap"}, *map(line, (9.0, 1.0, 2.0, 3.0))]
    found = table1.read_log(lines)
    assert (found["seconds_per_20"], found["images_per_second"], found["lines"]) == (2.0, 2560.0, 3)
    assert found["shares"] == {"load-wait": 0.25, "compute": 0.75}
    assert found["notices"] == ["exchange: swap"]


def test_turns_keep_what_they_have_after_each_round() -> None:
    """A section that its limit ends has the rounds before."""
    seen: list[dict[str, dict[str, float]]] = []
    steps = {name: turns.Turn(lambda: None, lambda: time.sleep(1e-4)) for name in ("one", "two")}
    setting = replace(REHEARSAL, n_rounds=3)
    timed = turns.take_turns(steps, lambda: None, setting, seen.append)
    assert len(seen) == 3 and seen[-1] == timed
    assert seen[0].keys() == {"one", "two"} and seen[0]["one"]["ms"] > 0


def test_rates_of_loading_are_kept_and_reported_before_its_phases() -> None:
    """A section that its limit ends has rates of all cases: in its record, and in the tables."""
    timed = {"ms": 4.0}
    kinds = {f"a case: {kind}": timed for kind in ("resident", "loaded", "loader alone")}
    case = loading._rates("a case", {**kinds, "a case: loaded": {"ms": 8.0}}, REHEARSAL)
    assert case["share_of_resident"] == 0.5
    (table,) = report._TABLES["loading"]({"cases": {"a case": case}})
    assert "| a case | 2,000 | 1,000 | 50.0% |  | 2,000 |" in table
    targets = report.targets({"loading": {"figures": {"cases": {"a case": case}}}})
    assert [target["met"] for target in targets] == [None, None, False, None]


def test_a_dataloaders_rate_leaves_out_what_was_ready_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def batches(*_: object, **keys: Any) -> Iterator[tuple[torch.Tensor, int]]:
        """Some minibatches are ready at once; each further one takes a second."""
        for number in range(3 * keys["num_workers"] * keys["prefetch_factor"]):
            clock[0] += number >= keys["num_workers"] * keys["prefetch_factor"]
            yield torch.zeros(1), 0

    monkeypatch.setattr(torch.utils.data, "DataLoader", batches)
    monkeypatch.setattr(loading, "_Pictures", lambda *_: None)
    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert loading._peer(REHEARSAL, Path()) == REHEARSAL.batch_size


def test_the_update_stage_has_the_whole_update_in_bf16(shared_folder: Path) -> None:
    """In bf16 the code after torch's optimizer steps the weights, not the optimizer."""
    keys = {"precision": "bf16", "para_load": False, "data_folder": str(shared_folder), "print_freq": NEVER}
    trainer = CpuTrainer(make_config(batch_size=8, **keys))
    program, seen = trainer.trainer.program, []

    class Snapshot:
        def record(self, stream: object) -> None:
            seen.append([value.detach().clone() for value in program.model.parameters()])

        def time_since(self, other: object) -> float:
            return 0.0

        def synchronize(self) -> None:
            pass

    trainer.turn = lambda feed: turns.Turn(lambda: trainer.use(feed), trainer.step)
    trainer.driver, trainer.stream = SimpleNamespace(Event=Snapshot), None
    try:
        assert lone.LoneTrainer.stages(trainer).keys() == {"before", "forward", "backward", "update", "after"}
    finally:
        trainer.close()
    changed = [
        any(not torch.equal(*pair) for pair in zip(*step, strict=True))
        for step in itertools.pairwise(seen[:6])
    ]
    assert changed == [False, False, False, True, False]


def test_a_lone_trainer_sums_its_phases_over_the_ends_of_epochs(shared_folder: Path) -> None:
    """A line of progress at an epoch's end would set them to zero."""
    keys = {"para_load": False, "data_folder": str(shared_folder), "print_freq": NEVER}
    trainer = CpuTrainer(make_config(batch_size=10, **keys))
    try:
        n_steps = len(trainer.trainer.dataset.train) // 10 * 2 + 1
        for _ in range(n_steps):
            trainer.step()
        assert trainer.trainer.recorder.n_steps == n_steps
    finally:
        trainer.close()


def test_results_name_files_by_their_places_in_the_project(tmp_path: Path) -> None:
    run = program.Run(tmp_path, is_rehearsal=False, part="")
    trace = [f'  File "{Path(program.__file__).resolve()}", line 1, in main']
    run.write("layers", harness.Outcome("failed", problems={"a": trace[0]}, last_lines=trace))
    for suffix in (".json", ".md"):
        text = run.path(suffix).read_text()
        assert "benchmarks/gpu/__main__.py" in text
        assert str(Path(program.__file__).resolve().parents[2]) not in text


def test_tests_of_all_memory_in_use_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compare what the driver says is free, which counts other processes; and flow's tests run."""
    commands: list[list[str]] = []

    def note(words: list[str], *_: Any) -> int:
        commands.append(words)
        return 0

    monkeypatch.setattr(tests, "_pytest", note)
    record = Record(tmp_path / "record", 60)
    for run in (tests.run, tests.run_rest):
        run(REAL, tmp_path, record)
    for words in commands:
        asked = words[words.index("-k") + 1] if "-k" in words else ""
        everything = "exchange/test_conformance.py" in words or "kernels/test_gpu.py" in words
        if everything and "-n" in words:
            is_chosen = "trains_as_cpus and batch_size" in asked
            assert is_chosen or "not (memory_comes_back or nothing_leaks)" in asked
    single = [words for words in commands if "-n" not in words and tests._ALONE in words]
    assert [words[:2] for words in single] == [["kernels/test_gpu.py", "exchange/test_conformance.py"]]
    assert any("flow/test_flow_cuda.py" in words for words in commands)
    named = {word for words in commands for word in words if word.endswith(".py")}
    assert all((ROOT / "tests" / name).exists() for name in named)


@pytest.mark.slow
def test_the_first_tests_have_one_whole_training_run() -> None:
    """The others take longer than the section has."""
    file, *expression = tests._FIRST[1]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", f"tests/{file}"]
    done = subprocess.run([*command, *expression], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("test_a_gpu_trains_as_cpus_do") == 1, done.stdout + done.stderr


def test_targets_are_met_missed_or_not_measured() -> None:
    nothing = {"alexnet": {"figures": {}}}
    assert {target["met"] for target in report.targets(nothing)} == {None}
    steps = {
        "Lockstep bf16": {"images_per_second": 89_999},
        "Lockstep bf16, cuda_graph": {"images_per_second": 91_000},
    }
    cases = {"augment_on: trainer": {"share_of_resident": 0.979, "load_wait_share": 0.01}}
    kernel = {"the kernel on one GPU": {"kernel_share_of_copy": 0.69}}
    parts = {"alexnet": {"steps": steps}, "loading": {"cases": cases}, "exchange": kernel}
    found = report.targets({name: {"figures": figures} for name, figures in parts.items()})
    assert [target["met"] for target in found] == [True, False, False, True]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs that the script calls and no others, to be all of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "mkdir"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def test_what_is_missing_is_named(programs: Path) -> None:
    without = run_script(PATH=str(programs))
    assert without.returncode == 2 and "no program nvidia-smi, no library libcuda.so.1" in without.stderr
    assert "there is no GPU to measure; without one: --rehearse" in without.stderr
    smi = programs / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    assert "nvidia-smi fails" in run_script(PATH=str(programs)).stderr
    smi.write_text("#!/bin/sh\nexit 0\n")
    broken = programs / "pycuda"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no libcuda')")
    done = run_script(PATH=str(programs), PYTHONPATH=str(programs))
    assert done.returncode == 2 and "can't import PyCUDA: put the folder" in done.stderr
    assert "there is no no-python" in run_script(PYTHON="no-python").stderr


@pytest.mark.slow
def test_a_gpu_is_found_without_nvidia_smi(
    programs: Path, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's library finds it. The script ends where it finds that this torch has no CUDA."""
    (programs / "pycuda").mkdir()
    for name in ("__init__", "driver"):
        (programs / "pycuda" / f"{name}.py").touch()
    library, place = str(simulation.driver.parent), str(simulation.folder)
    variables = {"PATH": str(programs), "LD_LIBRARY_PATH": library, "CUDA_SIM_FOLDER": place}
    done = run_script(PYTHONPATH=str(programs), **variables)
    assert done.returncode == 2 and "torch sees no GPU" in done.stderr, done.stderr
    assert "simulated device 0, 0000:01:00.0" in done.stdout
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gpus = machine.gpus()
    assert [gpu["name"] for gpu in gpus] == ["simulated device 0", "simulated device 1"]
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert "no library libcuda.so.1" in machine.gpus()[0]["problem"]


@pytest.mark.slow
def test_an_unknown_section_is_named() -> None:
    done = run_script("--rehearse", "--only", "alexnet,everything")
    assert (
        done.returncode == 2 and "there is no section everything; there are preflight, alexnet" in done.stderr
    )


def test_an_outcome_without_figures_is_reported() -> None:
    section = Outcome("failed", "exit code 1", problems={"tests": "a|b"}, last_lines=["the end"]).__dict__
    run = {"rehearsal": False, "machine": {"date": "today", "gpus": []}, "sections": {"tests": section}}
    text = report.markdown({**run, "targets": report.targets(run["sections"])})
    assert "| tests | failed: exit code 1 | 0 |" in text and "the end" in text
