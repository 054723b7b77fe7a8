"""Ends of ranks and programs: killed or hanging ranks, errors, Ctrl-C. No process hangs or is left over."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytest
from conftest import ROOT, named_memory, processes_of_session, wait_until
from descriptors import open_sockets
from limits import limit
from synk_acts import act_function
from synk_teams import MODE, team

import lockstep.synk as synk
from lockstep.comm.pipes import Pipe
from lockstep.synk import session, workers
from lockstep.synk.commands import Start


def test_a_rank_killed_between_calls_is_named_by_the_next_and_by_every_one() -> None:
    with team(3):
        f = act_function(-1, "nothing")
        shared = pytensor.shared(np.zeros(3), name="s")
        synk.function([], shared.sum())
        synk.distribute()
        assert f(np.ones(6)) == 6
        worker = session.current_team("").workers[1]
        os.kill(worker.process.pid, signal.SIGKILL)
        for again in (lambda: f(np.ones(6)), lambda: synk.all_reduce(shared), lambda: synk.data(np.ones(3))):
            with pytest.raises(
                synk.RankLost, match=r"rank 2 \(pid \d+\) was killed by SIGKILL.* at: idle after"
            ) as lost:
                again()
            assert (lost.value.rank, lost.value.pid, lost.value.signal) == (
                2,
                worker.process.pid,
                signal.SIGKILL,
            )
        synk.close()
        assert synk.fork(2) == 2
        with pytest.raises(RuntimeError, match="closed"):
            f(np.ones(6))


@pytest.mark.parametrize(
    ("what", "words"),
    [("die", "SIGKILL"), pytest.param("leave", "left with exit code 3", marks=pytest.mark.slow)],
)
def test_a_rank_that_dies_while_it_computes(what: str, words: str) -> None:
    with team(2):
        f = act_function(1, what)
        synk.distribute()
        begin = time.monotonic()
        with pytest.raises(synk.RankLost, match=rf"rank 1 .*{words}.* at: calling '{what} on 1'"):
            f(np.ones(6))
        assert time.monotonic() - begin < limit(10)


def test_a_rank_killed_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its arrival at the barrier and the fold."""
    with team(3):
        shared = pytensor.shared(np.zeros(3), name="s")
        synk.function([], shared.sum())
        synk.distribute()
        decide = synk.slots.AllReduceShared.decide

        def kill_first(step: Any, team: Any, words: Any) -> Any:
            os.kill(team.workers[1].process.pid, signal.SIGKILL)
            return decide(step, team, words)

        monkeypatch.setattr(synk.slots.AllReduceShared, "decide", kill_first)
        with pytest.raises(synk.RankLost, match=r"rank 2 .*SIGKILL.* at: all_reduce"):
            synk.all_reduce(shared)


@pytest.mark.slow
def test_a_rank_that_hangs_is_lost_after_the_deadline(tmp_path: Path) -> None:
    seconds = round(limit(4))
    with team(2, timeout=seconds):
        f = act_function(1, "sleep", str(tmp_path))
        synk.distribute()
        begin = time.monotonic()
        how = rf"rank 1 \(pid \d+\) does not answer \(this process waited {seconds} s .* at: calling"
        with pytest.raises(synk.RankLost, match=how):
            f(np.ones(6))
        assert seconds <= time.monotonic() - begin < seconds + limit(16)


@pytest.mark.slow
def test_a_rank_that_answers_after_the_deadline_is_lost_with_what_it_did_then() -> None:
    seconds = round(limit(4))
    with team(2, timeout=seconds):
        f = act_function(1, "answer late", str(seconds + 1))
        synk.distribute()
        with pytest.raises(synk.RankLost, match=r"rank 1 .* does not answer .* at: calling") as lost:
            f(np.ones(6))
        assert lost.value.doing.startswith("calling")


