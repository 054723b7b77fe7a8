"""The launcher's view of a child: what it has said of itself, and whether it is well."""

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.comm.messages import Failed, Finished
from lockstep.comm.pipes import Pipe
from lockstep.launch.status import StatusBoard


@dataclass
class Child:
    """The launcher's view of one child."""

    name: str
    entry: str
    process: BaseProcess
    control: Pipe
    moved: float  # when it last gave a sign of life (monotonic clock)
    spares: list[tuple[Any, ...]]  # arguments to start it again with
    board: StatusBoard | None = None
    board_count: int = 0
    listening: bool = True  # until it closes its end of the control pipe
    failure: Failed | None = None
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    @property
    def doing(self) -> str:
        return self.board.read() if self.board else "starting"

    def notice_movement(self) -> None:
        """Remembers the time when the status board has changed since the last call."""
        count = self.board.count() if self.board else 0
        if count != self.board_count:
            self.board_count, self.moved = count, time.monotonic()

    def is_well(self) -> bool:
        """Working, or done: all that it was for is in place when it says so, however its process ends."""
        return self.failure is None and (self.process.exitcode is None or self.finished is not None)


def close_connections(arguments: tuple[Any, ...]) -> None:
    """Closes this process's copies of connections among a child's arguments."""
    for each in arguments:
        if isinstance(each, Connection):
            each.close()
