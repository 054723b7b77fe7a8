"""A client of torch.distributed's store with a deadline on every call, and checks of other hosts' values.

The store's own timeouts do not cover all of its waits: it may wait for ever for a host that is cut off. So a
thread makes the calls, and the caller waits for the thread as long as it will. A value in the store may come
from another version of Lockstep or from a stranger, so it is checked before it is used.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, TypeVar

from lockstep.comm.pipes import within
from lockstep.config.hosts import show
from lockstep.errors import PeerProblem, UserError, first_line
from lockstep.files import parse_json
from lockstep.hosts.addresses import Address
from lockstep.threads import DaemonExecutor
from lockstep.typed import convert, convert_record

T = TypeVar("T")

STORE = "host 0"  # the host that has the store
CALL_SECONDS = 5.0  # deadline of one call
_BETWEEN_TRIES = 0.1


def load_torch() -> Any:
    """Import torch.distributed, which takes seconds, and return it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else pages of its stack precede our one line
    import torch.distributed

    return torch.distributed


class HostFailed(PeerProblem):
    """Another host's launcher has ended or is silent.

    Args:
        host: Its rank.
        text: One line for people.
        code: The exit status that this host takes over.
    """

    def __init__(self, host: int, text: str, code: int = 1) -> None:
        super().__init__(f"host {host}", text)
        self.code = code


class HostLost(HostFailed):
    """Another host's launcher has exited without an exit record, or is silent: it may come back."""


class StoreLost(HostLost):
    """The store does not answer: host 0, which has it, has exited or is cut off."""

    def __init__(self, text: str) -> None:
        super().__init__(0, text)


class Store:
    """JSON values or bytes by key, shared by all hosts. Every method may be called from any thread.

    Args:
        calls: The thread that makes the calls. It is abandoned if one of them never returns.
        store: A torch TCPStore.
        prefix: Prepended to every key.
    """

    def __init__(self, calls: DaemonExecutor, store: Any, prefix: str = "") -> None:
        self._calls, self._store, self._prefix = calls, store, prefix

    @classmethod
    def serve(cls, listener: socket.socket) -> "Store":
        """Return the store itself, served by this process on a listening socket, which it takes over."""
        address, port = listener.getsockname()[:2]
        options = {"is_master": True, "master_listen_fd": listener.detach()}
        return cls._open((address, port), CALL_SECONDS, options)

    @classmethod
    def connect(cls, point: Address, seconds: float) -> "Store":
        """Return a connection to the store at `point`; try again for so many seconds. Raises StoreLost."""
        deadline = time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            try:
                socket.create_connection(point, max(0.1, min(left, CALL_SECONDS))).close()
                return cls._open(point, max(0.1, min(left, CALL_SECONDS)), {"is_master": False})
            except (OSError, StoreLost) as error:
                if time.monotonic() + _BETWEEN_TRIES >= deadline:
                    reason = getattr(error, "strerror", None) or error
                    raise StoreLost(f"no store answers at {show(point)}: {reason}") from error
            time.sleep(_BETWEEN_TRIES)

    @classmethod
    def _open(cls, point: Address, seconds: float, options: dict[str, Any]) -> "Store":
        tcp_store = load_torch().TCPStore
        wait = timedelta(seconds=seconds)
        calls = DaemonExecutor("the store's calls")
        store = _call(
            calls, lambda: tcp_store(*point, wait_for_workers=False, timeout=wait, **options), seconds + 1
        )
        return cls(calls, store)

    def within(self, prefix: str) -> "Store":
        """Return a view over the same connection with a longer prefix."""
        return Store(self._calls, self._store, f"{self._prefix}{prefix}/")

    def put(self, key: str, value: Any) -> None:
        """Store a value that JSON can hold. Raises StoreLost, as every method does."""
        self.put_bytes(key, json.dumps(value).encode())

    def put_bytes(self, key: str, content: bytes) -> None:
        """Store at most 8 MiB."""
        self._call(lambda: self._store.set(self._prefix + key, content))

    def look(self, key: str) -> Any:
        """Return the value, or None if there is no value or it is not JSON."""
        content = self.look_bytes(key)
        return None if content is None else parse_json(content)

    def look_bytes(self, key: str) -> bytes | None:
        """Return the stored bytes, or None if there are none."""
        name = self._prefix + key
        content: bytes | None = self._call(
            lambda: self._store.get(name) if self._store.check([name]) else None
        )
        return content

    def remove(self, key: str) -> None:
        """Delete the key."""
        self._call(lambda: self._store.delete_key(self._prefix + key))

    def _call(self, function: Callable[[], Any]) -> Any:
        return _call(self._calls, function, CALL_SECONDS)


def _call(calls: DaemonExecutor, function: Callable[[], Any], seconds: float) -> Any:
    """Return the function's result. Raises StoreLost if it fails or does not return in time."""
    future = calls.submit(function)
    if not within(seconds, lambda at_most: bool(wait([future], at_most).done)):
        raise StoreLost(f"{STORE}, which has the store, has not answered for {seconds:.0f} s")
    try:
        return future.result()
    except Exception as error:  # torch's own kinds are unknown before it is imported
        raise StoreLost(f"{STORE}, which has the store, does not answer: {first_line(error)}") from error


def as_type(value: Any, hint: Any, host: int, key: str) -> Any:
    """Return a value of another host, converted to a type.

    Args:
        value: As it came from JSON.
        hint: The type, as in an annotation.
        host: The host that sent it, for the error.
        key: Its name, for the error.

    Raises:
        UserError: The value is not of that type; the message names the host.
    """
    try:
        return convert(value, hint)
    except TypeError:
        raise refusal(host, key, value) from None


def as_record(kind: type[T], value: Any, host: int, key: str) -> T:
    """Return a dataclass of plain values, made of a mapping of its fields. Raises as `as_type` does.

    Args:
        kind: The dataclass.
        value: What host number `host` has sent under the key.
    """
    try:
        return convert_record(value, kind)
    except TypeError:
        raise refusal(host, key, value) from None


def refusal(host: int, key: str, value: Any) -> UserError:
    """Build the error for a malformed message from another host."""
    text = f"host {host}: its {key} is not of this version of Lockstep"
    return UserError(f"{text}: {one_line(value)}; all hosts need the same version")


def one_line(value: Any, longest: int = 200) -> str:
    """Return a value of another host as one printable line of at most `longest` characters."""
    words = " ".join(str(value).split())
    printable = "".join(letter if letter.isprintable() else "?" for letter in words[:longest])
    return printable + ("..." if len(words) > longest else "")
