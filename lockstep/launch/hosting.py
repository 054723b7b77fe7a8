"""A launcher's part among those of other hosts (lockstep/hosts): coming together, telling, leaving."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.errors import PeerProblem, UserError
from lockstep.hosts import agreement, folders, torchrun
from lockstep.hosts.endings import HostFailed
from lockstep.hosts.life import Life
from lockstep.hosts.meeting import STOPPED, Meeting, meet
from lockstep.hosts.told import as_record, one_line, refusal
from lockstep.interrupts import Interrupts
from lockstep.launch.processes import Ending, Processes
from lockstep.runs import folder as runfolder
from lockstep.runs.folder import Run
from lockstep.runs.plan import Joint

WORD_SECONDS = 8.0  # after a failure that comes from another host, for that one to say what it was
_LOOK_SECONDS = 0.1


class Alone:
    """A launcher without others. joint: for trainers to join those of other hosts. writes: into its run's
    folder, checkpoints too; else another host does. log: the name of its log there."""

    joint: Joint | None = None
    host, writes, log = 0, True, "log.jsonl"

    def bring_checkpoint(self, config: Config) -> list[str]:
        """Where a run is resumed: has the newest checkpoint come here from whoever has it. Lines about it."""
        return []

    def agree(self, config: Config, dataset: Dataset) -> None:
        """Raises UserError on all hosts where they differ in what has to be alike."""

    def open_run(self, config: Config, n_train: int) -> Run:
        """As runfolder.open_run does; where the folder is another host's, it is that host's run."""
        return runfolder.open_run(config, n_train)

    def watch(self, processes: Processes, on_message: Callable[[Any], None]) -> Ending:
        """As processes.watch, and the other hosts are watched, too."""
        return processes.watch(on_message)

    def conclude(self, ending: Ending) -> Ending:
        """Tells the others how the run has ended here. Returns how it has ended anywhere."""
        return ending


@dataclasses.dataclass(frozen=True)
class _RunThere:
    """Host 0's run: the name of its folder, and of the record of the checkpoint it goes on from, or ''."""

    folder: str
    start: str


class Together(Alone):
    """A launcher that has come together with others."""

    def __init__(self, meeting: Meeting, config: Config, interrupts: Interrupts) -> None:
        self.meeting, self.joint, self.host = meeting, meeting.joint, meeting.host
        self._deadline, self._interrupts = config.wait_deadline, interrupts
        self._processes: Processes | None = None
        self._told = False
        self.life = Life(meeting, self._doing, config.wait_deadline)
        self.log = f"host{self.host}.jsonl" if self.host else Alone.log
        self.writes = True

    def bring_checkpoint(self, config: Config) -> list[str]:
        wishes = self.meeting.gather("resume_train", str(config.resume_train), self._deadline)
        for host, wish in enumerate(wishes):
            if wish != wishes[0]:
                values = f"{one_line(wishes[0])} on host 0, {one_line(wish)} on host {host}"
                raise UserError(f"resume_train: {values}")
        shared = folders.is_shared(self.meeting, Path(config.weights_dir), self._deadline)
        self.writes = not shared
        notices = ["weights_dir is host 0's, which writes there alone"] if shared else []
        if config.resume_train:
            notices.append(folders.bring_newest(self.meeting, config, shared))
        return list(filter(None, notices))

    def agree(self, config: Config, dataset: Dataset) -> None:
        agreement.agree(self.meeting, agreement.facts_of(config, dataset), self._deadline)

    def open_run(self, config: Config, n_train: int) -> Run:
        run = super().open_run(config, n_train) if self.writes else None
        if self.host == 0 and run:
            start = run.start.path.with_suffix(".json").name if run.start else ""
            self.meeting.put("run", vars(_RunThere(run.folder.name, start)))
        there = as_record(_RunThere, self.meeting.get("run", self._deadline, 0), 0, "run")
        run = run or self._run_of_host_0(Path(config.weights_dir), there)
        mine = run.start.state.sha256 if run.start else "nothing"
        for host, sha256 in enumerate(self.meeting.gather("start", mine, self._deadline)):
            if sha256 != mine:
                text = f"run_name: host {self.host} and host {host} would go on from different checkpoints"
                raise UserError(f"{text} of {config.run_name}")
        return run

    def _run_of_host_0(self, weights_dir: Path, there: "_RunThere") -> Run:
        names = [name for name in (there.folder, there.start) if name]
        if not there.folder or any(name in (".", "..") or name != Path(name).name for name in names):
            raise refusal(0, "run", vars(there))
        folder = weights_dir / there.folder
        found = runfolder.verify(folder / "checkpoints" / there.start) if there.start else None
        return Run(folder, found, [], open(os.devnull))  # host 0 has the lock

    def watch(self, processes: Processes, on_message: Callable[[Any], None]) -> Ending:
        self._processes = processes
        return processes.watch(on_message, self.life.problem)

    def conclude(self, ending: Ending) -> Ending:
        failed = self._word_of_another() if ending.awaited else None
        if ending.code and not ending.message and self._processes and not self._processes.has_begun:
            ending = dataclasses.replace(ending, message=STOPPED)  # the others need not go on to a first step
        if ending.message and failed is None and not ending.message.startswith("host "):
            ending = dataclasses.replace(ending, message=f"host {self.host}: {ending.message}")
        if failed is None:
            self.tell(ending.code, ending.message)
            if ending.message:
                return ending
            failed = self.life.wait_for_ends(lambda: self._interrupts.at_once)
        if failed is None:  # all is well, or one of them was asked to stop
            return Ending(ending.code or self.life.code())
        self.tell(failed.code, str(failed))
        return Ending(failed.code, str(failed), awaited=failed.peer)

    def tell(self, code: int, failure: str) -> None:
        """Once: how this host has ended."""
        if not self._told:
            self.life.end(code, failure)
        self._told = True

    def stop_now(self) -> None:
        """From a signal's handler, before there are processes or after them."""
        if not self._told:
            self.life.end_now(self._interrupts.code, f"host {self.host}: {STOPPED}")
        self._told = True

    def _word_of_another(self) -> HostFailed | None:
        """Who says, or lets be seen, that it has failed, soon after something here has failed for that."""
        until = time.monotonic() + WORD_SECONDS
        while (failed := self.life.problem(alarmed=True)) is None and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return failed

    def _doing(self) -> str:
        return self._processes.doing() if self._processes else "before its processes are started"


@contextmanager
def together(config: Config, interrupts: Interrupts) -> Iterator[Alone]:
    """Comes together with the launchers of the other hosts; without any, at once. Tells them at its end.

    Raises UserError where a host does not come, HostFailed where one has failed meanwhile.
    """
    if config.hosts == 1:
        yield Alone()
        return
    assert config.host is not None and config.meeting_point is not None, "checked"
    place = config.hosts, config.host, config.meeting_point, config.address
    meeting = meet(*place, config.wait_deadline, not torchrun.has_store(), interrupts)
    others = Together(meeting, config, interrupts)
    interrupts.farewell = others.stop_now
    try:
        yield others
    except HostFailed as failed:
        others.tell(failed.code, str(failed))
        raise
    except (UserError, PeerProblem) as error:
        others.tell(error.code, f"host {others.host}: {error}")
        raise
    finally:
        others.tell(1, f"host {others.host}: its launcher has failed")  # else it has told by now
        others.life.leave()


def leave(code: int) -> None:
    """Ends this process with an exit code, whatever threads still wait for a host that does not answer."""
    if "torch" not in sys.modules:  # it has come together with nobody
        sys.exit(code)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
