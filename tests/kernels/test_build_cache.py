"""The cache of builds for simulated GPUs: each version is built once, whole, for all processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import build
import pytest
from limits import limit

# Builds "thing" slowly, and notes each build in a file.
BUILDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import build

def make(folder):
    with open(sys.argv[2], "a") as notes:
        notes.write("built ")
    (folder / "first").touch()
    time.sleep(1)
    (folder / "second").touch()

folder = build.cached("thing", make, "key")
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def start_builder(tmp_path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", BUILDER, str(build.HERE), str(tmp_path / "notes")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_second_call_builds_nothing_and_other_flags_build_anew(cache: Path) -> None:
    built: list[Path] = []
    first = build.cached("thing", built.append, ["-O0"], "source")
    assert build.cached("thing", built.append, ["-O0"], "source") == first and len(built) == 1
    other = build.cached("thing", built.append, ["-O1"], "source")
    assert other != first and len(built) == 2
    assert build.cached("thing", built.append, ["-O0"], "source") == first and len(built) == 2
    assert sorted(path for path in cache.iterdir() if path.is_dir()) == sorted([first, other])


def test_a_build_that_fails_leaves_nothing_and_is_tried_again(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("the compiler failed")

    with pytest.raises(RuntimeError, match="the compiler failed"):
        build.cached("thing", fail, "key")
    folder = build.cached("thing", lambda folder: (folder / "whole").touch(), "key")
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_processes_that_need_the_same_build_at_once_build_it_once(tmp_path: Path) -> None:
    builders = [start_builder(tmp_path) for _ in range(2)]
    outputs = [builder.communicate(timeout=limit(30))[0] for builder in builders]
    assert outputs == ["['first', 'second']\n"] * 2
    assert (tmp_path / "notes").read_text() == "built "


def test_a_build_that_was_killed_is_begun_anew(tmp_path: Path) -> None:
    killed = start_builder(tmp_path)
    deadline = time.monotonic() + limit(30)
    while not (tmp_path / "notes").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    output, _ = start_builder(tmp_path).communicate(timeout=limit(30))
    assert output == "['first', 'second']\n"
    assert (tmp_path / "notes").read_text() == "built built "


def test_kernels_are_built_anew_when_their_flags_change(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    monkeypatch.setattr(build, "_build_kernels", built.append)
    first = build.build_kernels()
    assert build.build_kernels() == first and len(built) == 1
    monkeypatch.setattr(build, "KERNEL_FLAGS", [*build.KERNEL_FLAGS, "-g"])
    assert build.build_kernels() != first and len(built) == 2
