"""The devices that a run gets, and the messages if it cannot have them. `nvidia-smi` is a script here."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Program, make_config, wait_until
from hypothesis import given
from hypothesis import strategies as st
from limits import limit
from simulated import Simulation

from lockstep.backends import devices, gpus
from lockstep.backends.gpus import read_listing, visible
from lockstep.errors import UserError
from lockstep.launch import commandline

H200 = "0, GPU-ab120000-1111, 00000000:18:00.0, NVIDIA H200, 570.86.15, 143771, Disabled, Default"
SECOND = "1, GPU-ab340000-2222, 00000000:2A:00.0, NVIDIA H200, 570.86.15, 143771, Disabled, Default"
RTX = "2, GPU-cd560000-3333, 00000001:41:00.0, NVIDIA GeForce RTX 4090, 570.86.15, 24564, [N/A], Default"
MIG = "1, GPU-ab340000-2222, 00000000:2A:00.0, NVIDIA H200, 570.86.15, 143771, Enabled, Default"
THREE = f"{H200}\n{SECOND}\n{RTX}\n"


class Driver:
    """A stand-in for the driver: a folder with a program `nvidia-smi`, first on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, script: str) -> None:
        program = self.folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def answer(self, text: str, code: int = 0) -> None:
        (self.folder / "answer").write_text(text)
        self.run(f'echo "$@" > {self.folder}/asked; cat {self.folder}/answer; exit {code}')


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return a working driver with two GPUs; other settings are cleared."""
    driver = Driver(tmp_path / "bin")
    driver.folder.mkdir()
    driver.answer(f"{H200}\n{SECOND}\n")
    monkeypatch.setenv("PATH", f"{driver.folder}:/usr/bin:/bin")
    for name in (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "KERNEL_VERSION", tmp_path / "version")
    devices.KERNEL_VERSION.write_text("Linux version 6.8.0-45-generic (buildd@lcy02) (x86_64-linux-gnu-gcc)")
    monkeypatch.setattr(devices, "WINDOWS_GPU", tmp_path / "dxg")
    monkeypatch.setattr(devices, "find_spec", lambda name: name)
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0")
    return driver


def test_devices_are_described_for_the_record(driver: Driver) -> None:
    assert devices.describe(("cuda:0", "cuda:1")) == dict.fromkeys(
        ("cuda:0", "cuda:1"), "NVIDIA H200, driver 570.86.15"
    )
    (model,) = devices.describe(("cpu", "cpu")).values()
    assert model


@pytest.mark.parametrize(
    ("names", "n_cores", "n_readers"),
    [(("cpu", "cpu"), 64, 1), (("cuda:0",), 2, 1), (("cuda:0",), 4, 3), (("cuda:0", "cuda:1"), 64, 4)],
)
def test_loaders_read_with_several_threads_where_gpus_have_cores_to_spare(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], n_cores: int, n_readers: int
) -> None:
    monkeypatch.setattr(devices, "count_cores", lambda: n_cores)
    assert devices.count_readers(names) == n_readers


def refusal(*names: str) -> str:
    with pytest.raises(UserError) as caught:
        devices.check(names)
    text = str(caught.value)
    assert "\n" not in text and text.endswith("; to train on the CPU: --spec spec_cpu.yaml")
    return text


def reason_for_the_cpu() -> str:
    chosen, reason = devices.choose()
    assert set(chosen) == {"cpu"} and reason.endswith("; training on the CPU") and "\n" not in reason
    return reason


def test_all_visible_gpus_are_chosen_and_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.answer(THREE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    chosen, reason = devices.choose()
    assert chosen == ("cuda:0", "cuda:1")
    assert reason == (
        "all visible GPUs, with driver 570.86.15: cuda:0 (NVIDIA GeForce RTX 4090, 0001:41:00.0), "
        "cuda:1 (NVIDIA H200, 0000:18:00.0)"
    )
    devices.check(chosen)
    devices.check(("cpu", "cpu"))
    asked = (driver.folder / "asked").read_text().split()
    fields = "index,uuid,pci.bus_id,name,driver_version,memory.total,mig.mode.current,compute_mode"
    assert asked == [f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def test_the_listing_is_read_with_what_the_driver_does_not_know() -> None:
    unified = "0, GPU-1, 0000000F:01:00.0, NVIDIA GB10, 580.1, [N/A], [N/A], Default"
    (gpu,) = read_listing(f"\n{unified}\n")
    assert (gpu.uuid, gpu.pci_bus_id, gpu.name) == ("GPU-1", "000F:01:00.0", "NVIDIA GB10")
    assert (gpu.driver, gpu.memory_mib, gpu.mig) == ("580.1", None, False)
    assert [gpu.mig for gpu in read_listing(f"{H200}\n{MIG}")] == [False, True]
    assert read_listing(H200)[0].memory_mib == 143771


@given(st.text() | st.lists(st.sampled_from([*H200.split(","), "[N/A]", "", ":"])).map(",".join))
def test_any_answer_is_read_or_refused_by_name(text: str) -> None:
    try:
        found = read_listing(text)
    except UserError as error:
        assert "nvidia-smi's answer is not a list of working GPUs" in str(error)
    else:
        assert len(found) == sum(bool(line.strip()) for line in text.splitlines())


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("0,3,1", [0]),
        ("0,x,1", [0]),
        ("GPU-cd,GPU-ab12", [2, 0]),
        ("GPU-ab340000-2222,0", [1, 0]),
        ("0,GPU-ab,1", [0]),  # two begin so
        ("GPU-ff", []),
        ("0,0", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(setting: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(read_listing(THREE), setting)] == indices


@given(st.lists(st.sampled_from(["0", "1", "2", "3", "-1", "GPU-ab", "GPU-cd", ""]) | st.text("09GPU-,")))
def test_what_is_visible_is_there_and_there_once(entries: list[str]) -> None:
    listed = read_listing(THREE)
    shown = visible(listed, ",".join(entries))
    assert set(shown) <= set(listed) and len(set(shown)) == len(shown)


def test_no_driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver.folder / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(driver.folder))  # without the machine's own
    words = "there is no NVIDIA driver here (no program nvidia-smi, no library libcuda.so.1)"
    assert f"cuda:0 can't be used: {words}" in refusal("cuda:0")
    assert reason_for_the_cpu().startswith("there is no NVIDIA driver here")


@pytest.mark.slow
def test_without_nvidia_smi_the_drivers_library_is_asked(
    driver: Driver, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    (driver.folder / "nvidia-smi").unlink()
    for name, value in {
        "PATH": driver.folder,
        "LD_LIBRARY_PATH": simulation.driver.parent,
        "CUDA_SIM_FOLDER": simulation.folder,
        "CUDA_VISIBLE_DEVICES": "1",
    }.items():
        monkeypatch.setenv(name, str(value))
    first, second = gpus.list_gpus()
    assert (first.name, first.pci_bus_id, first.memory_mib) == ("simulated device 0", "0000:01:00.0", 1024)
    assert first.uuid != second.uuid and second.mode == "Default" and not second.mig
    devices.check(("cuda:0",))
    assert "cuda:1 is not there" in refusal("cuda:1")  # CUDA_VISIBLE_DEVICES counts as ever
    monkeypatch.setenv("CUDA_SIM_HANGS", "1")
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 2)
    assert "the driver's library has not answered for 2 s: the driver hangs" in refusal("cuda:0")


def test_a_gpu_for_one_process_is_named_before_several_need_it(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    driver.answer(f"{H200}\n{SECOND}\n".replace("Default", "Exclusive_Process"))

    def problem(*names: str, para_load: bool) -> str:
        try:
            devices.check_sharing(make_config(devices=list(names), para_load=para_load, upload="loader"))
        except UserError as error:
            return str(error)
        return ""

    found = problem("cuda:1", para_load=True)
    assert "cuda:1 (NVIDIA H200, 0000:2A:00.0) is in compute mode Exclusive_Process, and 2 processes" in found
    assert found.endswith("nvidia-smi -i 1 -c DEFAULT, or start NVIDIA's MPS, or upload: trainer")
    assert problem("cuda:0", "cuda:1", para_load=False) == ""
    devices.check_sharing(make_config(devices=["cuda:1"]))  # its loader has no context there
    assert problem("cuda:0", "cuda:0", para_load=False).endswith("or start NVIDIA's MPS")
    assert problem("cpu", "cpu", para_load=True) == ""
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert problem("cuda:1", para_load=True) == ""
    driver.answer(H200.replace("Default", "Prohibited"))
    assert "is in compute mode Prohibited: nvidia-smi -i 0 -c DEFAULT lets" in refusal("cuda:0")


def test_a_driver_that_fails_is_quoted(driver: Driver) -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMake sure"
    driver.answer(words, code=9)
    expected = (
        "nvidia-smi failed with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the "
        "NVIDIA driver. Make sure"
    )
    assert expected in refusal("cuda:0") and expected in reason_for_the_cpu()
    driver.run("echo 'Field \"mig.mode.current\" is not a valid field to query.' >&2; exit 2")
    assert 'exit code 2: Field "mig.mode.current" is not a valid field' in refusal("cuda:0")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "nvidia-smi lists no GPU"),
        ("No devices were found", "not a list of working GPUs: 'No devices were found'"),
        (
            f"{H200}\nUnable to determine the device handle for GPU1: Unknown Error",
            "list of working GPUs: 'Una",
        ),
        (f"{H200}\n" + ", ".join(["1"] + ["[GPU is lost]"] * 7), "list of working GPUs: '1, [GPU is lost], "),
        (H200.replace("143771", "much"), "not a list of working GPUs: '0, GPU-ab12"),
        (H200 + ", 7", "not a list of working GPUs"),
    ],
)
def test_an_answer_that_is_no_list_is_quoted(driver: Driver, answer: str, message: str) -> None:
    driver.answer(answer)
    assert message in refusal("cuda:0") and message in reason_for_the_cpu()


def test_bytes_that_are_no_text_are_quoted(driver: Driver) -> None:
    driver.run(r"printf '\377\200, x\n'")
    assert "not a list of working GPUs" in refusal("cuda:0")


@pytest.mark.slow
def test_a_driver_that_hangs_is_given_up(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 2)
    driver.run(f"echo $$ > {driver.folder}/pid; exec sleep 60")
    begin = time.monotonic()
    assert "nvidia-smi has not answered for 2 s: the driver hangs" in refusal("cuda:0")
    assert time.monotonic() - begin < limit(10)
    process = Path("/proc", (driver.folder / "pid").read_text().strip(), "cmdline")
    wait_until(lambda: not process.exists() or not process.read_bytes(), "it to be killed", 5)


def test_a_program_that_can_not_be_run(driver: Driver) -> None:
    driver.run("")
    (driver.folder / "nvidia-smi").write_text("neither a script nor a binary")
    assert "nvidia-smi can't be run: Exec format error" in refusal("cuda:0")


def test_fewer_gpus_than_asked_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.check(("cuda:0", "cuda:1"))
    assert "cuda:2 is not there: 2 NVIDIA GPUs (NVIDIA H200) are here;" in refusal("cuda:0", "cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    devices.check(("cuda:0",))
    message = (
        "cuda:1 is not there: 2 NVIDIA GPUs (NVIDIA H200) are here, and CUDA_VISIBLE_DEVICES='1' shows 1;"
    )
    assert message in refusal("cuda:1")
    assert "CUDA_VISIBLE_DEVICES" not in refusal("cuda:5")  # not what is wrong
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "and CUDA_VISIBLE_DEVICES='' shows 0;" in refusal("cuda:0")
    assert "are here, but CUDA_VISIBLE_DEVICES='' hides them;" in reason_for_the_cpu()


def test_mig_is_refused_and_the_way_out_named(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.answer(f"{H200}\n{MIG}\n")
    message = (
        "cuda:1 (NVIDIA H200, 0000:2A:00.0) is in MIG mode, and CUDA IPC does not work across MIG instances: "
        "turn it off (nvidia-smi -i 1 -mig 0)"
    )
    assert message in refusal("cuda:0", "cuda:1") and message in reason_for_the_cpu()
    assert message in refusal("cuda:0")  # CUDA would show the instance and nothing else
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "cuda:0 (NVIDIA H200, 0000:2A:00.0) is in MIG mode" in refusal("cuda:0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.check(("cuda:0",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0f3a")
    assert "CUDA_VISIBLE_DEVICES names MIG-0f3a: CUDA IPC does not work across MIG" in refusal("cuda:0")
    assert "MIG-0f3a" in reason_for_the_cpu()


@pytest.mark.parametrize("sign", ["kernel", "device"])
def test_wsl_is_refused(driver: Driver, sign: str) -> None:
    if sign == "kernel":
        devices.KERNEL_VERSION.write_text("Linux version 5.15.153.1-Microsoft-standard-WSL2 (root@1)")
    else:
        devices.WINDOWS_GPU.touch()
    message = "this is Linux inside Windows (WSL), where CUDA IPC does not work"
    assert f"cuda:0 can't be used: {message}" in refusal("cuda:0")
    assert message in reason_for_the_cpu()


def test_what_is_not_installed_is_named_with_its_remedy(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.answer(H200)
    monkeypatch.setattr(devices, "version", lambda name: "2.13.0+cpu")
    message = (
        "torch 2.13.0+cpu is a build without CUDA: pip install --force-reinstall -c constraints.txt torch"
    )
    assert message in refusal("cuda:0") and message in reason_for_the_cpu()
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    message = "PyCUDA is not installed: tools/install_pycuda.sh builds it (see docs/install.md)"
    assert f"devices: cuda:0 can't be used: {message};" in refusal("cuda:0")
    whole = f"1 NVIDIA GPU (NVIDIA H200) is here, but {message}; training on the CPU"
    assert reason_for_the_cpu() == whole


def test_notices(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.notices(("cuda:0",)) == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    notices = devices.notices(("cuda:0", "cuda:1"))
    assert [notice.split()[0] for notice in notices] == ["PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_ORDER"]
    assert "harmless here" in notices[0] and "FASTEST_FIRST" in notices[1]
    assert devices.notices(("cpu",)) == []


def test_devices_that_round_differently_are_named(driver: Driver) -> None:
    assert devices.notices(("cuda:0", "cuda:1")) == []
    (notice,) = devices.notices(("cuda:0", "cpu"))
    assert "NVIDIA H200, driver 570.86.15 round differently" in notice and "bits may differ" in notice
    driver.answer(f"{H200}\n{SECOND.replace('H200', 'L4')}\n")
    (notice,) = devices.notices(("cuda:0", "cuda:1"))
    assert "NVIDIA H200, driver 570.86.15, NVIDIA L4, driver 570.86.15 round differently" in notice


@pytest.mark.parametrize("models", [("H100", "H100"), ("H100", "A100")])
def test_gpus_of_two_models_are_not_compared_by_recheck(
    monkeypatch: pytest.MonkeyPatch, models: tuple[str, str]
) -> None:
    """They round differently, and a healthy one would be left out of the run."""
    monkeypatch.setattr(devices, "describe", lambda names: dict(zip(names, models, strict=True)))
    keys = {"logical_ranks": 2, "global_batch_size": 8, "deterministic": True, "recheck_every": 5}
    config = make_config(devices=("cuda:0", "cuda:1"), **keys)
    if models[0] == models[1]:
        devices.check_keys(config)
    else:
        with pytest.raises(UserError, match="recheck_every: A100, H100 round differently"):
            devices.check_keys(config)


def test_parts_on_gpus_say_what_their_bits_need() -> None:
    keys = {"global_batch_size": 8, "logical_ranks": 2, "devices": ["cuda:0", "cuda:1"]}
    (notice,) = devices.notices_of_keys(make_config(**keys))
    assert notice.endswith("with deterministic: true only")
    assert devices.notices_of_keys(make_config(**keys, deterministic=True)) == []
    assert devices.notices_of_keys(make_config(**{**keys, "devices": ["cpu"]})) == []


def test_the_command_line_shows_choice_and_notices(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config, notices = commandline.complete_config(commandline.parse_arguments("", ROOT / "config.yaml"))
    assert config.devices == ("cuda:0", "cuda:1")
    assert notices[0].startswith("devices: cuda:0, cuda:1; all visible GPUs, with driver 570.86.15: cuda:0 (")
    assert notices[1].startswith("PYTORCH_ALLOC_CONF sets expandable_segments:True")
    monkeypatch.setattr(sys, "argv", ["train.py", "--spec", str(ROOT / "spec_1gpu.yaml")])
    config, notices = commandline.complete_config(commandline.parse_arguments("", ROOT / "config.yaml"))
    assert config.devices == ("cuda:0",) and len(notices) == 1


LOOKING = """
import ctypes, os, threading, time

