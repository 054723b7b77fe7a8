"""Connections by which launchers notice at once that another has ended, in whatever way.

Each launcher listens, and accepts nobody; the others connect and hold on. Nothing is said and nothing is
read. When a process ends, its kernel resets the connections that it has not accepted.
"""

import socket

from lockstep.errors import UserError
from lockstep.hosts.addresses import Address, bind, resolve, show
from lockstep.hosts.endings import HostFailed

_KEEPALIVE_SECONDS = 30  # between two empty packets, for firewalls that forget a connection without any
_ROOM = 2048  # bytes that a stranger can leave in our kernel


class Lifelines:
    """One to each other launcher; none before `hold`."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._held: dict[int, socket.socket] = {}

    def listen(self, address: str) -> int:
        """There alone. Returns the port. Raises UserError where this host has no such address."""
        try:
            self._listener = bind(resolve((address, 0), "address"))
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM)
            self._listener.listen(socket.SOMAXCONN)
        except OSError as error:
            text = f"address: this host can't listen at {address}: {error.strerror}"
            raise UserError(f"{text}; give one of its own") from error
        return int(self._listener.getsockname()[1])

    def hold(self, host: int, point: Address, seconds: float) -> None:
        """Connects to another host's, which listens by now. Raises HostFailed where that can't be."""
        try:
            held = socket.create_connection(point, seconds)
        except (OSError, ValueError) as error:  # ValueError: no address at all
            text = f"host {host}: its launcher has ended, or a firewall is in the way, at {show(point)}"
            raise HostFailed(host, f"{text}: {error}") from error
        held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        held.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        held.setblocking(False)
        self._held[host] = held

    def has_ended(self, host: int) -> bool:
        """Whether it is known by now that this host's launcher has ended; at once.

        What it told the store, it told before. A link that is cut does not count: it may come back.
        """
        if (held := self._held.get(host)) is None:
            return False
        try:
            return held.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        except OSError:  # no answer for minutes: from now on its signs of life alone count
            self._held.pop(host, None)
            return False
