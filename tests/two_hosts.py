"""Launchers of several hosts on this one: each with a weights_dir of its own, meeting on loopback."""

import os
import socket
from pathlib import Path

from conftest import Program, Running

PORTS = range(20000, 32000)  # below those that the kernel gives away


def free_port() -> int:
    """One that nobody has at this moment, and another in every process of the tests."""
    for number in range(len(PORTS)):
        port = PORTS[(os.getpid() * 97 + number + _given[0]) % len(PORTS)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given[0] += number + 1
            return port
    raise AssertionError("no port is free")


_given = [0]


def start(
    program: Program, *words: str, folders: tuple[str, ...] = ("a", "b"), port: int | None = None
) -> list[Running]:
    """One launcher for each folder, whose weights_dir that is; its place there is the host's number."""
    point = f"meeting_point=127.0.0.1:{port or free_port()}"
    return [
        start_one(program, f"hosts={len(folders)}", f"host={host}", point, *words, folder=folder, host=host)
        for host, folder in enumerate(folders)
    ]


def start_one(
    program: Program, *words: str, folder: str, host: int = 0, devices: str = "[cpu, cpu]"
) -> Running:
    place = program.place / folder
    running = program.start(f"weights_dir={place}", "cpu_threads=1", *words, devices=devices)
    running.run_folder, running.log = place / "run", f"host{host}.jsonl" if host else "log.jsonl"
    return running


def end_well(running: list[Running]) -> None:
    """Waits until all have ended, as they should."""
    for each in running:
        assert each.wait(90) == 0, "\n".join(one.output() for one in running)


def tensors_of(running: Running) -> dict[str, bytes]:
    """Checkpoints' tensors, by the file's name."""
    return {
        path.name: path.read_bytes() for path in (running.run_folder / "checkpoints").glob("*.safetensors")
    }


def remove(folder: Path) -> None:
    """A run's folder, as on a host that comes back with an empty disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
