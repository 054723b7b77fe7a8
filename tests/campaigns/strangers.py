"""Bytes that an unrelated client sends to the rendezvous of several hosts while a real host uses it.

The store is torch's, on its own threads in this process, as in a launcher: a crash of the store is a case
that kills this process. Valid bytes come from a recorded conversation.
"""

import functools
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from lockstep.hosts.addresses import Address, listen
from lockstep.hosts.store import CALL_SECONDS, Store

CONVERSATION = "conversation.requests"
_HELLO = 10  # bytes: the store's magic number, and the first ping with its nonce
_LONGEST = 1 << 20  # bytes that one client sends


def make_conversation(folder: Path) -> None:
    """Return the requests of a launcher and a trainer, of every kind that torch's client sends."""
    point, _ = _live()
    with _recorded(point) as (recorder, said):
        host = Store.connect(recorder, CALL_SECONDS)
        host.put("life/1", {"count": 1, "at": "epoch 1, step 2: exchanging"})
        host.look("life/1")
        host.look("end/0")
        host.put_bytes("piece/0", b"checkpoint" * 50)
        host.remove("piece/0")
        client = host._store
        client.add("n", 3)
        client.multi_set(["host 0", "host 1"], ["is here", "is here"])
        client.multi_get(["host 0", "host 1"])
        client.append("host 0", "!")
        client.compare_set("host 0", "is here!", "has left")
        client.num_keys()
        client.wait(["host 0", "host 1"], timedelta(seconds=CALL_SECONDS))
        client.delete_key("n")  # an answer shows that all requests have arrived
    content = bytearray(max(said, key=len))  # the other connection only probed the port
    content[_HELLO - 4 : _HELLO] = bytes(4)  # the client's process number: alike in all recordings
    (folder / CONVERSATION).write_bytes(content)


def send_to_store(folder: Path) -> None:
    """Send the bytes to the store and disconnect. The store may close the connection or keep listening.

    Raises:
        AssertionError: A value of the real host is lost.
        StoreLost: The real host gets no answer.
        OSError: No other host can connect.
    """
    path = folder / CONVERSATION
    point, host = _live()
    host.put("true host", "is here")
    _say(point, path.read_bytes()[:_LONGEST] if path.exists() else b"")
    assert host.look("true host") == "is here", "what a true host has put there is gone"
    _come(point)


@functools.cache
def _live() -> tuple[Address, Store]:
    """Yield a store in this process, and a real host's connection to it."""
    listener = listen(("127.0.0.1", 0))
    point: Address = listener.getsockname()[:2]
    return point, Store.serve(listener)


def _say(point: Address, words: bytes) -> None:
    with socket.create_connection(point, CALL_SECONDS) as stranger, suppress(OSError):
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


def _come(point: Address) -> None:
    """Connect like the next host, whose greeting must be answered. Raises OSError."""
    nonce = os.urandom(4)
    with socket.create_connection(point, CALL_SECONDS) as other:
        other.sendall(struct.pack("<BIB", 0, 0x3C85F7CE, 13) + nonce)
        assert other.recv(4) == nonce, "the store gives a newcomer another answer"


@contextmanager
def _recorded(point: Address) -> Iterator[tuple[Address, list[bytearray]]]:
    """Yield an address that forwards to `point`, and the bytes that each connection sent."""
    said: list[bytearray] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, point, said), daemon=True).start()
        yield listener.getsockname(), said
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, point: Address, said: list[bytearray]) -> None:
    with suppress(OSError):  # the listener is closed
        while True:
            caller, _ = listener.accept()
            store = socket.create_connection(point)
            said.append(bytearray())
            for one, other, kept in ((caller, store, said[-1]), (store, caller, bytearray())):
                threading.Thread(target=_pass_on, args=(one, other, kept), daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while words := one.recv(1 << 16):
            kept += words
            other.sendall(words)
        other.shutdown(socket.SHUT_WR)
