"""The files that CUDA's events leave in /dev/shm when their processes are killed."""

import resource
from pathlib import Path

import pytest

from lockstep.memory import leftovers


def test_only_files_of_processes_that_are_gone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    ours = ["cuda.shm.0.1f4.1", "cuda.shm.3e8.1f4.2a", "cuda.shm.0.1f5.1"]
    others = ["cuda.shm.0.1f41.1", "cuda.shm.1f4.9.1", "cuda.shm.0.1f4", "cuda.shm.0.1f4.1.x", "sem.1f4"]
    for name in ours + others:
        (tmp_path / name).touch()
    assert leftovers.remove_leftovers([0x1F4, 0x1F5]) == sorted(ours)
    assert {path.name for path in tmp_path.iterdir()} == set(others)
    assert leftovers.remove_leftovers([0x1F4]) == []


def test_it_does_without_where_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHARED", tmp_path)
    (tmp_path / "cuda.shm.0.1f4.1").touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert leftovers.remove_leftovers([0x1F4]) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert leftovers.remove_leftovers([0x1F4]) == ["cuda.shm.0.1f4.1"]
