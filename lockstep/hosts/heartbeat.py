"""The heartbeat of a launcher: once a second it writes a count and its exit record, and reads the others'.

A thread does this over a separate connection. Whatever happens to the store or the network, the launcher
reads only what the thread has seen last, and never waits for the store.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.hosts.rendezvous import Rendezvous, attempt_key, ended, exit_code, exit_record
from lockstep.hosts.store import CALL_SECONDS, HostFailed, HostLost, Store, StoreLost, one_line

LIFE_SECONDS = 1.0  # between two heartbeats
ALARMED_SECONDS = 3.0  # of silence that suffice when something else also says that a host has failed
FAREWELL_SECONDS = 5.0  # that the store stays for others to read the exit record
_LONGEST_ROUND = 2 * CALL_SECONDS + LIFE_SECONDS  # a longer round means that this process stood still
_INTERRUPT_SECONDS = 0.05  # between two looks for what a signal's handler has set


@dataclass
class Seen:
    """The last known state of another launcher."""

    count: Any = None  # of its heartbeats
    silence: float = 0.0  # seconds since its last heartbeat, as far as this process was awake
    doing: str = "starting"
    is_fresh: bool = False  # this round has found another count
    end: Any = None  # its exit record
    bye: bool = False
    is_gone: bool = False  # its liveness connection was reset
    ended_attempt: int | None = None  # the last attempt of which it has sent the end, other than 'done'

    def look(self, store: Store, host: int, attempt: int | None = None) -> bool:
        """Read what the host has written. Return whether the store is still the same one.

        Args:
            attempt: The present attempt of this host.
        """
        life = store.look(f"life/{host}")
        if life is None and self.count is not None:
            return False
        if isinstance(life, dict) and life.get("count") != self.count:
            self.count, self.doing, self.is_fresh = life.get("count"), one_line(life.get("at")), True
        end = store.look(f"end/{host}")
        self.end = end if isinstance(end, dict) else None
        self.bye = store.look(f"bye/{host}") is not None
        if attempt is not None and attempt != self.ended_attempt:
            attempt_end = store.look(f"{attempt_key(attempt)}/{host}")
            if isinstance(attempt_end, dict) and attempt_end.get("kind") != "done":
                self.ended_attempt = attempt
        return True


class Heartbeat:
    """The heartbeat of this launcher and its watch over the others.

    Args:
        rendezvous: The hosts of this start.
        doing: Returns what this host is at, in a few words.
        patience: Seconds of silence after which a host counts as failed.
    """

    def __init__(self, rendezvous: Rendezvous, doing: Callable[[], str], patience: float) -> None:
        self._rendezvous, self._doing, self._patience = rendezvous, doing, patience
        self._others = {host: Seen() for host in range(rendezvous.hosts) if host != rendezvous.host}
        self._store_ended = ""  # why the store will not answer any more
        self._unanswered = ""  # why the store does not answer now
        self._has_left = False
        self._count = 0
        self.attempt: int | None = None  # whose end on other hosts is looked for
        self._unsent: dict[str, Any] = {}  # the exit record and the farewell, until they are written
        self._wake = threading.Event()
        self._round_ended = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def problem(self, alarmed: bool = False) -> HostFailed | None:
        """Return which other host has failed, as far as is known; at once.

        Args:
            alarmed: Something else says so, too, so that less silence is enough.
        """
        for host, seen in self._others.items():
            if seen.end is not None and seen.end.get("failed"):
                return ended(host, seen.end)
        if self._store_ended:
            return HostLost(
                0, f"host 0: its launcher has exited, and the store with it; {self._last_seen(0)}"
            )
        for host, seen in self._others.items():
            if seen.end is None and seen.is_gone:
                return HostLost(host, f"host {host}: its launcher has exited; {self._last_seen(host)}")
        patience = min(ALARMED_SECONDS, self._patience) if alarmed else self._patience
        for host, seen in self._others.items():
            if seen.end is None and seen.silence > patience:
                return self._silent(host, seen.silence)
        return None

    def wait_for_problem(self, seconds: float) -> HostFailed | None:
        """Return which other host has failed, as soon as one is known to; None after `seconds`.

        A second signal ends the waiting.
        """
        self._wait(lambda: self.problem(alarmed=True) is not None, seconds)
        return self.problem(alarmed=True)

    def _silent(self, host: int, seconds: float) -> HostFailed:
        if self._unanswered:  # then no host's heartbeat can be read
            text = f"host 0: its launcher, which has the store, has not answered for {seconds:.0f} s"
            return HostLost(0, f"{text}; {self._last_seen(0)}")
        text = f"host {host}: its launcher has sent no heartbeat for {seconds:.0f} s"
        return HostLost(host, f"{text}; {self._last_seen(host)}")

    def ended_attempt(self) -> HostFailed | None:
        """Return which other host has ended the present attempt because of a failure there; at once."""
        for host, seen in self._others.items():
            if self.attempt is not None and seen.ended_attempt == self.attempt:
                return HostFailed(host, f"host {host} has ended its processes")
        return None

    def _last_seen(self, host: int) -> str:
        seen = self._others.get(host)
        return f"it was at: {seen.doing}" if seen else "it is this host"

    def code(self) -> int:
        """Return the exit status of another host that was stopped as asked; 0 if none was."""
        return max((exit_code(seen.end) for seen in self._others.values()), default=0)

    def end(self, code: int, failure: str = "") -> None:
        """Send this host's exit record."""
        self._send("end", exit_record(code, failure))

    def wait_for_end(self, host: int) -> None:
        """Wait until a host has ended or counts as failed, or for a second signal."""
        seen = self._others[host]

        def is_over() -> bool:
            is_lost = seen.is_gone or seen.silence > self._patience or bool(self._store_ended)
            return is_lost or seen.end is not None

        self._wait(is_over)

    def wait_for_ends(self) -> HostFailed | None:
        """Wait until all hosts have ended, or for a second signal. Return the first that failed, if any."""
        others = self._others.values()
        self._wait(lambda: self.problem() is not None or all(seen.end is not None for seen in others))
        return self.problem()

    def _wait(self, is_over: Callable[[], bool], seconds: float = math.inf) -> None:
        """Wait until `is_over` holds after a round, for a second signal, or until `seconds` have passed."""
        until, interrupts = time.monotonic() + seconds, self._rendezvous.interrupts
        with self._round_ended:
            while not interrupts.at_once and time.monotonic() < until:
                if self._round_ended.wait_for(is_over, _INTERRUPT_SECONDS):
                    return

    def end_now(self, code: int, failure: str) -> None:
        """Do as `end`, from a signal's handler, and return soon: host 0, when the others have read it.

        It polls: the main thread may hold a lock that a condition or an event would wait for.
        """
        self._unsent["end"] = exit_record(code, failure)
        deadline = time.monotonic() + 3 * LIFE_SECONDS
        while not self._may_leave() and time.monotonic() < deadline:
            time.sleep(_INTERRUPT_SECONDS)

    def leave(self) -> None:
        """Say farewell. Host 0, whose store ends with it, waits a few seconds for the others' farewells."""
        if self._has_left:
            return
        self._send("bye", True)
        with self._round_ended:
            self._round_ended.wait_for(self._may_leave, FAREWELL_SECONDS)
        self._has_left = True

    def abandon(self) -> None:
        """End the heartbeat without a farewell, and close the connections to the other launchers."""
        self._has_left = True
        self._wake.set()
        self._rendezvous.liveness_connections.close()

    def _may_leave(self) -> bool:
        if self._store_ended or self._unanswered:
            return True
        others = self._others.values() if self._rendezvous.host == 0 else ()
        missing = [seen for seen in others if not seen.bye]
        return not self._unsent and all(seen.is_gone or seen.silence > ALARMED_SECONDS for seen in missing)

    def _send(self, key: str, value: Any) -> None:
        self._unsent[key] = value
        self._wake.set()

    def _run(self) -> None:
        store: Store | None = None
        before = time.monotonic()
        while not self._store_ended and not self._has_left:
            store = self._beat(store)
            now = time.monotonic()
            for seen in self._others.values():
                seen.silence = 0.0 if seen.is_fresh else seen.silence + min(now - before, _LONGEST_ROUND)
                seen.is_fresh = False
            with self._round_ended:
                self._round_ended.notify_all()
            self._wake.wait(LIFE_SECONDS)
            self._wake.clear()
            before = max(now, time.monotonic() - LIFE_SECONDS)  # no longer than it was awake

    def _beat(self, store: Store | None) -> Store | None:
        """Write and read once. Return the connection, or None if it was lost."""
        connections = self._rendezvous.liveness_connections
        try:
            store = store or self._rendezvous.connect(2 * LIFE_SECONDS)
            self._write(store)
            for host, seen in self._others.items():
                has_ended = connections.has_ended(host)
                if not seen.look(store, host, self.attempt):
                    self._store_ended = "its store belongs to another start now"
                seen.is_gone = has_ended  # after the look: it wrote its exit record before it ended
            self._unanswered = ""
            return store
        except StoreLost as error:
            self._unanswered = str(error)
            if isinstance(error.__cause__, ConnectionRefusedError) or connections.has_ended(0):
                self._store_ended = str(error)
            return None

    def _write(self, store: Store) -> None:
        self._count += 1
        store.put(f"life/{self._rendezvous.host}", {"count": self._count, "at": self._doing()})
        for key in list(self._unsent):
            store.put(f"{key}/{self._rendezvous.host}", self._unsent[key])
            del self._unsent[key]