def look():
    time.sleep(1)
    getenv = ctypes.CDLL(None).getenv  # as the driver reads it
    getenv.restype = ctypes.c_char_p
    with open(os.path.join(os.environ["SEEN"], str(os.getpid())), "wb") as file:
        file.write(getenv(b"CUDA_DEVICE_ORDER") or b"nothing")

os.register_at_fork(after_in_child=lambda: threading.Thread(target=look, daemon=True).start())
"""  # run by every Python process that finds it first


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "PCI_BUS_ID"), pytest.param("FASTEST_FIRST", "FASTEST_FIRST", marks=pytest.mark.slow)],
)
def test_trainers_and_loaders_number_gpus_as_the_launcher(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", given)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LOOKING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "SEEN": str(tmp_path)}
    running = program.start("n_epochs=100000", devices="[cpu]", environment=environment)
    pids = running.pids()
    assert sorted(pids) == ["loader 0", "trainer 0"]
    for pid in pids.values():
        seen = tmp_path / str(pid)
        wait_until(lambda seen=seen: seen.exists() and seen.read_text(), f"the settings of process {pid}")
        assert seen.read_text() == expected


@pytest.mark.slow
def test_the_program_says_why_it_trains_where(driver: Driver, program: Program) -> None:
    """The machine's own PyCUDA and torch count here: with MIG on, the GPU can't be used whatever they are."""
    driver.answer(MIG)
    running = program.run("n_epochs=1", devices="[]")
    assert "1 NVIDIA GPU (NVIDIA H200) is here, but " in running.output()
    assert running.output().startswith("note: devices: cpu")
    refused = program.run("n_epochs=1", devices="[cuda:0]", name="other", code=2)
    assert "lockstep: devices: cuda:0 can't be used: " in refused.last_line()
    refused = program.run("n_epochs=1", devices="[gpu3]", name="other", code=2)
    assert "lockstep: devices: cuda:3 is not there: 1 NVIDIA GPU" in refused.last_line()


def test_looking_at_devices_imports_neither_torch_nor_pycuda(driver: Driver) -> None:
    code = (
        "import sys; from lockstep.backends import devices; devices.choose(); "
        "print({'torch', 'pycuda'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=limit(60)
    )
    assert done.stdout.strip() == "set()", done.stderr
