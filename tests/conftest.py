"""Fixtures for all tests: dataset folders, train.py as a process, the simulated driver, markers for GPUs."""

import os

# Idle OpenMP threads wait without spinning: on cores that several tests share, spinning takes most of the
# time. This comes before the first import of torch; xdist's workers and all programs inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import functools
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
import limits
import numpy as np
import pytest
from campaigns.watching import processes_of_session
from forked_programs import ForkedProgram, forked, server
from limits import limit
from simulated import Simulation

from lockstep.api import commands
from lockstep.config import Config, Layer, resolve
from lockstep.data import hkl

ROOT = Path(__file__).resolve().parent.parent
SIZE = 36  # smallnet's 32 and a margin to crop from
BUILD_SECONDS = 600  # for a test that may be the first to build PyCUDA


def make_folder(folder: Path, n_train: int = 90, n_val: int = 33, size: int = SIZE) -> Path:
    """Write a dataset folder of random images without a manifest; the last file of each split is shorter."""
    random, rows, n_classes = np.random.default_rng(1), 32, 7
    for split, n_images in (("train", n_train), ("val", n_val)):
        (folder / f"{split}_hkl").mkdir(parents=True)
        for number, first in enumerate(range(0, n_images, rows)):
            shape = (min(rows, n_images - first), size, size, 3)
            images = random.integers(0, 256, shape, dtype=np.uint8)
            hkl.write(folder / f"{split}_hkl" / f"{number:04d}.hkl", images)
        (folder / "labels").mkdir(exist_ok=True)
        np.save(folder / "labels" / f"{split}_labels.npy", random.integers(0, n_classes, n_images))
    (folder / "misc").mkdir()
    np.save(folder / "misc" / "img_mean.npy", random.uniform(100, 150, (size, size, 3)))
    return folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset folder for tests that only read it."""
    return make_folder(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a dataset folder for tests that change it."""
    return make_folder(tmp_path / "set")


def make_config(**values: object) -> Config:
    return resolve([Layer("test", {"n_classes": 7, "devices": ["cpu"], **values})])[0]


@dataclass
class Running:
    """A running train.py. It has its own session, which identifies all of its processes."""

    process: "subprocess.Popen[str] | ForkedProgram"
    run_folder: Path
    output_file: Path
    log: str = "log.jsonl"

    def wait(self, seconds: float = 60) -> int:
        """Wait for the exit status. The time limit applies to an idle machine and is scaled on others."""
        return self.process.wait(limit(seconds))

    def output(self) -> str:
        return self.output_file.read_text()

    def last_line(self) -> str:
        return self.output().rstrip().splitlines()[-1]

    def pids(self) -> dict[str, int]:
        """Return the process ids of trainers and loaders, once the launcher has logged them."""
        log = self.run_folder / self.log
        wait_until(lambda: log.exists() and "started" in log.read_text(), "the processes to be started")
        events = [json.loads(line) for line in log.read_text().splitlines()]
        started = [event for event in events if event["event"] == "started"][-1]
        return {name: pid for name, pid in started.items() if name.startswith(("trainer", "loader"))}

    def children(self) -> set[int]:
        """Return the process ids of the launcher's children."""
        pid = self.process.pid
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def wait_for_text(self, text: str) -> None:
        wait_until(lambda: text in self.output() or self.process.poll() is not None, f"{text!r}")
        assert text in self.output(), self.output()

    def assert_nothing_left(self) -> None:
        """Assert that no process is left. Python's resource tracker exits shortly after the launcher."""
        wait_until(lambda: self.leftovers() == [], "all processes of the run to be gone", 5)

    def leftovers(self) -> list[int]:
        """Return the processes of its session that still run."""
        return processes_of_session(self.process.pid)

    def shared_files(self) -> list[str]:
        """Return CUDA's files for events of its trainers and loaders; their names contain the process id."""
        pids = {f"{pid:x}" for pid in self.pids().values()}
        return [path.name for path in Path("/dev/shm").glob("cuda.shm.*") if path.name.split(".")[3] in pids]


def named_memory() -> set[str]:
    """Return the names in /dev/shm, without those that libraries in concurrent tests use.

    They are events of simulated GPUs and semaphores of multiprocessing.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("cuda.shm.", "sem.mp-"))}


def _start(
    words: Sequence[str], output_file: Path, environment: Mapping[str, str], through: Sequence[str]
) -> "subprocess.Popen[str]":
    """Start train.py in a new interpreter."""
    with open(output_file, "w") as output:
        return subprocess.Popen(
            [*through, sys.executable, str(ROOT / "train.py"), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=ROOT,
            env=environment,
        )


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until the condition holds. The time limit applies to an idle machine."""
    seconds = limit(seconds)
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def goes_wrong(once: Callable[[], bool]) -> bool:
    """Return whether one of several attempts fails; a random pause or a busy core may hide an error once."""
    return any(once() for _ in range(8))


