"""The promises of docs/security.md: files can't lead elsewhere, claim what they don't have, or run code."""

import json
import os
import socket
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from conftest import Program, make_config
from descriptors import open_sockets
from tiny import fresh, start

from benchmarks import measure
from lockstep import files
from lockstep.config import read_command_line, read_yaml
from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from lockstep.launch import subprocesses
from lockstep.memory.host import HostMemory
from lockstep.pretrained.files import read_state_dict
from lockstep.report.runlog import read_run
from lockstep.runs.checkpoint_files import read_state
from lockstep.signals import Interrupts
from preprocessing import devkit, make_labels, tars

HKL = "train_hkl/0000.hkl"
IMAGES = (32, 36, 36, 3)


# -- names do not lead out of their folder -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["../elsewhere/0000.hkl", "/etc/passwd", "a/../../b.hkl", "", "a\nb", "\0"])
@pytest.mark.parametrize("where", ["train", "others"])
def test_a_manifest_names_files_of_its_folder_only(folder: Path, name: str, where: str) -> None:
    entry = {"file": HKL, "n_images": 1, "n_bytes": 1, "sha256": "", "labels_sha256": ""}
    content = {"version": 2, "classes": ["a"], "train": [dict(entry)], "val": [entry], "others": {}}
    if where == "train":
        content["train"][0]["file"] = name
    else:
        content["others"][name] = ""
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"manifest\.json: names .* which is no file in its folder"):
        open_dataset(make_config(data_folder=str(folder)))


def link(file: h5py.File, other: Path) -> None:
    file["data"] = h5py.ExternalLink(str(other), "data")


def lie_elsewhere(file: h5py.File, other: Path) -> None:
    file.create_dataset("data", IMAGES, "u1", external=[(str(other), 0, 32 * 36 * 36 * 3)])


def use_several_files(file: h5py.File, other: Path) -> None:
    layout = h5py.VirtualLayout(IMAGES, "u1")
    layout[:] = h5py.VirtualSource(str(other), "data", IMAGES)
    file.create_virtual_dataset("data", layout)


@pytest.mark.parametrize("make", [link, lie_elsewhere, use_several_files])
def test_an_array_lies_in_its_own_file(tmp_path: Path, make: Callable[[h5py.File, Path], None]) -> None:
    hkl.write(tmp_path / "other.hkl", np.zeros(IMAGES, np.uint8))
    with h5py.File(tmp_path / "a.hkl", "w") as file:
        make(file, tmp_path / "other.hkl")
    with pytest.raises(UserError, match=r"a\.hkl: its array is in another file, by a link"):
        hkl.inspect(tmp_path / "a.hkl")


def tar_with(path: Path, name: str, size: bytes | None = None) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    content = bytearray(path.read_bytes())
    if size is not None:
        content[124:136] = size
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
    path.write_bytes(content)


def test_a_member_of_a_tar_is_a_name_and_never_a_path(tmp_path: Path) -> None:
    tar_with(tmp_path / "val.tar", "../../etc/x.jpg")
    assert [picture.name for picture in tars.list_flat_tar(tmp_path / "val.tar", [])] == ["x.jpg"]
    assert os.listdir(tmp_path) == ["val.tar"]


# -- nothing is run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [{}]", "!!python/name:os.system", "!x 1"])
def test_yaml_makes_plain_values_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model_args: " + text.format(tmp_path / "made"))
    with pytest.raises(UserError, match=r"config\.yaml: is not valid YAML: could not determine"):
        read_yaml(path)
    assert os.listdir(tmp_path) == ["config.yaml"]


# -- no more memory than there is in the file ----------------------------------------------------------------


