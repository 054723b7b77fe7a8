"""What can cut a command short: a rank that is lost, and Ctrl-C, which can wait."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class RankLost(RuntimeError):
    """A worker has died, or has not answered in time. The team is of no use any more: close(), then fork()
    again.

    rank, pid: whose. signal: the number of the signal that ended it, None where none did. doing: the last
    line of its status board.
    """

    def __init__(self, rank: int, pid: int, how: str, signal_number: int | None, doing: str) -> None:
        super().__init__(rank, pid, how, signal_number, doing)
        self.rank, self.pid, self.signal, self.doing = rank, pid, signal_number, doing
        self.how = how

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how} at: {self.doing}; close(), then fork() again"


@contextmanager
def whole(give_up: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C waits until what is done inside is whole. A second one calls give_up, and is raised at once."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    frames: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        if len(frames) > 1:
            give_up()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if frames:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    if frames:
        previous(signal.SIGINT, frames[0])
