"""The worker processes: fresh interpreters that are told everything by one inherited descriptor."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from lockstep.comm.pipes import Pipe
from lockstep.launch.processes import describe_exit
from lockstep.launch.status import StatusBoard
from lockstep.synk.commands import Connect, Ready, Start
from lockstep.synk.preloading import needed_for_graphs

LEAVE_SECONDS = 5.0  # from Close to the end of a worker's process
_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


@dataclass
class Worker:
    """The caller's view of a worker."""

    rank: int
    process: "subprocess.Popen[bytes]"
    pipe: Pipe
    board: StatusBoard | None = None
    known: set[int] = field(default_factory=set)  # blocks that it has
    results: int | None = None  # the block for its results

    @property
    def doing(self) -> str:
        return self.board.read() if self.board else "starting"

    def describe_end(self, seconds: float) -> str:
        """How its process ended, after waiting for that for some seconds."""
        try:
            return describe_exit(self.process.wait(seconds))
        except subprocess.TimeoutExpired:
            return "has closed its pipe"


class _Starter:
    """A thread that lives as long as the program and starts all workers.

    The kernel ends a worker when the thread that started it ends (PR_SET_PDEATHSIG), which must not be one of
    the user's. What it starts never gets Ctrl-C.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Worker], Future[Worker]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="lockstep.synk starter", daemon=True).start()

    def start(self, job: Callable[[], Worker]) -> Worker:
        future: Future[Worker] = Future()
        self._jobs.put((job, future))
        return future.result()

    def _work(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        while True:
            job, future = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)


_starters: dict[int, _Starter] = {}  # by process: a forked child has no threads but its own


def start_worker(rank: int, size: int, caller: int, threads: int, profile: bool, deadline: float) -> Worker:
    """Starts the process of `rank`; `greet` waits until it is ready."""
    if os.getpid() not in _starters:
        _starters[os.getpid()] = _Starter()
    worker = _starters[os.getpid()].start(lambda: _spawn(rank, threads, deadline))
    worker.pipe.send(
        Start(
            rank,
            size,
            caller,
            os.getpid(),
            list(sys.path),
            os.environ.get("PYTHONPATH"),
            needed_for_graphs() if "pytensor" in sys.modules else [],  # torch takes too long on suspicion
            profile,
        )
    )
    return worker


def greet(worker: Worker) -> None:
    """Waits until it is ready, and gets its status board."""
    worker.pipe.receive(Ready, "to start")
    worker.board = StatusBoard.receive(worker.pipe)


def connect_all(workers: Sequence[Worker], caller: int, deadline: float) -> dict[int, Connection]:
    """Pipes between any two ranks. Gives the workers theirs; returns the caller's, by the other rank."""
    ends = _pairs(len(workers) + 1)
    for worker in workers:
        worker.pipe.send(Connect(deadline))
        for _, end in sorted(ends[worker.rank].items()):
            with end:
                worker.pipe.send_descriptor(end.fileno())
    return {rank: Connection(end.detach()) for rank, end in ends[caller].items()}


def _pairs(size: int) -> list[dict[int, socket.socket]]:
    """Of sockets, between any two ranks; by rank, by the other rank."""
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank in range(size):
        for other in range(rank):
            ends[rank][other], ends[other][rank] = socket.socketpair()
    return ends


def _spawn(rank: int, threads: int, deadline: float) -> Worker:
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    environment.update({name: str(threads) for name in _THREADS})
    command = [sys.executable, "-m", "lockstep.synk.rank", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
    return Worker(rank, process, Pipe(Connection(ours.detach()), f"rank {rank}", deadline))


def end_worker(worker: Worker, seconds: float) -> None:
    """Waits so long for its process to leave, then kills it."""
    worker.pipe.close()
    if worker.board is not None:
        worker.board.close()
    if worker.describe_end(seconds) and worker.process.poll() is None:
        worker.process.kill()
        worker.process.wait()
