"""The rendezvous of all hosts' launchers: how they join, exchange JSON, and notice that one has exited.

Host 0 serves the store, or torchrun does. An earlier start may have left values there, so nothing counts
that was not written for this start: each host says hello with a random number that it has just drawn; host
0 answers with an invitation, which has all those numbers and a name for this start; each host confirms that
it has read its own number there. From then on every key begins with the name of the start.

Each launcher also holds a connection to every other launcher. Nothing is sent over it: when a process ends,
its kernel resets the connection, which the others notice at once.
"""

import copy
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lockstep.config.hosts import address_and_port, show
from lockstep.errors import UserError
from lockstep.hosts.addresses import Address, bind, check_reachable, listen, own_address, resolve
from lockstep.hosts.store import (
    HostFailed,
    HostLost,
    Store,
    StoreLost,
    as_type,
    load_torch,
    one_line,
    refusal,
)
from lockstep.runs.plan import HostConnection
from lockstep.signals import Interrupts

T = TypeVar("T")

LOOK_SECONDS = 0.05  # between two looks at the store for an awaited value
FAREWELL_SECONDS = 1.0  # in which others can read the last message in the store, before the store goes away
STOPPED = "was stopped as asked, before training"
_CONNECT_SECONDS = 20.0  # after all have joined, for them to connect to each other
_LONGEST = 2000  # characters of another host's line
_KEEPALIVE_SECONDS = 30  # between two empty packets, for firewalls that forget an idle connection
_RECEIVE_BYTES = 2048  # that a stranger can leave in our kernel


def attempt_key(number: int) -> str:
    """Return the key under which a host sends how an attempt ended there (agreement.py)."""
    return f"attempt {number}"


def exit_record(code: int, failure: str) -> dict[str, Any]:
    """Return what a host sends when it ends. failure: which process failed and how; empty for none."""
    return {"code": code, "text": failure, "failed": bool(failure)}


def ended(host: int, end: Any) -> HostFailed:
    """Build the error for a host that has ended. end: its exit record, as it came from the store."""
    record = end if isinstance(end, dict) else {}
    text = one_line(record.get("text") or f"host {host}: its launcher has left", _LONGEST)
    has_nothing_to_train = record.get("failed") is True and record.get("code") == 0
    return HostFailed(host, text, 0 if has_nothing_to_train else exit_code(end) or 1)


def exit_code(end: Any) -> int:
    """Return the exit status in a host's exit record; 0 if it has none."""
    code = end.get("code") if isinstance(end, dict) else None
    return code if type(code) is int and 0 < code < 256 else 0


class LivenessConnections:
    """A silent connection to each other launcher, which the kernel resets when that launcher ends.

    Each launcher listens and never accepts; the others connect. A kernel resets the connections that its
    process has not accepted when the process ends.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}

    def listen(self, address: str) -> int:
        """Listen at this address only, and return the port. Raises UserError if it is not this host's."""
        try:
            self._listener = bind(resolve((address, 0), "host_address"))
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            self._listener.listen(socket.SOMAXCONN)
        except OSError as error:
            text = f"host_address: this host can't listen at {address}: {error.strerror}"
            raise UserError(f"{text}; give one of its addresses") from error
        return int(self._listener.getsockname()[1])

    def hold(self, host: int, point: Address, seconds: float) -> None:
        """Connect to the listener of another host. Raises HostLost if that fails."""
        try:
            connection = socket.create_connection(point, seconds)
        except (OSError, ValueError) as error:  # ValueError: not an address
            text = f"host {host}: its launcher has ended, or a firewall is in the way, at {show(point)}"
            raise HostLost(host, f"{text}: {error}") from error
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        connection.setblocking(False)
        self._connections[host] = connection

    def close(self) -> None:
        """Close all connections, and the listener: the other launchers see this one as exited."""
        for each in (self._listener, *self._connections.values()):
            if each is not None:
                each.close()
        self._listener, self._connections = None, {}

    def has_ended(self, host: int) -> bool:
        """Return at once whether that host's launcher is known to have ended.

        It wrote to the store before it ended. A link that is cut does not count, since it may come back.
        """
        if (connection := self._connections.get(host)) is None:
            return False
        try:
            return connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        except OSError:  # no answer for minutes: from now on only its heartbeat counts
            self._connections.pop(host, None)
            return False


