"""python -m lockstep.doctor: what it finds out about this machine, and GPUs on the simulated driver."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from limits import limit
from simulated import Simulation

from lockstep.backends import devices
from lockstep.comm.pipes import Pipe
from lockstep.doctor import links, machine, storage, uploads
from lockstep.doctor.report import Report
from lockstep.errors import UserError
from lockstep.exchange.proof import Pair
from lockstep.launch.ranks import run_ranks, try_ranks

DIVIDED = "0, GPU-a, 00000000:01:00.0, NVIDIA H200, 580.95.05, 143771, Enabled, Default"
LOADING = "Loading: images of 256 x 256 x 3 bytes a second"
PEERS = "Peer to peer, GB/s: who (row) reads and writes whose memory (column), proven bit for bit"


class Doctor:
    """Runs the doctor in its own folder."""

    def __init__(self, place: Path) -> None:
        self.place = place / "work"
        self.place.mkdir()
        self.environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # GPUs of this machine are not meant
        self.sections: dict[str, dict[str, str]] = {}

    def run(self, *words: str, code: int = 0) -> None:
        modules = f"{ROOT}:{self.environment.get('PYTHONPATH', '')}"
        environment = {**self.environment, "PYTHONPATH": modules}
        command = [sys.executable, "-m", "lockstep.doctor", *words]
        done = subprocess.run(
            command, cwd=self.place, env=environment, capture_output=True, text=True, timeout=limit(200)
        )
        assert done.returncode == code, done.stdout + done.stderr
        for line in done.stdout.splitlines():
            if not line.startswith(" "):
                section = self.sections.setdefault(line, {})
            else:
                section[line[2:30].strip()] = line[30:].strip()
        assert list(self.place.glob(".lockstep-doctor-*")) == []

    def wrong(self) -> set[str]:
        """The names of the lines that are marked."""
        pairs = [pair for section in self.sections.values() for pair in section.items()]
        return {name for name, text in pairs if text.startswith("WRONG: ")}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_is_stopped_in_good_order(tmp_path: Path, number: int, code: int) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "lockstep.doctor"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: list(tmp_path.glob(".lockstep-doctor-*/*")), "its temporary file")
        process.send_signal(number)
        _, errors = process.communicate(timeout=limit(60))
    assert process.returncode == code, errors
    assert "Traceback" not in errors and list(tmp_path.iterdir()) == []


def rates(section: dict[str, str]) -> dict[str, list[float]]:
    """The table of the last section: images a second of one loader and of all."""
    rows = {name: text.replace(",", "").split() for name, text in section.items()}
    return {name: list(map(float, row)) for name, row in rows.items() if all(map(str.isdigit, row))}


def check_expectation(section: dict[str, str], name: str, table: dict[str, list[float]]) -> None:
    """It is the least of the table, for one loader and for all."""
    found = re.findall(r"([\d,]+) with \w+(?: loader)? \(([^)]+)\)", section[name])
    least = [min(table, key=lambda row: table[row][i]) for i in (0, 1)]
    expected = [(table[row][i], row) for i, row in enumerate(least)]
    assert [(float(number.replace(",", "")), row) for number, row in found] == expected


@pytest.mark.slow
def test_without_a_gpu_all_else_is_measured(doctor: Doctor) -> None:
    doctor.run()
    assert [title for title in doctor.sections if title] == [
        "Software",
        "Machine",
        "Devices",
        "Files",
        LOADING,
        "If a trainer is slower than the others: the usual causes, by what progress lines name",
        "Nothing is wrong.",
    ]
    n_cores = devices.count_cores()
    assert f"{n_cores} of {os.cpu_count()} cores" in doctor.sections["Machine"]["processor"]
    cpus = ", ".join(["cpu"] * min(2, n_cores))
    assert doctor.sections["Devices"]["devices"].startswith(f"{cpus}; ")
    files = doctor.sections["Files"]
    assert files["files to read"].startswith(f"268 MB, a temporary file in {doctor.place}; file system ")
    speed = float(files["page cache"].removesuffix(" GB/s"))
    table = rates(doctor.sections[LOADING])
    assert min(map(min, table.values())) > 0
    assert table["read, crop, mirror, mean"][0] < table["page cache"][0]
    # measured by two processes, one after the other
    assert 1 / limit(10) < table["page cache"][0] / (speed * 1e9 / 256 / 256 / 3) < limit(10)
    check_expectation(doctor.sections[LOADING], "from the disk, then", table)
    del table["disk"]
    check_expectation(doctor.sections[LOADING], "from the page cache, then", table)


@pytest.mark.slow
def test_what_is_broken_or_given_wrongly_is_a_line_and_the_rest_goes_on(
    doctor: Doctor, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch_cpu.so: file too short')")
    doctor.environment["PYTHONPATH"] = str(tmp_path)
    (tmp_path / "my.yaml").write_text("learning_rat: 1\n")
    doctor.run("--config", str(tmp_path / "my.yaml"), code=1)
    assert doctor.wrong() == {"torch", "configuration", "loaders"}
    words = "can't be imported: libtorch_cpu.so: file too short: pip install -c constraints.txt"
    assert words in doctor.sections["Software"]["torch"]
    assert "unknown key 'learning_rat'" in doctor.sections["Software"]["configuration"]
    assert "libtorch_cpu.so: file too short" in doctor.sections["Files"]["loaders"]
    assert "GB/s" in doctor.sections["Files"]["page cache"]
    assert "3 wrong: see above" in doctor.sections


@pytest.mark.slow
def test_a_data_folder_that_is_not_there(doctor: Doctor, tmp_path: Path) -> None:
    doctor.run(str(tmp_path / "nowhere"), code=1)
    expected = f"WRONG: {tmp_path}/nowhere/train_hkl: there is no such folder of .hkl batches"
    assert doctor.sections["Files"] == {"files": expected}


# ---- files


def test_a_sample_is_the_first_batches_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LEAST_BYTES", 3000)
    monkeypatch.setattr(storage, "SAMPLE_BYTES", 4000)
    for number in range(3):
        (tmp_path / f"{number:04d}.hkl").write_bytes(bytes([number]) * 2500)
    with storage.open_sample(tmp_path, tmp_path / "nowhere") as sample:
        assert (sample.n_bytes, sample.text) == (4000, f"2 files of {tmp_path}")
        buffer = bytearray(1000)
        read = [bytes(buffer[:n_bytes]) for n_bytes in sample.read(memoryview(buffer))]
    assert [len(piece) for piece in read] == [1000, 1000, 500, 1000, 500]
    assert b"".join(read) == bytes([0]) * 2500 + bytes([1]) * 1500


@pytest.mark.slow
def test_too_small_a_dataset_is_replaced_by_a_temporary_file(tmp_path: Path) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    data.mkdir()
    scratch.mkdir()
    (data / "0000.hkl").write_bytes(bytes(500_000))
    with storage.open_sample(data, scratch) as sample:
        (path,) = sample.paths
        assert path.stat().st_size == sample.n_bytes == storage.SAMPLE_BYTES
        assert sample.text.endswith(f"{scratch}, because {data} holds only 0.5 MB of batches")
    assert list(scratch.iterdir()) == []


def test_a_disk_without_room_for_the_temporary_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # of a write: it names no file

    monkeypatch.setattr(storage, "_write", fail)
    text = f"{tmp_path}: a file of 268 MB can't be written there: No space left on device. "
    text += "Name a dataset folder of at least 17 MB to read from."
    with pytest.raises(UserError, match=re.escape(text)), storage.open_sample(None, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_runs_that_can_not_exist_has_a_parent_that_does(tmp_path: Path) -> None:
    assert machine.existing(tmp_path / ("x" * 300) / "runs") == tmp_path


def test_files_in_memory_have_no_disk(tmp_path: Path) -> None:
    place = Path("/dev/shm")
    if not place.is_dir() or storage.filesystem(place) != "tmpfs":
        pytest.skip("no tmpfs to write to")
    path = place / f"lockstep-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(1 << 20))
        disk, cached, lines = storage.measure(storage.Sample("a file", (path,), 1 << 20))
    finally:
        path.unlink()
    assert disk is None and cached.n_bytes == 1 << 20
    assert "none: tmpfs is memory" in [line.text for line in lines]


@pytest.mark.parametrize(
    ("kind", "disk", "doubt"),
    [
        ("ext4", 1.0, ""),
        ("ext4", 6.0, "as fast as memory"),
        ("overlay", 1.0, "overlay"),
        ("nfs4", 1.0, "whoever serves"),
        ("fuse.sshfs", 1.0, "whoever serves"),
    ],
)
def test_where_the_disks_figure_is_not_to_be_trusted(kind: str, disk: float, doubt: str) -> None:
    found = storage._doubt(kind, disk, 10.0)
    assert (doubt in found and "not to be trusted" in found) if doubt else not found


# ---- processes that end badly


def end_in_some_way(rank: int, pipes: dict[int, Pipe]) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise UserError("cuda:2 has no memory left")
    if rank == 3:
        raise KeyError("cuda:3")
    return rank


def wait_for_ever(rank: int, pipes: dict[int, Pipe]) -> None:
    time.sleep(1000)


@pytest.mark.slow
def test_how_each_rank_ended_is_told() -> None:
    outcomes = try_ranks(end_in_some_way, 4, seconds=limit(60))
    assert [outcome.value for outcome in outcomes] == [0, None, None, None]
    assert [outcome.problem for outcome in outcomes] == [
        "",
        "was killed by signal 9 before it gave a result",
        "cuda:2 has no memory left",
        "KeyError: 'cuda:3'",
    ]
    assert "end_in_some_way" in outcomes[3].traceback
    (outcome,) = try_ranks(wait_for_ever, 1, seconds=1)
    assert outcome.problem == "gave no result in time"


@pytest.mark.new_interpreter
@pytest.mark.slow
def test_ctrl_c_to_the_whole_group_does_not_interrupt_what_a_fork_server_imports() -> None:
    code = "import os, signal; import lockstep.launch.preload; os.kill(os.getpid(), signal.SIGINT)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=limit(60), check=True)


@pytest.mark.slow
def test_a_rank_that_ends_without_a_result_is_named_before_others() -> None:
    with pytest.raises(EOFError, match="rank 1 was killed by signal 9"):
        run_ranks(end_in_some_way, 3)


# ---- devices


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what nvidia-smi answers in this process."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def answer(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return answer


def test_a_gpu_that_a_run_can_not_use_is_wrong_unless_it_is_hidden(
    gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(DIVIDED)
    found, lines = machine.find_gpus()
    text = "NVIDIA H200, 0000:01:00.0, GPU-a, 140.4 GiB, MIG on, driver 580.95.05"
    assert [(line.name, line.text, line.wrong) for line in lines] == [("GPU 0", text, False)]
    chosen, lines = machine.choose_devices((), found)
    assert set(chosen) == {"cpu"} and [line.wrong for line in lines] == [True]
    assert "is in MIG mode" in lines[0].text and "nvidia-smi -i 0 -mig 0" in lines[0].text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0f3a")
    assert machine.choose_devices((), found)[1][0].wrong
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not machine.choose_devices((), found)[1][0].wrong
    assert machine.choose_devices(("gpu0",), found)[1][0].wrong  # asked for by name
    chosen, lines = machine.choose_devices(("cpu",), found)
    assert chosen == ("cpu",) and not lines[0].wrong


def test_a_driver_that_shows_no_gpu_is_wrong_and_none_at_all_is_not(
    gpus: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("No devices were found")
    found, lines = machine.find_gpus()
    assert found == [] and lines[0].wrong and "No devices were found" in lines[0].text
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(line.text, line.wrong) for line in machine.find_gpus()[1]] == [
        ("none: there is no NVIDIA driver here (no program nvidia-smi, no library libcuda.so.1)", False)
    ]


def test_pairs_that_the_driver_denies_are_not_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    pairs = [Pair(0, 1, 0.0, "cuda:0 can't access 0000:02:00.0")]
    links._show_pairs(report, ("cuda:0", "cuda:1"), pairs)
    assert report.n_wrong == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [["0", "1"], ["0:", "cuda:0", "-", "denied"], ["1:", "cuda:1", "?", "-"]]
    assert " ".join(lines[3]).endswith("can't access 0000:02:00.0; runs go through host memory")


def test_what_to_set_upload_to_is_what_was_faster() -> None:
    def advice(trainer: float, loader: float | None) -> list[str]:
        return [line.text for line in uploads.describe(uploads.Times(0.04, 0.03, trainer, loader, "no IPC"))]

    assert advice(0.06, 0.04)[1:] == [
        "40.0 ms for 40.0 ms of kernels and 30.0 ms of copies",
        "loader, which is 1.50 times as fast",
    ]
    for trainer, loader in ((0.041, 0.04), (0.04, 0.06)):
        assert advice(trainer, loader)[-1] == "auto, which is trainer: loader is no faster"
    assert advice(0.04, None)[1:] == ["does not work here: no IPC", "auto, which is trainer"]


# ---- the whole program on the simulated driver


@pytest.mark.timeout(600)  # PyCUDA is built the first time
@pytest.mark.slow
def test_two_gpus(doctor: Doctor, simulation: Simulation) -> None:
    doctor.environment = simulation.set(proof_bytes=1 << 20).environment()
    doctor.run()
    assert doctor.wrong() == set() and "Nothing is wrong." in doctor.sections
    expected = "simulated device 1, 0000:02:00.0, GPU-1, 1.0 GiB, MIG off, driver 580"
    assert doctor.sections["Devices"]["GPU 1"] == expected
    assert doctor.sections["Devices"]["devices"].startswith("cuda:0, cuda:1; all visible GPUs")
    second = doctor.sections["Device cuda:1"]
    assert second["device"].startswith("simulated device 1, 0000:02:00.0, compute capability 9.0, 1.0 of 1.0")
    assert (
        second["kernels"]
        == "augment and dropout and fold and lrn and pool and sgd compiled for sm_90 and loaded"
    )
    assert second["torch"] == "computes in PyCUDA's memory and stream"
    assert re.fullmatch(
        r"[\d.]+ GB/s from .*\([\d.]+ while .*, [\d.]+ back .*, [\d.]+ on .*", second["copies"]
    )
    peers = doctor.sections[PEERS]
    (diagonal, up), (down, other) = (peers[row].split() for row in ("0: cuda:0", "1: cuda:1"))
    assert diagonal == other == "-" and float(up) > 0 and float(down) > 0
    for kind in ("peer to peer", "staged through host memory"):
        assert re.fullmatch(r"16 MiB of each trainer averaged in [\d.]+ ms", peers[kind])
    copying = doctor.sections["Copies to cuda:0 beside kernels of its trainer"]
    for way in ("upload: trainer", "upload: loader"):
        assert re.fullmatch(r"[\d.]+ ms for [\d.]+ ms of kernels and [\d.]+ ms of copies", copying[way])
    assert copying["set upload to"].startswith(("auto, which is trainer", "loader, which is"))
    table = rates(doctor.sections[LOADING])
    assert set(table) == {"disk", "page cache", "copy to the GPU"}
    check_expectation(doctor.sections[LOADING], "from the disk, then", table)
    assert list(simulation.folder.glob("memory-*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_writes_that_are_lost_show_in_the_matrix(doctor: Doctor, simulation: Simulation) -> None:
    doctor.environment = simulation.set(lost="1-0", proof_bytes=1 << 20).environment()
    doctor.run(code=1)
    peers = doctor.sections[PEERS]
    assert float(peers["0: cuda:0"].split()[1]) > 0
    assert peers["1: cuda:1"].split() == ["WRONG", "-"]
    assert "averaged by trainer 1 with memory of trainer 0, 0 were wrong on its own side" in peers["1 -> 0"]
    assert "peer to peer" not in peers and "averaged in" in peers["staged through host memory"]
    assert doctor.wrong() == {"1 -> 0"} and "1 wrong: see above" in doctor.sections


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_one_gpu_is_proven_with_two_processes(doctor: Doctor, simulation: Simulation) -> None:
    doctor.environment = simulation.set(devices=1, lockable=1000, proof_bytes=1 << 20).environment()
    doctor.run()
    peers = doctor.sections[PEERS]
    assert peers["note"].startswith("two processes on the one GPU")
    assert float(peers["0: cuda:0"].split()[1]) > 0 and float(peers["1: cuda:0"].split()[0]) > 0
    assert "while all devices copy" not in doctor.sections["Device cuda:0"]["copies"]
    # what a run would not use may fail
    assert "can't be page-locked" in peers["staged through host memory"] and doctor.wrong() == set()


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_crash_on_a_gpu_is_told_and_the_rest_goes_on(
    doctor: Doctor, simulation: Simulation, tmp_path: Path
) -> None:
    source, library = tmp_path / "crash.c", tmp_path / "crash.so"
    source.write_text("#include <signal.h>\nint launch_kernel(void) { return raise(SIGKILL); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    doctor.environment = replace(simulation, kernels=library).environment()
    doctor.run(code=1)
    assert doctor.wrong() == {"0: cuda:0", "1: cuda:1"}
    assert "was killed by signal 9 before it gave a result" in doctor.sections[PEERS]["0: cuda:0"]
    assert "GB/s" in doctor.sections["Device cuda:1"]["copies"]
    assert "copy to the GPU" in doctor.sections[LOADING]
