"""Launchers that torchrun starts, one on each host: its variables, and its restarts."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, Program, Running, wait_until
from saved import assert_same, tensors
from two_hosts import free_port

from lockstep.config.hosts import torchrun_keys
from lockstep.errors import UserError

VARIABLES = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_its_variables_say_how_many_hosts_there_are_which_this_is_and_where_they_meet() -> None:
    assert torchrun_keys(VARIABLES, {}) == {"n_hosts": 2, "host_rank": 1, "rendezvous": "10.0.0.1:29500"}
    assert torchrun_keys({**VARIABLES, "WORLD_SIZE": "1", "RANK": "0"}, {}) == {"n_hosts": 1}
    assert torchrun_keys({"RANK": "1", "WORLD_SIZE": "2"}, {}) == {}


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, {}, "give it --nproc-per-node=1"),
        ({"RANK": "one"}, {}, "its variables can't be used"),
        ({}, {"n_hosts": 2}, "n_hosts: torchrun says it"),
    ],
)
def test_what_it_says_that_cant_be_is_refused(
    variables: dict[str, str], given: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        torchrun_keys({**VARIABLES, **variables}, given)


def test_several_launchers_on_a_host_are_refused(program: Program) -> None:
    environment = {**os.environ, **VARIABLES, "LOCAL_WORLD_SIZE": "2"}
    running = program.run("n_epochs=1", code=2, environment=environment)
    assert "torchrun: starts 2 launchers on this host: give it --nproc-per-node=1" in running.last_line()


def test_keys_of_several_hosts_do_not_end_a_run_of_which_one_host_is_left(program: Program) -> None:
    environment = {**os.environ, **VARIABLES, "WORLD_SIZE": "1", "RANK": "0"}
    keys = ("network=gloo", "network_dtype=bfloat16", "host_address=127.0.0.1", "resume_train=auto")
    for n_epochs in (1, 2):  # the second one resumes
        program.run(f"n_epochs={n_epochs}", "devices=[cpu]", *keys, environment=environment)


class Torchrun:
    """torchrun on what counts as several hosts, each with its own weights_dir."""

    def __init__(self, program: Program, n_hosts: str, *words: str, restarts: int = 0) -> None:
        self.program, self.n_hosts, self.words, self.restarts = program, n_hosts, words, restarts
        self.port = free_port()

    def start(self, folder: str) -> Running:
        """The torchrun of one host."""
        place, output = self.program.place / folder, self.program.place / f"{folder}.txt"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=run"]
        nodes = [f"--nnodes={self.n_hosts}", "--nproc-per-node=1", f"--max-restarts={self.restarts}"]
        quick = ["--monitor-interval=0.1", "--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=10"]
        keys = {
            "data_folder": self.program.data,
            "weights_dir": place,
            "run_name": "run",
            "devices": "[cpu]",
            "n_classes": 7,
            "shuffle_block": 4,
            "print_freq": 2,
            "cpu_threads": 1,
        }
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *nodes,
            *rendezvous,
            *quick,
            str(ROOT / "train.py"),
        ]
        command += [*self.words, *(f"{key}={value}" for key, value in keys.items())]
        with open(output, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT, text=True
            )
        running = Running(process, place / "run", output)
        self.program.started.append(running)
        wait_until(self._is_there, "the first torchrun, which has the store")
        return running

    def _is_there(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def launcher_of(running: Running) -> int:
    """The process that torchrun has started there."""
    found = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if is_child(path, running.process.pid)
    ]
    assert len(found) == 1
    return found[0]


def is_child(stat: Path, parent: int) -> bool:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:  # gone since
        return False


@pytest.fixture
def tidy(program: Program):
    """End torchrun's children, which have no session to find them by, by the folder in their command."""
    yield
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone since
            if str(program.place).encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_after_a_kill_it_starts_all_hosts_again_and_they_go_on(program: Program) -> None:
    words = ("n_epochs=60", "snapshot_freq=1", "resume_train=auto", "batch_size=8")
    torchrun = Torchrun(program, "2", *words, restarts=1)
    running = [torchrun.start(folder) for folder in ("a", "b")]
    for each in running:
        wait_until((each.run_folder / "checkpoints" / "epoch_0002.json").exists, "a checkpoint", 90)
    os.kill(launcher_of(running[1]), signal.SIGKILL)
    for each in running:
        assert each.wait(120) == 0, "\n".join(one.output() for one in running)
        assert "resuming from" in each.output()
    assert_same(tensors(running[0], 60), tensors(running[1], 60))


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_with_a_host_less_the_same_training_goes_on(program: Program) -> None:
    words = ("n_epochs=30", "snapshot_freq=1", "resume_train=auto", "global_batch_size=16", "logical_ranks=2")
    torchrun = Torchrun(program, "1:2", *words, restarts=2)
    running = [torchrun.start(folder) for folder in ("a", "b")]
    for each in running:
        wait_until((each.run_folder / "checkpoints" / "epoch_0002.json").exists, "a checkpoint", 90)
    launcher = launcher_of(running[1])
    running[1].process.kill()  # first, so that it can't start another
    os.kill(launcher, signal.SIGKILL)
    assert running[0].wait(180) == 0, running[0].output()
    unbroken = program.run(
        "n_epochs=30",
        "global_batch_size=16",
        "logical_ranks=2",
        "cpu_threads=1",
        name="unbroken",
        devices="[cpu]",
    )
    assert_same(tensors(running[0], 30), tensors(unbroken, 30))