class Rendezvous:
    """The exchange of JSON values among the hosts of one start, by key and host.

    Args:
        hosts: Their number.
        host: The rank of this host.
        host_connection: How trainers of this host reach the store and the other hosts.
        store: Its keys begin with the name of the start.

    Attributes:
        interrupts: This launcher's signal handling.
        served: The store itself, if this launcher serves it.
    """

    def __init__(
        self,
        hosts: int,
        host: int,
        host_connection: HostConnection,
        store: Store,
        interrupts: Interrupts,
    ) -> None:
        self.hosts, self.host, self.host_connection, self._store = hosts, host, host_connection, store
        self._ends, self.interrupts = store, interrupts
        self.liveness_connections = LivenessConnections()
        self.served: Store | None = None
        self._is_replaced: Callable[[int], bool] | None = None

    def within(self, prefix: str) -> "Rendezvous":
        """Return a view for values under keys with a prefix, so that an exchange can be repeated."""
        view = copy.copy(self)
        view._store = self._store.within(prefix)
        return view

    def put(self, key: str, value: Any) -> None:
        """Send a value to all hosts. Raises StoreLost."""
        self._store.put(f"{key}/{self.host}", value)

    def look(self, key: str, of_host: int) -> Any:
        """Return what a host has sent so far, or None. Raises StoreLost."""
        return self._store.look(f"{key}/{of_host}")

    def get(self, key: str, seconds: float, of_host: int) -> Any:
        """Wait for a host's value and return it.

        Raises:
            HostFailed: The host has ended, or has not sent the value in time; the message names it. Or a
                second signal ends the waiting.
        """
        return self.wait(lambda: self.look(key, of_host), seconds, of_host, f"sent its {key}")

    def wait(
        self,
        look: Callable[[], T | None],
        seconds: float,
        of_host: int,
        what: str,
        every: float = LOOK_SECONDS,
    ) -> T:
        """Call `look` until it returns a value, and return that.

        Args:
            look: Returns None while there is no value.
            seconds: The deadline.
            of_host: The host that the value comes from.
            what: What that host has not done if there is no value: a participle, for the error.
            every: Seconds between two calls.

        Raises:
            HostFailed: As `get`.
        """
        deadline = time.monotonic() + seconds
        while True:
            # Asked before the look: a launcher that has ended wrote to the store before.
            has_ended = self.liveness_connections.has_ended(of_host)
            if (value := look()) is not None:
                return value
            if (end := self._ends.look(f"end/{of_host}")) is not None:
                raise ended(of_host, end)
            if has_ended:
                raise HostLost(of_host, f"host {of_host}: its launcher has exited; it has not {what}")
            if self._is_replaced and self._is_replaced(of_host):
                raise HostLost(of_host, f"host {of_host}: its launcher was started again; it has not {what}")
            if time.monotonic() > deadline:
                raise HostLost(of_host, f"host {of_host} has not {what} within {seconds:.0f} s")
            self.check_interrupts()
            time.sleep(every)

    def check_interrupts(self) -> None:
        """Raise HostFailed for this host if a second signal ends the run at once."""
        if self.interrupts.at_once:
            text = f"host {self.host}: stopped at once, without saving"
            raise HostFailed(self.host, text, self.interrupts.code)

    def gather(self, key: str, value: Any, seconds: float) -> list[Any]:
        """Return the values of all hosts, by host rank, this one's included: all of one type.

        Raises:
            HostFailed: As `get`.
            UserError: A host has sent a value of another type.
        """
        self.put(key, value)
        hint = type(value)
        return [as_type(self.get(key, seconds, host), hint, host, key) for host in range(self.hosts)]

    def connect_launchers(self, root: Store, seconds: float) -> None:
        """Open the liveness connections to all other hosts.

        Until then, only a new number says that a launcher has ended and was started again.

        Args:
            root: The store without the name of the start.
            seconds: The deadline for each answer.

        Raises:
            HostFailed: As `gather`.
            UserError: An address can't be used.
        """
        joined = _numbers_of(root.look("invitation"))
        self._is_replaced = lambda host: host > 0 and root.look(f"hello/{host}") != joined.get(str(host))
        _connect_launchers(self, seconds)
        self._is_replaced = None

    def connect(self, seconds: float) -> Store:
        """Open another connection to the same store, with the same prefix. Raises StoreLost."""
        return Store.connect(self.host_connection.store, seconds).within(self.host_connection.prefix)

    @property
    def store(self) -> Store:
        """The store, for values that are not JSON."""
        return self._store


