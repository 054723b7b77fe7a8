"""One connection to torch.distributed's store. Every call has an end, whatever becomes of the other side.

The store's own timeouts do not cover all of its waits: it may wait for ever for an answer of a host that is
cut off. So a thread of its own makes the calls, and whoever asks waits as long as it will.
"""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lockstep.errors import PeerProblem, first_line
from lockstep.hosts.addresses import Address, show

STORE = "host 0"  # has the store
CALL_SECONDS = 5.0  # for one question and its answer
_BETWEEN_TRIES = 0.1


def load_torch() -> Any:
    """torch.distributed, which takes seconds to import: not before there are several hosts."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else pages of its stack stand before our one line
    import torch.distributed

    return torch.distributed


class StoreLost(PeerProblem):
    """The store does not answer, or not any more: the host that has it is gone or cut off."""

    def __init__(self, text: str) -> None:
        super().__init__(STORE, text)


class Store:
    """Values that are JSON or bytes, by key. prefix: of all keys. Any thread may call."""

    def __init__(self, calls: "_Calls", store: Any, prefix: str = "") -> None:
        self._calls, self._store, self._prefix = calls, store, prefix

    @classmethod
    def serve(cls, listener: socket.socket) -> "Store":
        """The store itself, in this process, on a socket that listens already and is the store's from now."""
        address, port = listener.getsockname()[:2]
        options = {"is_master": True, "master_listen_fd": listener.detach()}
        return cls._open((address, port), CALL_SECONDS, options)

    @classmethod
    def connect(cls, point: Address, seconds: float) -> "Store":
        """A connection to it; tries again until then. Raises StoreLost."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            try:
                socket.create_connection(point, max(0.1, min(left, CALL_SECONDS))).close()
                return cls._open(point, max(0.1, min(left, CALL_SECONDS)), {"is_master": False})
            except (OSError, StoreLost) as error:
                if time.monotonic() + _BETWEEN_TRIES >= until:
                    reason = getattr(error, "strerror", None) or error
                    raise StoreLost(f"no store answers at {show(point)}: {reason}") from error
            time.sleep(_BETWEEN_TRIES)

    @classmethod
    def _open(cls, point: Address, seconds: float, options: dict[str, Any]) -> "Store":
        tcp_store = load_torch().TCPStore
        wait = timedelta(seconds=seconds)
        calls = _Calls()
        store = calls.call(
            lambda: tcp_store(*point, wait_for_workers=False, timeout=wait, **options), seconds + 1
        )
        return cls(calls, store)

    def within(self, prefix: str) -> "Store":
        """The same connection, with a longer prefix."""
        return Store(self._calls, self._store, f"{self._prefix}{prefix}/")

    def put(self, key: str, value: Any) -> None:
        """value: what JSON can hold. Raises StoreLost, as all of these do."""
        self.put_bytes(key, json.dumps(value).encode())

    def put_bytes(self, key: str, content: bytes) -> None:
        """At most 8 MiB."""
        self._call(lambda: self._store.set(self._prefix + key, content))

    def look(self, key: str) -> Any:
        """The value, or None where there is none, or none that is JSON."""
        content = self.look_bytes(key)
        if content is None:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            return None

    def look_bytes(self, key: str) -> bytes | None:
        """The content, or None where there is none."""
        name = self._prefix + key
        found: bytes | None = self._call(lambda: self._store.get(name) if self._store.check([name]) else None)
        return found

    def remove(self, key: str) -> None:
        self._call(lambda: self._store.delete_key(self._prefix + key))

    def _call(self, function: Callable[[], Any]) -> Any:
        return self._calls.call(function, CALL_SECONDS)


class _Calls:
    """A thread that makes calls one after the other. It is left behind where one of them never ends."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="the store's calls").start()

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """What it returns. Raises StoreLost where it fails, or does not end in time."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((function, answer))
        try:
            found, error = answer.get(timeout=seconds)
        except queue.Empty:
            raise StoreLost(f"{STORE}, which has the store, has not answered for {seconds:.0f} s") from None
        if error is not None:
            raise StoreLost(f"{STORE}, which has the store, is gone: {first_line(error)}") from error
        return found

    def _work(self) -> None:
        while True:
            function, answer = self._asked.get()
            try:
                answer.put((function(), None))
            except Exception as error:  # of torch's own kinds, which are not known before it is imported
                answer.put((None, error))
