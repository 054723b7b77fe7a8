"""Addresses of hosts: where they meet, and where each can be reached by the others."""

import errno
import ipaddress
import socket
from collections.abc import Sequence

from lockstep.errors import UserError

Address = tuple[str, int]  # an address and a port


def show(point: Address) -> str:
    """As it is written in a configuration."""
    address, port = point
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def resolve(point: Address, key: str = "meeting_point") -> Address:
    """With the number of an address that may be a name. Raises UserError where nobody knows it."""
    try:
        found = socket.getaddrinfo(*point, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{key}: {point[0]} is no address that is known here: {error}") from error
    address = str(found[0][4][0])
    if address in ("0.0.0.0", "::"):
        raise UserError(f"{key}: must be one address, not all of a host's ({point[0]})")
    return address, point[1]


def listen(point: Address) -> socket.socket:
    """A socket that listens at the meeting point and nowhere else. Raises UserError where that can't be."""
    try:
        listener = bind(point)
        listener.listen(1024)
    except OSError as error:
        why = {
            errno.EADDRNOTAVAIL: "is no address of this host; it must be one of host 0's",
            errno.EADDRINUSE: "is in use; take another port, or end what listens there",
            errno.EACCES: "is a port that only root may use; take one above 1023",
        }.get(error.errno or 0, f"can't be used: {error.strerror}")
        raise UserError(f"meeting_point: {show(point)} {why}") from error
    return listener


def bind(point: Address) -> socket.socket:
    """A socket at that address and port, which does not listen yet. Raises OSError."""
    bound = socket.socket(_family(point), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run that ended may be seconds ago
        bound.bind(point)
    except OSError:
        bound.close()
        raise
    return bound


def own_address(point: Address) -> str:
    """The address of this host from which packets go to `point`. Nothing is sent. Raises OSError."""
    with socket.socket(_family(point), socket.SOCK_DGRAM) as probe:
        probe.connect(point)
        return str(probe.getsockname()[0])


def _family(point: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in point[0] else socket.AF_INET


def check_reachable(addresses: Sequence[str]) -> None:
    """addresses: where the trainers of each host listen. Raises UserError where others can't reach some."""
    inside = [host for host, address in enumerate(addresses) if _is_loopback(address)]
    if inside and len(inside) < len(addresses):
        host = inside[0]
        raise UserError(
            f"address: host {host} would listen on its loopback, {addresses[host]}, where no other reaches "
            "it: give it its address in the network, or a meeting_point in numbers"
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