class _Farewell:
    """The exit record that a host sends if it is stopped during the rendezvous.

    A signal's handler calls it; a call to the store may begin while another one waits for its answer.
    """

    def __init__(self, host: int, interrupts: Interrupts) -> None:
        self._host, self._interrupts = host, interrupts
        self._store: Store | None = None
        interrupts.farewell = self

    def name(self, store: Store, name: str) -> None:
        """Set the name of the start, under which the hosts that have joined read the record."""
        self._store = store.within(name)

    def __call__(self) -> None:
        if self._store is None:
            return
        with suppress(StoreLost):  # then no host can be reached
            self.put(HostFailed(self._host, f"host {self._host}: {STOPPED}", self._interrupts.code))

    def put(self, end: HostFailed) -> None:
        """Send why this host leaves, and leave the hosts that have joined the time to read it."""
        assert self._store is not None
        self._store.put(f"end/{self._host}", exit_record(end.code, str(end)))
        time.sleep(FAREWELL_SECONDS if self._host == 0 else 0)


def join_rendezvous(
    hosts: int,
    host: int,
    point: str,
    address: str | None,
    seconds: float,
    interrupts: Interrupts,
    served: Store | None = None,
    joins_again: bool = False,
) -> Rendezvous:
    """Join the launchers of all other hosts.

    Args:
        hosts: Their number.
        host: The rank of this host.
        point: The rendezvous, ADDRESS:PORT.
        address: Where this host's trainers listen; None for the address that reaches `point`.
        seconds: The deadline for the others to join.
        interrupts: Gets the exit record to send if this launcher is stopped meanwhile.
        served: The store, if this launcher serves it; otherwise host 0 or torchrun does.
        joins_again: Whether this launcher joins again after the loss of a host, so that it sends no exit
            record then.

    Raises:
        UserError: The rendezvous can't be used, or hosts have not joined in time; the message names them.
        HostFailed: Another host has left; the message names it.
    """
    where = resolve(address_and_port(point))
    load_torch()  # now, so that the import does not count
    deadline = time.monotonic() + seconds
    farewell = _Farewell(host, interrupts)
    if served:
        store, name = served, _invite(served, hosts, deadline, farewell)
    else:
        store, name = _reach(hosts, host, where, deadline, farewell)
    try:
        host_connection = HostConnection(where, name, address or own_address(where))
    except OSError as error:
        text = f"host_address: no address of this host reaches {point}: {error.strerror}"
        raise UserError(f"{text}; name one") from error
    rendezvous = Rendezvous(hosts, host, host_connection, store.within(name), interrupts)
    rendezvous.served = served
    try:
        rendezvous.connect_launchers(store, min(seconds, _CONNECT_SECONDS))
    except (UserError, HostFailed) as error:
        rendezvous.liveness_connections.close()
        text = f"host {host}: {error}" if isinstance(error, UserError) else str(error)
        if not (joins_again and isinstance(error, HostLost)):
            with suppress(StoreLost):  # then no host can be reached
                farewell.put(HostFailed(host, text, error.code))
        raise
    return rendezvous


def serve(point: str) -> Store:
    """Serve the store at the rendezvous. Raises UserError if this host can't listen there."""
    return Store.serve(listen(resolve(address_and_port(point))))


def _connect_launchers(rendezvous: Rendezvous, seconds: float) -> None:
    """Open the liveness connections to all other hosts. Raises as `gather`."""
    address = rendezvous.host_connection.address
    addresses = rendezvous.gather("address", address, seconds)
    check_reachable(addresses)
    port = rendezvous.liveness_connections.listen(address)
    for other, place in enumerate(places(rendezvous, addresses, port, seconds)):
        if other != rendezvous.host:
            rendezvous.liveness_connections.hold(other, place, seconds)


def places(rendezvous: Rendezvous, addresses: list[str], port: int, seconds: float) -> list[Address]:
    """Return where each host's launcher listens for the others. port: this host's. Raises as `gather`."""
    ports = rendezvous.gather("port", port, seconds)
    for host, received in enumerate(ports):
        if not 0 < received < 1 << 16:
            raise refusal(host, "port", received)
    return list(zip(addresses, ports, strict=True))


