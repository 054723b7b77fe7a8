"""Launchers of several simulated hosts on this machine, each with its own weights_dir, on loopback."""

import socket
from pathlib import Path

from campaigns.watching import free_port, processes_of_session
from conftest import Program, Running
from descriptors import open_sockets


def start(
    program: Program, *words: str, folders: tuple[str, ...] = ("a", "b"), port: int | None = None
) -> list[Running]:
    """Start one launcher per folder, which is its weights_dir; the position is the host's rank."""
    point = f"rendezvous=127.0.0.1:{port or free_port()}"
    return [
        start_one(
            program, f"n_hosts={len(folders)}", f"host_rank={host}", point, *words, folder=folder, host=host
        )
        for host, folder in enumerate(folders)
    ]


def start_one(
    program: Program, *words: str, folder: str, host: int = 0, through: tuple[str, ...] = ()
) -> Running:
    place = program.place / folder
    running = program.start(f"weights_dir={place}", "cpu_threads=1", *words, through=through)
    running.run_folder, running.log = place / "run", f"host{host}.jsonl" if host else "log.jsonl"
    return running


def listened_on(running: Running) -> set[str]:
    """Return the addresses on which processes of a launcher's session accept connections."""
    sockets = open_sockets(processes_of_session(running.process.pid))
    found = set()
    for kind in ("tcp", "tcp6"):
        path = Path(f"/proc/{running.process.pid}/net/{kind}")
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:
                found.add(_address_of(words[1].partition(":")[0]))
    return found


def _address_of(text: str) -> str:
    """Decode an address of /proc/net: 32-bit words in the machine's byte order."""
    packed = b"".join(bytes.fromhex(text[first : first + 8])[::-1] for first in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def end_well(running: list[Running]) -> None:
    """Wait until all launchers have exited with status 0."""
    for each in running:
        assert each.wait(90) == 0, "\n".join(one.output() for one in running)


def tensors_of(running: Running) -> dict[str, bytes]:
    """Return the contents of a run's checkpoint files by name."""
    return {
        path.name: path.read_bytes() for path in (running.run_folder / "checkpoints").glob("*.safetensors")
    }


def remove(folder: Path) -> None:
    """Delete a run folder, as on a host that restarts with an empty disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
