"""Signs of life between launchers: each gives one a second, says how it has ended, and watches the others.

A thread does it, over a connection of its own: whatever the store or the network does, the launcher only
looks at what the thread has seen last, and never waits for it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.hosts.endings import HostFailed, ended, exit_code
from lockstep.hosts.meeting import Meeting
from lockstep.hosts.store import CALL_SECONDS, Store, StoreLost
from lockstep.hosts.told import one_line

LIFE_SECONDS = 1.0  # between two signs
ALARMED_SECONDS = 3.0  # of silence that are enough where something else says that a host is gone
FAREWELL_SECONDS = 5.0  # that the store stays for others to read how it ended
_LONGEST_ROUND = 2 * CALL_SECONDS + LIFE_SECONDS  # what took longer, this process stood still itself


@dataclass
class Seen:
    """What is known of another launcher."""

    count: Any = None  # of its signs of life
    silence: float = 0.0  # seconds since it gave one, in which this process was awake
    doing: str = "starting"
    end: Any = None
    bye: bool = False
    is_gone: bool = False

    def look(self, store: Store, host: int) -> bool:
        """At what it has told by now. Returns whether the store is still the one that it was."""
        told = store.look(f"life/{host}")
        if told is None and self.count is not None:
            return False
        if isinstance(told, dict) and told.get("count") != self.count:
            self.count, self.doing, self.silence = told.get("count"), one_line(told.get("at")), 0.0
        end = store.look(f"end/{host}")
        self.end = end if isinstance(end, dict) else None
        self.bye = store.look(f"bye/{host}") is not None
        return True


class Life:
    """doing: says what this host is at. patience: seconds of silence after which a host has failed."""

    def __init__(self, meeting: Meeting, doing: Callable[[], str], patience: float) -> None:
        self._meeting, self._doing, self._patience = meeting, doing, patience
        self._others = {host: Seen() for host in range(meeting.hosts) if host != meeting.host}
        self._gone = ""  # why the store will not answer any more
        self._unanswered = ""  # why it does not, just now
        self._has_left = False
        self._count = 0
        self._said: dict[str, Any] = {}  # how this one ended, and good-bye
        self._wake = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="signs of life").start()

    def problem(self, alarmed: bool = False) -> HostFailed | None:
        """Which other host has failed, as far as is known; at once. alarmed: something else says so, too."""
        for host, seen in self._others.items():
            if seen.end is not None and seen.end.get("failed"):
                return ended(host, seen.end)
        if self._gone:
            return HostFailed(0, f"host 0: its launcher is gone, and the store with it; {self._last_seen(0)}")
        for host, seen in self._others.items():
            if seen.end is None and seen.is_gone:
                return HostFailed(host, f"host {host}: its launcher is gone; {self._last_seen(host)}")
        patience = min(ALARMED_SECONDS, self._patience) if alarmed else self._patience
        for host, seen in self._others.items():
            if seen.end is None and seen.silence > patience:
                seconds = f"for {seen.silence:.0f} s"
                if self._unanswered:  # nobody can be seen then
                    text = f"host 0: its launcher, which has the store, has not answered {seconds}"
                    return HostFailed(0, f"{text}; {self._last_seen(0)}")
                text = f"host {host}: its launcher has given no sign of life {seconds}"
                return HostFailed(host, f"{text}; {self._last_seen(host)}")
        return None

    def _last_seen(self, host: int) -> str:
        seen = self._others.get(host)
        return f"it was at: {seen.doing}" if seen else "it is this host"

    def code(self) -> int:
        """The exit code of another host that was stopped as asked, 0 where none was."""
        return max((exit_code(seen.end) for seen in self._others.values()), default=0)

    def end(self, code: int, failure: str = "") -> None:
        """Tells the others how this one has ended. failure: which host, what and how; empty: none."""
        self._say("end", {"code": code, "text": failure, "failed": bool(failure)})

    def wait_for_ends(self, at_once: Callable[[], bool]) -> HostFailed | None:
        """Until all have ended, or one has failed, which is returned; at_once: whether to wait no more."""
        while not at_once() and any(seen.end is None for seen in self._others.values()):
            if (failed := self.problem()) is not None:
                return failed
            time.sleep(0.05)
        return self.problem()

    def end_now(self, code: int, failure: str) -> None:
        """As `end`, from a signal's handler, which may not wait for locks; returns soon."""
        self._said["end"] = {"code": code, "text": failure, "failed": True}
        until = time.monotonic() + 2 * LIFE_SECONDS
        while self._said and time.monotonic() < until:
            time.sleep(0.05)

    def leave(self) -> None:
        """Says good-bye. Host 0, with whom the store goes, waits a little until the others have said so."""
        self._say("bye", True)
        until = time.monotonic() + FAREWELL_SECONDS
        while time.monotonic() < until and not self._gone and not self._unanswered:
            missing = (
                [seen for seen in self._others.values() if not seen.bye] if self._meeting.host == 0 else []
            )
            if not self._said and all(seen.is_gone or seen.silence > ALARMED_SECONDS for seen in missing):
                break
            time.sleep(0.05)
        self._has_left = True

    def _say(self, key: str, value: Any) -> None:
        self._said[key] = value
        self._wake.set()

    def _run(self) -> None:
        store: Store | None = None
        before = time.monotonic()
        while not self._gone and not self._has_left:
            try:
                store = store or self._meeting.connect(2 * LIFE_SECONDS)
                self._tell(store)
                for host, seen in self._others.items():
                    is_gone = self._meeting.lifelines.has_ended(host)
                    if not seen.look(store, host):
                        self._gone = "its store is another's now"
                    seen.is_gone = is_gone  # after the look: what it has told, it told before
                self._unanswered = ""
            except StoreLost as error:
                store, self._unanswered = None, str(error)
                refused = isinstance(error.__cause__, ConnectionRefusedError)
                if refused or self._meeting.lifelines.has_ended(0):
                    self._gone = str(error)
            now = time.monotonic()
            for seen in self._others.values():
                seen.silence += min(now - before, _LONGEST_ROUND)
            before = now
            self._wake.wait(LIFE_SECONDS)
            self._wake.clear()

    def _tell(self, store: Store) -> None:
        self._count += 1
        store.put(f"life/{self._meeting.host}", {"count": self._count, "at": self._doing()})
        for key in list(self._said):
            store.put(f"{key}/{self._meeting.host}", self._said[key])
            del self._said[key]