def _reach(hosts: int, host: int, where: Address, deadline: float, farewell: _Farewell) -> tuple[Store, str]:
    """Join at a store that another process serves; try again if it goes away meanwhile."""
    while True:
        try:
            store = Store.connect(where, max(0.0, deadline - time.monotonic()))
            if host == 0:
                return store, _invite(store, hosts, deadline, farewell)
            return store, _answer(store, host, hosts, deadline, farewell)
        except StoreLost as error:
            if time.monotonic() > deadline:
                text = f"rendezvous: host 0 has not joined at {show(where)}, as far as host {host} can see"
                raise UserError(f"{text}: {error}") from error


def _invite(store: Store, hosts: int, deadline: float, farewell: _Farewell) -> str:
    """Invite, as host 0, every host that says hello until all have confirmed. Return the start's name."""
    numbers: dict[str, Any] = {}
    name = ""
    while True:
        hellos = {str(host): _number(store.look(f"hello/{host}")) for host in range(1, hosts)}
        if hellos != numbers or not name:
            numbers, name = hellos, secrets.token_hex(8)
            if any(hellos.values()):
                farewell.name(store, name)
            store.put("invitation", {"name": name, "hosts": hosts, "numbers": numbers})
        missing = [
            host
            for host, number in numbers.items()
            if number is None or store.look(f"{name}/{host}") != number
        ]
        if not missing:
            store.put(f"{name}/go", True)
            return name
        for host, number in numbers.items():
            if number and (end := store.look(f"{name}/end/{host}")) is not None:
                farewell.put(ended(int(host), end))
                raise ended(int(host), end)
        if time.monotonic() > deadline:
            text = _not_joined(missing)
            store.put("invitation", {"refused": text, "numbers": numbers})
            time.sleep(FAREWELL_SECONDS)  # for the hosts that have joined to read it
            raise UserError(f"rendezvous: {text}")
        time.sleep(LOOK_SECONDS)


def _answer(store: Store, host: int, hosts: int, deadline: float, farewell: _Farewell) -> str:
    """Say hello, as another host than 0, and confirm the invitation. Return the start's name."""
    number, name = secrets.token_hex(8), ""
    store.put(f"hello/{host}", number)
    while True:
        invitation = store.look("invitation")
        numbers = _numbers_of(invitation)
        if numbers.get(str(host)) == number:
            if "refused" in invitation:
                raise UserError(f"rendezvous: {one_line(invitation['refused'], _LONGEST)}")
            if invitation.get("hosts") != hosts:
                theirs = one_line(invitation.get("hosts"))
                raise UserError(f"n_hosts: {hosts} on host {host}, {theirs} on host 0")
            if invitation.get("name") != name:
                name = as_type(_number(invitation.get("name")), str, 0, "invitation")
                farewell.name(store, name)
                store.put(f"{name}/{host}", number)
            if store.look(f"{name}/go"):
                return str(name)
            if (end := store.look(f"{name}/end/0")) is not None:
                raise ended(0, end)
        if time.monotonic() > deadline + FAREWELL_SECONDS:
            raise UserError(f"rendezvous: {_why_not(numbers, host, number)}")
        time.sleep(LOOK_SECONDS)


def _numbers_of(invitation: Any) -> dict[str, Any]:
    """Return the number of each host in an invitation; {} if it has none, as another version's."""
    numbers = invitation.get("numbers") if isinstance(invitation, dict) else {}
    return numbers if isinstance(numbers, dict) else {}


def _number(value: Any) -> str | None:
    """Return a number that a launcher has drawn, or None for any other value."""
    return value if isinstance(value, str) and len(value) == len(secrets.token_hex(8)) else None


def _why_not(numbers: dict[str, Any], host: int, number: str) -> str:
    """Return which hosts are missing, as far as host 0's last invitation shows."""
    if not numbers:
        return _not_joined(["0"])
    if numbers.get(str(host)) not in (None, number):
        return f"another launcher has joined as host {host}, too: give each host its own host_rank"
    missing = [other for other, said in numbers.items() if said is None]
    return _not_joined(missing or ["0"])


def _not_joined(hosts: list[str]) -> str:
    have = "has" if len(hosts) == 1 else "have"
    return f"{' and '.join(f'host {host}' for host in hosts)} {have} not joined"
