"""Addresses: of the rendezvous, and of each host as the others reach it."""

import errno
import ipaddress
import socket
from collections.abc import Sequence

from lockstep.config.hosts import show
from lockstep.errors import UserError

Address = tuple[str, int]  # an address and a port


def resolve(point: Address, key: str = "rendezvous") -> Address:
    """Return the point with a numeric address in the place of a host name.

    Args:
        point: A host name or numeric address, and a port.
        key: The configuration key that the error names.

    Raises:
        UserError: The name is unknown, or the address stands for all interfaces.
    """
    try:
        candidates = socket.getaddrinfo(*point, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{key}: {point[0]} is no address that is known here: {error}") from error
    address = str(candidates[0][4][0])
    if address in ("0.0.0.0", "::"):
        raise UserError(f"{key}: must be one address, not all of a host's ({point[0]})")
    return address, point[1]


def listen(point: Address) -> socket.socket:
    """Return a socket that listens at the rendezvous address, and on no other interface.

    Raises:
        UserError: The address is not this host's, or the port is not available.
    """
    try:
        listener = bind(point)
        listener.listen(1024)
    except OSError as error:
        why = {
            errno.EADDRNOTAVAIL: "is no address of this host; it must be one of host 0's",
            errno.EADDRINUSE: "is in use; take another port, or end what listens there",
            errno.EACCES: "is a port that only root may use; take one above 1023",
        }.get(error.errno or 0, f"can't be used: {error.strerror}")
        raise UserError(f"rendezvous: {show(point)} {why}") from error
    return listener


def bind(point: Address) -> socket.socket:
    """Return a socket that is bound to the address and port and does not listen yet. Raises OSError."""
    bound = socket.socket(_family(point), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run may have ended seconds ago
        bound.bind(point)
    except OSError:
        bound.close()
        raise
    return bound


def own_address(point: Address) -> str:
    """Return the address of this host from which packets go to `point`. Sends nothing. Raises OSError."""
    with socket.socket(_family(point), socket.SOCK_DGRAM) as probe:
        probe.connect(point)
        return str(probe.getsockname()[0])


def check_reachable(addresses: Sequence[str]) -> None:
    """Refuse a loopback address on one host while another host has an address in a network.

    Args:
        addresses: Where the trainers of each host listen, by host rank.

    Raises:
        UserError: The message names the host.
    """
    on_loopback = [host for host, address in enumerate(addresses) if _is_loopback(address)]
    if on_loopback and len(on_loopback) < len(addresses):
        host = on_loopback[0]
        raise UserError(
            f"host_address: host {host} would listen on its loopback, {addresses[host]}, where no other "
            "host reaches it. Give it its address in the network, or a numeric rendezvous"
        )


def _family(point: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in point[0] else socket.AF_INET


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False
