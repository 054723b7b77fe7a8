"""Both compilers of the CUDA kernels, the cache of their output, and the search for NVRTC."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from lockstep import kernels
from lockstep.comm.group import Group
from lockstep.comm.pipes import Pipe
from lockstep.errors import UserError
from lockstep.exchange import OPS
from lockstep.kernels import nvrtc
from lockstep.launch.ranks import run_ranks

OTHERS = "sm_80", "sm_120"  # the oldest and the newest architecture
NAMES = sorted(path.stem for path in kernels.HERE.glob("*.cu"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lockstep"


def leave_only(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "nvrtc":
        if nvrtc.find() is None:
            pytest.skip("no libnvrtc here: pip install nvidia-cuda-nvrtc")
        monkeypatch.setenv("PATH", "")
    else:
        if shutil.which("nvcc") is None:
            pytest.skip("nvcc is not here")
        monkeypatch.setattr(nvrtc, "find", lambda: None)


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its name; the other one can't be found."""
    leave_only(request.param, monkeypatch)
    return request.param


def kernels_in(cubin: bytes) -> set[str]:
    """Return the names of an ELF file's kernels: the code of each is a section."""
    assert cubin.startswith(b"\x7fELF") and int.from_bytes(cubin[18:20], "little") == 190  # the machine: CUDA
    return {name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)}


@pytest.mark.parametrize(
    "architecture",
    ["sm_90", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
)
@pytest.mark.parametrize("name", NAMES)
def test_each_compiler_compiles_each_kernel(compiler: str, name: str, architecture: str) -> None:
    expected = set(re.findall(r"__global__ void (\w+)", (kernels.HERE / f"{name}.cu").read_text()))
    assert expected and kernels_in(kernels.compiled(name, architecture).read_bytes()) == expected


def test_a_kernel_is_compiled_once_and_kept(
    compiler: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kernels.compiled("fold", "sm_90")
    assert list(cache.iterdir()) == [first]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    assert kernels.compiled("fold", "sm_90") == first
    expected = "neither NVRTC .* nor nvcc is here: one is needed once, to compile fold.cu. Run pip install"
    with pytest.raises(UserError, match=expected):
        kernels.compiled("fold", "sm_80")


@pytest.mark.slow
def test_a_changed_header_is_compiled_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    (tmp_path / "small.cu").write_text(
        '#include "name.cuh"\nextern "C" __global__ void NAME(int *to) { *to = 1; }'
    )
    for name in ("first", "second"):
        (tmp_path / "name.cuh").write_text(f"#define NAME {name}\n")
        assert kernels_in(kernels.compiled("small", "sm_90").read_bytes()) == {name}


@pytest.mark.slow
def test_a_changed_source_is_compiled_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    for name in ("first", "second"):
        (tmp_path / "small.cu").write_text(f'extern "C" __global__ void {name}(int *to) {{ *to = 1; }}')
        assert kernels_in(kernels.compiled("small", "sm_90").read_bytes()) == {name}


def test_a_broken_source_is_told_in_the_compilers_words(
    compiler: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken(int *to) { *to = nowhere; }\n')
    with pytest.raises(UserError) as caught:
        kernels.compiled("broken", "sm_90")
    for word in (compiler, "can't compile broken.cu", "sm_90", "broken.cu(1)", '"nowhere" is undefined'):
        assert word in str(caught.value)
    assert not cache.exists()


def test_an_unknown_architecture_is_named(compiler: str) -> None:
    with pytest.raises(UserError, match=r"(?s)can't compile fold.cu with --gpu-architecture=sm_10: .*arch"):
        kernels.compiled("fold", "sm_10")


@pytest.mark.slow
def test_a_cache_that_cant_be_written_is_named(compiler: str, cache: Path) -> None:
    cache.parent.write_text("a file, not a folder")
    with pytest.raises(UserError, match=f"{cache}: can't be written to: .* Set XDG_CACHE_HOME"):
        kernels.compiled("fold", "sm_90")


def compile_at_once(rank: int, pipes: dict[int, Pipe], compiler: str) -> tuple[Path, bytes]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_only(compiler, monkeypatch)
        Group.on_one_host(rank, pipes).barrier("ready")
        path = kernels.compiled("fold", "sm_90")
        return path, path.read_bytes()


@pytest.mark.slow
def test_several_processes_may_compile_at_once(compiler: str, cache: Path) -> None:
    results = run_ranks(compile_at_once, 4, compiler)
    path = kernels.compiled("fold", "sm_90")
    assert list(cache.iterdir()) == [path]
    assert {found for found, _ in results} == {path}
    for _, cubin in results:
        assert kernels_in(cubin) == {f"fold_{op}" for op in (*OPS, "tree")}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a library with nothing in it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not here")
    path = tmp_path_factory.mktemp("library") / "empty.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "-o", path, os.devnull], check=True)
    return path


def found_with(**variables: Path) -> str:
    """Return what a Python without site-packages (so without torch) finds with these variables."""
    environment = {"PYTHONPATH": str(ROOT)} | {name: str(value) for name, value in variables.items()}
    code = "from lockstep.kernels import nvrtc; found = nvrtc.find(); print(found and found._name)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", ["cu13", "cuda_nvrtc"])
def test_nvrtc_is_found_in_nvidias_wheels(library: Path, tmp_path: Path, package: str) -> None:
    folder = tmp_path / "nvidia" / package / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "lockstep").symlink_to(ROOT / "lockstep")
    (folder / "libnvrtc-builtins.so.12.8").symlink_to(library)
    (folder / "libnvrtc.so.12").symlink_to(library)
    assert found_with(PYTHONPATH=tmp_path) == str(folder / "libnvrtc.so.12")
    newer = tmp_path / "nvidia" / "a_newer_one" / "lib" / "libnvrtc.so.13"
    newer.parent.mkdir(parents=True)
    newer.symlink_to(library)
    assert found_with(PYTHONPATH=tmp_path) == str(newer)
    newer.unlink()
    newer.write_text("not a library")
    assert found_with(PYTHONPATH=tmp_path) == str(folder / "libnvrtc.so.12")


def test_the_builtins_beside_nvrtc_are_loaded_with_it(library: Path, tmp_path: Path) -> None:
    """NVIDIA's wheel of 13.0 has no run path in libnvrtc: it would not find them when it compiles."""
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (folder / name).write_bytes(library.read_bytes())
    code = "from lockstep.kernels import nvrtc; nvrtc.find(); print(open('/proc/self/maps').read())"
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert str(folder / "libnvrtc-builtins.so.13.0") in done.stdout, done.stderr


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_nvrtc_is_found_in_the_toolkit(library: Path, tmp_path: Path, variable: str) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").symlink_to(library)
    assert found_with(**{variable: tmp_path}) == str(tmp_path / "lib64" / "libnvrtc.so.13")


@pytest.mark.parametrize("name", ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.14"])
def test_nvrtc_is_found_by_the_dynamic_loader(library: Path, tmp_path: Path, name: str) -> None:
    if found_with() != "None":
        pytest.skip("the dynamic loader finds an NVRTC of this machine")
    (tmp_path / name).symlink_to(library)
    assert found_with(LD_LIBRARY_PATH=tmp_path) == name