class Program:
    """Starts train.py on a dataset folder; its run folders are temporary.

    Args:
        forks: Whether launchers are forks where these can stand for them.
    """

    def __init__(self, data: Path, place: Path, forks: bool = True) -> None:
        self.data, self.place, self._forks = data, place, forks
        self.started: list[Running] = []

    def start(
        self,
        *words: str,
        name: str = "run",
        devices: str = "[cpu, cpu]",
        environment: dict[str, str] | None = None,
        through: tuple[str, ...] = (),
    ) -> Running:
        """Start the program.

        Args:
            through: A command that executes the program, such as nohup.
        """
        output_file = self.place / f"output{len(self.started)}.txt"
        keys = {
            "data_folder": self.data,
            "weights_dir": self.place / "runs",
            "run_name": name,
            "devices": devices,
            "n_classes": 7,
            "batch_size": 8,
            "shuffle_block": 4,
            "print_freq": 2,
        }
        given = {word.partition("=")[0] for word in words}
        defaults = [f"{key}={value}" for key, value in keys.items() if key not in given]
        words = (*words, *defaults)
        environment = dict(os.environ) if environment is None else environment
        process: subprocess.Popen[str] | ForkedProgram | None = None
        if self._forks and not through:
            process = server().start([str(ROOT / "train.py"), *words], output_file, environment)
        process = process or _start(words, output_file, environment, through)
        running = Running(process, self.place / "runs" / name, output_file)
        self.started.append(running)
        return running

    def run(self, *words: str, code: int = 0, **options: Any) -> Running:
        running = self.start(*words, **options)
        assert running.wait() == code, running.output()
        return running


@pytest.fixture
def program(request: pytest.FixtureRequest, shared_folder: Path, tmp_path: Path) -> Iterator[Program]:
    """Return train.py in forks, or in new interpreters in a test that is marked `new_interpreter`."""
    is_new = request.node.get_closest_marker("new_interpreter")
    program = Program(shared_folder, tmp_path, forks=not is_new)
    yield program
    for running in program.started:
        for pid in running.leftovers():
            os.kill(pid, 9)
        running.wait(10)


@pytest.fixture
def forked_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have lockstep.train and lockstep.resume start forks, but in tests that are marked `new_interpreter`."""
    if not request.node.get_closest_marker("new_interpreter"):
        usual = commands.lockstep_command
        monkeypatch.setattr(commands, "lockstep_command", lambda words: forked(usual(words)))


@pytest.fixture(scope="session")
def parts() -> tuple[Path, Path, Path]:
    """Return PyCUDA, the simulated driver and the kernels for the host, built on first use."""
    toolkit = build.toolkit()
    if toolkit is None:
        pytest.skip("no CUDA toolkit here (nvcc with its headers, and g++) to build PyCUDA with")
    site = build.build_pycuda(toolkit)
    return site, build.build_driver(toolkit, build.names_needed(site)), build.build_kernels()


@pytest.fixture
def simulation(parts: tuple[Path, Path, Path], tmp_path: Path) -> Simulation:
    folder = tmp_path / "devices"
    folder.mkdir()
    return Simulation(*parts, folder, {})


@pytest.fixture
def torchvision() -> Any:
    """Return torchvision, which some tests compare with, or skip the test."""
    try:
        return importlib.import_module("torchvision")
    except Exception as error:  # not installed, or built for another torch
        pytest.skip(f"torchvision can't be imported: {error}")


@functools.cache
def missing_for_gpus(n_gpus: int) -> str:
    """Return why a test that needs this many real GPUs cannot run here, or ''."""
    import torch

    if torch.cuda.device_count() < n_gpus:
        return f"needs {n_gpus} NVIDIA GPU(s), here are {torch.cuda.device_count()}"
    return "" if importlib.util.find_spec("pycuda") else "needs PyCUDA"


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs inherit Ctrl-C as ignored; programs whose Ctrl-C is tested must not.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    limits.measure(len(config.getoption("tx", [])))
    if importlib.util.find_spec("hypothesis"):  # it may be missing where only GPU tests run
        from hypothesis import HealthCheck, settings

        # The duration of an example depends on the machine. CI draws the same examples every time, so that
        # a failure there is caused by the change.
        settings.register_profile(
            "lockstep",
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize="CI" in os.environ,
        )
        settings.load_profile("lockstep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scale the time limit of every test (pytest-timeout) like all other limits."""
    if not config.pluginmanager.hasplugin("timeout"):
        return
    usual = config.getoption("timeout") or float(config.getini("timeout"))
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark else usual
        if "parts" in getattr(item, "fixturenames", ()):
            seconds = max(seconds, BUILD_SECONDS)
        seconds = limit(seconds)
        item.add_marker(pytest.mark.timeout(seconds), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked `gpu` or `multigpu(n)` on a machine with fewer GPUs."""
    needed = [1 for _ in item.iter_markers("gpu")]
    needed += [mark.args[0] for mark in item.iter_markers("multigpu")]
    if needed and missing_for_gpus(max(needed)):
        pytest.skip(missing_for_gpus(max(needed)))


@pytest.fixture(autouse=True)
def ordinary_torch() -> Iterator[None]:
    """The same random values in every run; back ends of CPUs change the tests' own process, too."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_deterministic_debug_mode("default")
