"""The worker processes: fresh interpreters that receive all messages through one inherited descriptor."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from threadpoolctl import threadpool_limits

from lockstep.comm.pipes import Pipe
from lockstep.launch.children import describe_exit
from lockstep.launch.processes import connect_all
from lockstep.launch.status import StatusBoard
from lockstep.synk.commands import Connect, Start, WorkerReady
from lockstep.threads import DaemonExecutor, prepare_square_roots

LEAVE_SECONDS = 5.0  # time that a worker's process has to exit after Close
LEAVE_GPU_SECONDS = 60.0  # time that ranks wait for each other when they free their memory on GPUs
_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


@dataclass(frozen=True)
class TeamOptions:
    """The checked arguments of fork().

    Attributes:
        size: Number of ranks.
        caller: Rank of the calling process.
        threads: Number of BLAS and OpenMP threads of each rank.
        profile: Workers write profiles.
        timeout: Seconds that a rank waits for another.
        devices: The GPU of each rank; empty for CPUs.
    """

    size: int
    caller: int
    threads: int
    profile: bool
    timeout: float
    devices: tuple[str, ...] = ()


@dataclass
class Worker:
    """The caller's view of a worker."""

    rank: int
    process: "subprocess.Popen[bytes]"
    pipe: Pipe
    board: StatusBoard | None = None
    open_blocks: set[int] = field(default_factory=set)  # blocks that it has
    results: int | None = None  # number of the block for its results

    @property
    def doing(self) -> str:
        """The last line of its status board; "starting" before it has one."""
        return self.board.read() if self.board else "starting"

    def describe_end(self, seconds: float) -> str:
        """Wait some seconds for the process to end, and describe how it ended."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        if code == 0:  # also if Popen finds no process to wait for
            return (
                "has exited (code 0, or unknown: this process waits for all its children or ignores SIGCHLD)"
            )
        return describe_exit(code)


# By process id, since a forked child does not inherit threads. The kernel ends a worker when the thread that
# started it ends (PR_SET_PDEATHSIG), so that must be a thread that lives as long as the program.
_starters: dict[int, DaemonExecutor] = {}


def start_worker(rank: int, options: TeamOptions) -> Worker:
    """Start the process of `rank`, which waits for `send_start`."""
    return _starter().submit(lambda: _spawn(rank, options)).result()


def send_start(worker: Worker, options: TeamOptions) -> None:
    """Send a worker its first message; `wait_until_ready` waits until it is ready."""
    worker.pipe.send(
        Start(
            rank=worker.rank,
            size=options.size,
            caller=options.caller,
            pid=os.getpid(),
            path=list(sys.path),
            python_path=os.environ.get("PYTHONPATH"),
            preload=needed_for_graphs() if "pytensor" in sys.modules else [],  # torch takes too long
            profile=options.profile,
        )
    )


def _starter() -> DaemonExecutor:
    """Return this process's thread that starts workers."""
    if os.getpid() not in _starters:
        _starters[os.getpid()] = DaemonExecutor("lockstep.synk starter")
    return _starters[os.getpid()]


def wait_until_ready(worker: Worker) -> None:
    """Wait until a worker is ready, and receive its status board."""
    worker.pipe.receive(WorkerReady, "to start")
    worker.board = StatusBoard.receive(worker.pipe)


def connect_ranks(workers: Sequence[Worker], caller: int, deadline: float) -> dict[int, Connection]:
    """Connect all pairs of ranks by pipes; return the caller's ends by the other rank."""
    ends = connect_all(len(workers) + 1)
    for worker in workers:
        worker.pipe.send(Connect(deadline))
        for _, end in sorted(ends[worker.rank].items()):
            with end:
                worker.pipe.send_descriptor(end.fileno())
    return ends[caller]


def _spawn(rank: int, options: TeamOptions) -> Worker:
    _open_standard_streams()
    ours, theirs = socket.socketpair()
    directory = "/" if _lacks_directory() else None
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others
    path = [str(Path(entry).absolute()) for entry in entries if directory is None or os.path.isabs(entry)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment.update({name: str(options.threads) for name in _THREADS})
    flags = ["-P", *["-O"] * sys.flags.optimize]  # -P: the working directory does not belong to the path
    command = [sys.executable, *flags, "-m", "lockstep.synk.rank", str(theirs.fileno())]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # of this thread; the worker inherits it
    with ours, theirs:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, cwd=directory
        )
        return Worker(rank, process, Pipe(Connection(ours.detach()), f"rank {rank}", options.timeout))


def _open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams, for good.

    Else a pipe or a block would have the descriptor of a stream, and output of a callable would go there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)


def _lacks_directory() -> bool:
    """Return whether this process's working directory was removed. torch can't be imported in such a one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def end_worker(worker: Worker, seconds: float) -> None:
    """Wait up to `seconds` for a worker's process to exit, then kill it."""
    worker.pipe.close()
    if worker.board is not None:
        worker.board.close()
    with suppress(subprocess.TimeoutExpired):
        worker.process.wait(seconds)
    worker.process.kill()  # does nothing if it has exited
    worker.process.wait()


_GRAPHS = ["pytensor", "lockstep.synk.graphs"]
_NUMBA = "pytensor.link.numba.dispatch"  # half of the import time; only this compiler needs it


def needed_for_graphs() -> list[str]:
    """Return the modules that workers import early for graphs, in order.

    They do so while the caller imports PyTensor, so that distribute() need not wait for it.
    """
    config: Any = getattr(sys.modules.get("pytensor"), "config", None)
    flags = os.environ.get("PYTENSOR_FLAGS", "") if config is None else str(config.mode)
    return _GRAPHS if "FAST_COMPILE" in flags else [*_GRAPHS, _NUMBA]


class ImportHook(MetaPathFinder):
    """An import hook that calls `act` once, when PyTensor is about to be imported. It finds no modules."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "pytensor":
            self.stop()
            self._act()

    def stop(self) -> None:
        with suppress(ValueError):  # it was already removed
            sys.meta_path.remove(self)


class ThreadLimits:
    """A limit on the threads of BLAS, OpenMP and torch in this process while a team shares its cores.

    It covers the libraries that are loaded; call `limit` again after others were loaded.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._limits: list[Any] = []
        self._of_torch: int | None = None
        self.limit()

    def limit(self) -> None:
        """Limit the libraries that are loaded now."""
        if "torch" in sys.modules and self._of_torch is None:
            import torch

            prepare_square_roots()
            self._of_torch = torch.get_num_threads()
            torch.set_num_threads(self.number)
        self._limits.append(threadpool_limits(limits=self.number))

    def restore(self) -> None:
        """Restore the numbers of threads from before the first limit."""
        while self._limits:
            self._limits.pop().restore_original_limits()
        if self._of_torch is not None:
            import torch

            torch.set_num_threads(self._of_torch)
            self._of_torch = None