@pytest.mark.parametrize("rank", [1, -1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_is_raised_as_its_own_type_and_the_team_goes_on(rank: int) -> None:
    with team(2):
        f, good = act_function(rank, "raise"), act_function(-1, "nothing")
        synk.distribute()
        for _ in range(2):
            good(np.ones(3))
            with pytest.raises(
                ArithmeticError, match=f"no good in process {abs(rank) if rank > 0 else 0}"
            ) as raised:
                f(np.ones(6))
            notes = "".join(raised.value.__notes__)
            assert f"on rank {max(rank, 0)} of 2" in notes
            assert rank < 1 or "in perform" in notes, "the traceback of the other process"
            assert good(np.ones(6)) == 6


def test_a_function_that_leaves_is_an_error_too() -> None:
    with team(2):
        f = act_function(1, "exit")
        synk.distribute()
        with pytest.raises(SystemExit, match="leaves"):
            f(np.ones(6))
        assert synk.get_shapes([]) == []


class _Raising:
    """An object whose pickling, or unpickling on another rank, raises an error of the program's."""

    def __init__(self, error: type[BaseException], on_other_rank: bool) -> None:
        self.error, self.home = error, os.getpid() if on_other_rank else None

    def __reduce__(self) -> Any:
        if self.home is None:
            raise self.error("not here")
        return _raise_elsewhere, (self.error, self.home)


def _raise_elsewhere(error: type[BaseException], home: int) -> None:
    if os.getpid() != home:
        raise error("not here")


@pytest.mark.slow
@pytest.mark.parametrize("on_other_rank", [True, False])
def test_an_error_of_pickling_belongs_to_one_call(on_other_rank: bool) -> None:
    with team(2):
        for error in (ValueError, SystemExit, KeyboardInterrupt, GeneratorExit):
            raising = _Raising(error, on_other_rank)
            bad = synk.function(lambda x, raising=raising: (x, raising)[0].sum(), "sum")
            with pytest.raises(error if on_other_rank else TypeError, match="not here"):
                synk.distribute()
            good = synk.function(lambda x: x.sum(), "sum")
            synk.distribute()
            assert good(np.ones(6)) == 6
            with pytest.raises(RuntimeError, match=r"call distribute\(\) first"):
                bad(np.ones(6))


def test_a_function_that_loses_a_process_of_its_own_is_no_lost_rank() -> None:
    with team(2):
        f, good = act_function(1, "lose"), act_function(-1, "nothing")
        synk.distribute()
        with pytest.raises(RuntimeError, match="another program has left its pipe") as raised:
            f(np.ones(6))
        assert not isinstance(raised.value, synk.RankLost)
        assert good(np.ones(6)) == 6


class Program:
    """A script that runs in a separate session."""

    def __init__(self, place: Path, text: str, command: list[str] | None = None) -> None:
        self.place, self.output = place, place / "output.txt"
        script = place / "script.py"
        script.write_text(textwrap.dedent(text))
        with open(self.output, "w") as output, open(script) as source:
            self.process = subprocess.Popen(
                command or [sys.executable, str(script), str(place)],
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=place,
                env={
                    **os.environ,
                    "PYTENSOR_FLAGS": f"mode={MODE}",
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}",
                },
            )

    def text(self) -> str:
        return self.output.read_text()

    def asleep(self) -> list[Path]:
        return list(self.place.glob("asleep*"))

    def left(self) -> list[int]:
        return processes_of_session(self.process.pid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def begin(*arguments: Any, name: str = "program") -> Program:
        (tmp_path / name).mkdir()
        started.append(Program(tmp_path / name, *arguments))
        return started[-1]

    yield begin
    for program in started:
        for pid in program.left():
            os.kill(pid, signal.SIGKILL)
        program.process.wait(limit(10))


SLEEPER = """
    import sys
    import numpy as np
    import lockstep.synk as synk
    from synk_acts import act_function

    synk.fork(3)
    f, good = act_function({rank}, "{what}", sys.argv[1]), act_function(-1, "nothing")
    synk.distribute()
    good(np.ones(6))
    f._called = True
    try:
        f(np.ones(6))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        print("again:", float(good(np.ones(6))), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_workers_go_with_the_program_also_while_they_compute(
    start: Callable[..., Program], number: int
) -> None:
    program = start(SLEEPER.format(rank=1, what="sleep"))
    wait_until(lambda: len(program.asleep()) == 2 or program.process.poll() is not None, "two ranks to sleep")
    assert len(program.left()) == 3, program.text()
    os.kill(program.process.pid, number)
    wait_until(lambda: not program.left(), "its workers to be gone", 10)


def test_a_worker_says_nothing_when_the_caller_leaves_while_it_starts() -> None:
    ours, theirs = socket.socketpair()
    pipe = Pipe(Connection(ours.detach()), "the worker", limit(10))
    start = Start(
        rank=1,
        size=2,
        caller=0,
        pid=os.getpid(),
        path=sys.path,
        python_path=None,
        preload=[],
        profile=False,
    )
    pipe.send(start)
    pipe.close()
    command = [sys.executable, "-m", "lockstep.synk.rank", str(theirs.fileno())]
    with theirs:
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, timeout=limit(30), cwd=ROOT
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_ctrl_c_is_raised_when_the_call_is_whole(start: Callable[..., Program]) -> None:
    program = start(
        """
        import os, signal, threading, time
        import numpy as np, pytensor, pytensor.tensor as pt
        import lockstep.synk as synk
        synk.fork(2)
        s = pytensor.shared(np.zeros(2), name="s")
        x = pt.vector("x")
        f = synk.function([x], (x.sum(), "sum"), updates=[(s, s + 1)])
        synk.distribute()
        f(np.ones(4))
        threading.Timer(0.5, lambda: os.killpg(0, signal.SIGINT)).start()  # as a terminal does
        try:
            while True:
                f(np.ones(4))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        values = synk.gather(s)
        print("whole:", bool((values[0] == values[1]).all()), "again:", float(f(np.ones(4))), flush=True)
        """
    )
    assert program.process.wait(limit(60)) == 0, program.text()
    assert program.text() == "interrupted\nwhole: True again: 4.0\n"


@pytest.mark.slow
def test_two_ctrl_c_kill_the_workers_at_once(start: Callable[..., Program]) -> None:
    program = start(SLEEPER.format(rank=1, what="sleep"))
    wait_until(lambda: len(program.asleep()) == 2 or program.process.poll() is not None, "two ranks to sleep")
    time.sleep(0.3)  # for the caller to have done its part
    for _ in range(2):
        os.killpg(program.process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert program.process.wait(limit(10)) == 1
    assert "interrupted" in program.text()
    assert "RankLost: rank 1" in program.text()
    assert "second Ctrl-C" in program.text()
    wait_until(lambda: not program.left(), "its workers to be gone", 5)


@pytest.mark.slow
def test_two_ctrl_c_interrupt_this_process_s_own_part(start: Callable[..., Program]) -> None:
    program = start(SLEEPER.format(rank=-1, what="sleep"))
    wait_until(lambda: len(program.asleep()) == 3 or program.process.poll() is not None, "three to sleep")
    for _ in range(2):
        os.killpg(program.process.pid, signal.SIGINT)
        time.sleep(0.2)
    assert program.process.wait(limit(10)) == 1
    assert program.text().startswith("interrupted\n")
    assert "rank 1" in program.text() and "second Ctrl-C" in program.text()


SERIAL = """
    import numpy as np, pytensor.tensor as pt
    import lockstep.synk as synk

    def double(array):
        return 2 * array

    class Mine(ValueError):
        pass

    assert synk.fork(2) == 2
    x = pt.vector("x")
    f = synk.function([x], (double(x).sum(), "sum"))
    synk.distribute()
    print(f(np.arange(10.0)), flush=True)
"""


@pytest.mark.parametrize(
    "how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in ("stdin", "-c"))]
)
def test_scripts_need_no_guard(start: Callable[..., Program], how: str) -> None:
    """The program also ends without a call of close()."""
    command = {
        "file": None,
        "stdin": [sys.executable, "-"],
        "-c": [sys.executable, "-c", textwrap.dedent(SERIAL)],
    }
    program = start(SERIAL, command[how])
    assert program.process.wait(limit(60)) == 0, program.text()
    assert program.text() == "90.0\n"
    wait_until(lambda: not program.left(), "its workers to be gone", 5)


@pytest.mark.slow
def test_two_programs_at_once_open_no_port_and_leave_nothing(start: Callable[..., Program]) -> None:
    before = named_memory()
    programs = [start(SLEEPER.format(rank=1, what="sleep"), name=f"program{i}") for i in range(2)]
    wait_until(lambda: all(len(program.asleep()) == 2 for program in programs), "four ranks to sleep")
    pids = [pid for program in programs for pid in program.left()]
    assert len(pids) == 6
    assert not any(sockets_in_network(pid) for pid in pids)
    assert named_memory() <= before, "anonymous memory files have no name"
    for program in programs:
        os.kill(program.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(program.left() for program in programs), "all processes to be gone", 10)


def sockets_in_network(pid: int) -> set[str]:
    """Return the inodes of a process's sockets that are of TCP or UDP."""
    inodes: set[str] = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        inodes |= {line.split()[9] for line in lines}
    return open_sockets([pid]) & inodes


UNUSUAL = """
    import os, signal, sys
    import numpy as np, torch
    import lockstep.synk as synk

    log = open("log.txt", "w")
    {before}
    synk.fork(3)

    def double(x):
        for stream in (1, 2):
            os.write(stream, b"output of a callable")
        if x[0] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * x

    f = synk.function(double, "gather")
    synk.distribute()
    rows = synk.data(np.ones(3000))
    log.write(str(f(rows).sum() + f(rows).sum()))
    try:
        f(np.array([1.0, 2, 5]))
    except synk.RankLost as lost:
        log.write(f" {{lost.how}} {{lost.signal}}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["1", "2", "0, 1, 2"])
def test_output_with_closed_streams_goes_into_no_pipe_or_block(
    start: Callable[..., Program], streams: str
) -> None:
    program = start(UNUSUAL.format(before=f"for s in ({streams},): os.close(s)"))
    assert program.process.wait(limit(60)) == 0
    assert (program.place / "log.txt").read_text().startswith("12000.0 was killed by SIGKILL")


@pytest.mark.slow
def test_ranks_start_where_the_working_directory_was_removed(start: Callable[..., Program]) -> None:
    before = "os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd()); sys.path.append('relative')"
    program = start(UNUSUAL.format(before=before))
    assert program.process.wait(limit(60)) == 0, program.text()
    assert (program.place / "log.txt").read_text().startswith("12000.0 was killed by SIGKILL")


@pytest.mark.slow
def test_a_lost_rank_has_no_exit_code_if_the_program_ignores_sigchld(start: Callable[..., Program]) -> None:
    program = start(UNUSUAL.format(before="signal.signal(signal.SIGCHLD, signal.SIG_IGN)"))
    assert program.process.wait(limit(60)) == 0, program.text()
    text = (
        "12000.0 has exited (code 0, or unknown: this process waits for all its children or ignores SIGCHLD)"
    )
    assert (program.place / "log.txt").read_text() == f"{text} None"


def test_a_lost_rank_has_no_exit_code_if_the_program_waited_for_it() -> None:
    with team(2):
        synk.function(len, "sum")
        pid = session.current_team("").workers[0].process.pid
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(-1, 0) == (pid, signal.SIGKILL)
        with pytest.raises(synk.RankLost, match=r"has exited \(code 0, or unknown: .* at: idle") as lost:
            synk.distribute()
        assert lost.value.signal is None


def test_a_lost_rank_is_an_error_where_sigpipe_ends_programs(start: Callable[..., Program]) -> None:
    program = start("""
        import os, signal, sys
        import lockstep.synk as synk

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        synk.fork(2)
        synk.function(len, "sum")
        worker = synk.session.current_team("").workers[0].process
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        try:
            synk.distribute()
        except synk.RankLost as lost:
            sys.exit(lost.signal)
    """)
    assert program.process.wait(limit(60)) == signal.SIGKILL, program.text()


def test_a_rank_that_dies_as_it_starts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_late(worker: Any, options: Any) -> None:
        worker.process.wait()
        workers.send_start(worker, options)

    monkeypatch.setattr("lockstep.synk.team.send_start", send_late)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(synk.RankLost, match="left with exit code 1 at: starting"):
        synk.fork(2)


def test_a_worker_that_can_not_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    monkeypatch.setattr(sys, "path", [*sys.path, None])  # which Python ignores
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError, match="/no/python"):
        synk.fork(2)
    assert len(os.listdir("/proc/self/fd")) == before
