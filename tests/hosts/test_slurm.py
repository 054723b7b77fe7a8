"""The batch script of docs/hosts.md under a real Slurm: a controller and two nodes on this machine.

The test starts Slurm's daemons itself, with their files in a temporary folder and on free ports. It is
skipped where Slurm (Debian's slurm-wlm) or munge is not installed.
"""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from campaigns.watching import free_port
from conftest import ROOT, Program, wait_until
from limits import limit
from two_hosts import end_well, start, tensors_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
ReturnToService=2
FirstJobId={job}
KillWait=60
NodeName=node0 NodeHostname={name} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=node1 NodeHostname={name} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=all Nodes=node[0-1] Default=YES State=UP
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class Slurm:
    """A controller and two nodes. Every process of theirs has the configuration's path in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.configuration = folder, folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.configuration)}
        for name in ("munge", "state", "node0", "node1"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = dict(zip(("controller", "first", "second"), (free_port() for _ in range(3)), strict=True))
        settings = {"name": socket.gethostname().partition(".")[0], "user": getpass.getuser(), **ports}
        self.configuration.write_text(CONFIGURATION.format(folder=folder, job=_free_job(), **settings))

    def begin(self, stack: ExitStack) -> None:
        """Start the daemons, which end with the stack."""
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon(stack, "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        wait_until((munge / "socket").exists, "munged")
        self._daemon(stack, "slurmctld", "-D")
        for name in ("node0", "node1"):
            self._daemon(stack, "slurmd", "-D", "-N", name)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"], "two idle nodes")

    def _daemon(self, stack: ExitStack, name: str, *words: str) -> None:
        command = [shutil.which(name, path=PATH) or name, *words]
        with open(self.folder / "daemons.txt", "a") as output:
            process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        stack.callback(process.wait, limit(30))
        stack.callback(process.terminate)

    def run(self, *words: str) -> str:
        """Return the output of one of Slurm's commands, or '' if it fails."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, cwd=ROOT)
        return done.stdout if done.returncode == 0 else ""

    def state(self, job: str) -> str:
        """Return a job's state, such as RUNNING."""
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else ""

    def processes(self) -> list[int]:
        """Return all processes of the daemons and their jobs."""
        mark, found = f"SLURM_CONF={self.configuration}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                content = path.read_bytes()
            except OSError:  # it has exited, or is another user's
                continue
            if mark in content:
                found.append(int(path.parent.name))
        return found


def _free_job() -> int:
    """Return a job id by which the batch script finds a free port."""
    while True:
        number = 1 + secrets.randbelow(9999)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", 20000 + number))
            except OSError:
                continue
            return number


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"needs Slurm and munge; not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, ExitStack() as stack:
        slurm = Slurm(Path(folder))
        try:
            slurm.begin(stack)
            yield slurm
        finally:
            slurm.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser())
            slurm.run("scancel", "--user", getpass.getuser())
            wait_until(lambda: not slurm.run("squeue", "-h").strip(), "all jobs to be gone", 30)
            stack.close()
            wait_until(lambda: not slurm.processes(), "all of Slurm's processes to be gone", 20)


def batch_script() -> str:
    """Return the batch script that docs/hosts.md shows."""
    text = (ROOT / "docs" / "hosts.md").read_text()
    (script,) = re.findall(r"(?m)^    #!/bin/bash\n(?:^    .*\n|^\n(?=    ))+", text)
    return re.sub(r"(?m)^    ", "", script)


def test_a_job_is_stopped_requeued_and_ends_with_the_bits_of_the_unbroken_run(
    slurm: Slurm, program: Program
) -> None:
    keys = ("n_epochs=12", "snapshot_freq=12", "devices=[cpu]", "batch_size=8", "preempt_seconds=50")
    unbroken = start(program, *keys)
    end_well(unbroken)
    script, output = slurm.folder / "train.sbatch", slurm.folder / "output.txt"
    script.write_text(batch_script())
    words = (f"data_folder={program.data}", "n_classes=7", "shuffle_block=4", "cpu_threads=1")
    place = (f"weights_dir={program.place}/job", "run_name=run")
    slurm.environment["PYTHON"] = sys.executable
    command = ("sbatch", "--parsable", "-o", str(output), str(script), *keys, *words, *place)
    job = slurm.run(*command).strip()

    def wait_for(text: str, times: int = 1) -> None:
        wait_until(
            lambda: (
                (output.exists() and output.read_text().count(text) >= times) or slurm.state(job) == "FAILED"
            ),
            text,
            120,
        )
        assert output.read_text().count(text) >= times, output.read_text()

    wait_for("\nepoch 3: ")
    slurm.run("scancel", "--signal=TERM", job)
    wait_until(lambda: slurm.state(job) == "FAILED", "the job's end")
    text = output.read_text()
    assert text.count("lockstep: stopped as asked; saved ") == 1, text
    assert text.count("lockstep: stopped as asked; host 0 saved epoch_00") == 1 and "nothing" not in text
    slurm.run("scontrol", "requeue", job)
    wait_for("resuming from", 2)
    wait_for("\nepoch 7: ")
    slurm.run("scontrol", "requeue", job)
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the job to be complete", 120)
    text = output.read_text()
    assert text.count("resuming from") == 4 and text.count("\ndone: validation error") == 2, text
    checkpoint = Path(program.place, "job", "run", "checkpoints", "epoch_0012.safetensors")
    assert checkpoint.read_bytes() == tensors_of(unbroken[0])["epoch_0012.safetensors"]