BOMB = "[&a0 x, " + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)) + "]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "it holds more than 100,000 values"),
        ("&a [*a]", "it holds more than 100,000 values"),
        ("0x" + "f" * 5000, "a whole number of thousands of digits"),
        ("1:" * 400 + "1.5", "too large"),
    ],
)
def test_yaml_stays_as_small_as_its_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_args: {text}\n")
    with pytest.raises(UserError, match=f"config.yaml: is not valid YAML: .*{words}"):
        read_yaml(path)
    with pytest.raises(UserError, match=r"command line: .* the value can't be read"):
        read_command_line([f"model_args={text}"])


def test_yaml_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("lr_step: &steps [1, 2]\nmodel_args: {steps: *steps, more: *steps}\n")
    assert read_yaml(tmp_path / "a.yaml").values["model_args"] == {"steps": [1, 2], "more": [1, 2]}


def test_a_header_that_claims_terabytes_is_refused(folder: Path) -> None:
    for path in (folder / "train_hkl").iterdir():
        path.unlink()
    with h5py.File(folder / HKL, "w") as file:
        file.create_dataset("data", (90, 2**20, 2**20, 3), "u1", chunks=(1, 64, 64, 3))
    assert (folder / HKL).stat().st_size < 10_000
    with pytest.raises(UserError, match=r"0000\.hkl: claims images of \(1048576, 1048576, 3\), more than"):
        open_dataset(make_config(data_folder=str(folder), subtract_mean="none"))


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
def test_a_tensor_as_large_as_its_strides_say_is_refused(tmp_path: Path, channels: str) -> None:
    """It is one number in the file."""
    claims = torch.zeros(1).expand(10**4, 10**4, 10**4, 1)
    torch.save({**fresh().state_dict(), "conv1.weight": claims}, tmp_path / "a.pth")
    with pytest.raises(UserError, match=r"a\.pth .*: does not fit .* conv1\.weight \(10000, 10000"):
        start(tmp_path / "a.pth", pretrained_channels=channels)


def test_a_compressed_pth_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "plain.pth")
    with zipfile.ZipFile(tmp_path / "plain.pth") as old, zipfile.ZipFile(tmp_path / "a.pth", "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    assert list(read_state_dict(tmp_path / "plain.pth")) == ["a"]
    with pytest.raises(UserError, match=r"a\.pth: .* compressed zip"):
        read_state_dict(tmp_path / "a.pth")


def test_a_tar_that_leads_back_is_refused(tmp_path: Path) -> None:
    """Its second header claims a size of -512, so that it comes next itself, and so on for ever."""
    tar_with(tmp_path / "one.tar", "x.jpg")
    tar_with(tmp_path / "two.tar", "y.jpg", b"\xff" * 10 + b"\xfe\0")
    first, second = ((tmp_path / name).read_bytes() for name in ("one.tar", "two.tar"))
    (tmp_path / "val.tar").write_bytes(first[:512] + second)
    with pytest.raises(UserError, match=r"val\.tar: is damaged: y\.jpg has a size below 0"):
        tars.list_flat_tar(tmp_path / "val.tar", [])


def test_a_devkit_that_is_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kit.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("data/meta.mat")
        member.size = 100 << 20
        with open("/dev/zero", "rb") as zeros:
            archive.addfile(member, zeros)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(UserError, match=r"kit\.tar\.gz: data/meta\.mat claims 104,857,600 bytes"):
        devkit.read_meta(path)


# -- what else the campaign found ----------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"\x93NUMPY\1\0\2\0{\n", b"PK\3\4", b""])
def test_a_broken_order_of_images_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "misc").mkdir()
    path = tmp_path / "misc/shuffled_train_filenames.npy"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"shuffled_train_filenames\.npy: is not a"):
        make_labels.read_order(tmp_path, tmp_path, "train")


def test_names_with_numbers_that_are_no_characters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "misc").mkdir()
    np.save(tmp_path / "misc/shuffled_train_filenames.npy", np.array([2**31], "u4").view("U1"))
    with pytest.raises(UserError, match=r"filenames\.npy: holds names that are not text"):
        make_labels.read_order(tmp_path, tmp_path, "train")


@pytest.mark.parametrize("change", [{"epoch": 0}, {"epoch": 10**400}, {"val_record": [{"error_top1": "x"}]}])
def test_a_record_that_no_schedule_can_go_on_with_is_refused(tmp_path: Path, change: dict) -> None:
    counts = {"epoch": 1, "position": 1, "n_samples": 1, "n_trainers": 1}
    record = {**counts, "learning_rate": 0.1, "val_record": [], "config": {}, "versions": {}}
    path = tmp_path / "epoch_0001.json"
    path.write_text(json.dumps(record))
    assert read_state(path).epoch == 1
    path.write_text(json.dumps({**record, **change}))
    with pytest.raises(UserError, match=r"epoch_0001\.json: is not a checkpoint record"):
        read_state(path)


def test_a_log_may_have_numbers_that_are_too_large(tmp_path: Path) -> None:
    event = {"event": "validated", "epoch": 1, "error_top1": 0.5, "loss": 10**400}
    (tmp_path / "log.jsonl").write_text(json.dumps(event) + "\n")
    assert read_run(tmp_path).validations[0].loss is None


# -- who may read what is written ----------------------------------------------------------------------------


@pytest.fixture(params=[0o077, 0o027, 0o002])
def umask(request: pytest.FixtureRequest):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_are_readable_by_whom_the_umask_says(umask: int, tmp_path: Path) -> None:
    files.write_text(tmp_path / "text", "x")
    hkl.write(tmp_path / "array.hkl", np.zeros(3))
    for name in ("text", "array.hkl"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.slow
def test_a_run_is_its_owners_and_opens_no_port(program: Program) -> None:
    before = os.umask(0o077)
    try:
        running = program.start("n_epochs=2", "snapshot_freq=1", "trace=true", "report=true")
        running.wait_for_text("step 2/6")
        inodes = open_sockets([running.process.pid, *running.pids().values()])
        assert running.wait() == 0
    finally:
        os.umask(before)
    assert inodes  # the pipes between its processes
    assert not inodes & sockets_of_the_network()
    written = [path for path in running.run_folder.rglob("*") if path.is_file()]
    assert {"report.html", "epoch_0002.safetensors"} < {path.name for path in written}
    assert [path for path in written if path.stat().st_mode & 0o077] == []


def sockets_of_the_network() -> set[str]:
    """Numbers of all sockets that have an address on a network."""
    paths = [Path("/proc/net") / name for name in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()[1:]]
    return {line.split()[9] for line in lines}


def test_a_listening_socket_would_be_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert open_sockets([os.getpid()]) & sockets_of_the_network()


# -- what other programs get ---------------------------------------------------------------------------------


LISTING = """#!{python} -S
import os
with open("{out}", "w") as file:
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if number != file.fileno() and os.path.exists(f"/proc/self/fd/{{number}}"):
            print(number, file=file)
"""


@pytest.fixture
def listing(tmp_path: Path) -> Path:
    """A program that writes the numbers of its open descriptors to 'open'."""
    path = tmp_path / "git"
    path.write_text(LISTING.format(python=sys.executable, out=tmp_path / "open"))
    path.chmod(0o755)
    return path


@pytest.fixture
def kept_open():
    """The descriptor of a block of memory, as careless as can be."""
    descriptor = os.memfd_create("block", 0)
    os.set_inheritable(descriptor, True)
    yield descriptor
    os.close(descriptor)


def test_the_reports_process_inherits_no_descriptor(
    listing: Path, kept_open: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(listing))
    subprocesses.write_report(tmp_path, Interrupts())
    assert (tmp_path / "open").read_text().split() == ["0", "1", "2"]


def test_git_inherits_no_descriptor(
    listing: Path, kept_open: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.commit() == "unknown"
    assert (tmp_path / "open").read_text().split() == ["0", "1", "2"]


def test_a_block_of_memory_is_not_inherited() -> None:
    block = HostMemory().allocate(4096, "a test")
    assert not os.get_inheritable(block.descriptor)
    block.close()
