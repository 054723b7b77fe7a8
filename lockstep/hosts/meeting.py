"""How the launchers of all hosts come together, and what they tell each other.

Host 0 has the store, or torchrun has it. Whatever an earlier start has left in there counts for nothing: each
host says hello with a number of its own that it has just drawn, host 0 answers with everyone's numbers and a
name for this start, and everyone says that it has read its own there. What is told after that has this name
before its key.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lockstep.config.hosts import address_and_port
from lockstep.errors import UserError
from lockstep.hosts.addresses import Address, check_reachable, listen, own_address, resolve, show
from lockstep.hosts.endings import LONGEST, HostFailed, ended
from lockstep.hosts.lifelines import Lifelines
from lockstep.hosts.store import Store, StoreLost, load_torch
from lockstep.hosts.told import as_type, one_line, refusal
from lockstep.interrupts import Interrupts
from lockstep.runs.plan import Joint

T = TypeVar("T")

LOOK_SECONDS = 0.05  # between two looks at the store for something that is awaited
FAREWELL_SECONDS = 1.0  # in which others can read a last word in the store, before it goes away
STOPPED = "was stopped as asked, before training"


class Meeting:
    """What the hosts of one start tell each other: JSON, by key and host. lifelines: to their launchers."""

    def __init__(self, hosts: int, host: int, joint: Joint, store: Store) -> None:
        self.hosts, self.host, self.joint, self._store = hosts, host, joint, store
        self.lifelines = Lifelines()

    def put(self, key: str, value: Any) -> None:
        """Tells all hosts. Raises StoreLost."""
        self._store.put(f"{key}/{self.host}", value)

    def look(self, key: str, of_host: int) -> Any:
        """What a host has told by now; None where it has not. Raises StoreLost."""
        return self._store.look(f"{key}/{of_host}")

    def get(self, key: str, seconds: float, of_host: int) -> Any:
        """What a host tells. Raises HostFailed naming one that has ended or does not in time; StoreLost."""
        return self.wait(lambda: self.look(key, of_host), seconds, of_host, f"told its {key}")

    def wait(
        self,
        look: Callable[[], T | None],
        seconds: float,
        of_host: int,
        what: str,
        every: float = LOOK_SECONDS,
    ) -> T:
        """Looks until something is there. what: has the host not done, if not. Raises as `get` does."""
        until = time.monotonic() + seconds
        while True:
            is_gone = self.lifelines.has_ended(of_host)  # asked first: what it has told, it told before
            if (found := look()) is not None:
                return found
            if (end := self.look("end", of_host)) is not None:
                raise ended(of_host, end)
            if is_gone:
                raise HostFailed(of_host, f"host {of_host}: its launcher is gone; it has not {what}")
            if time.monotonic() > until:
                raise HostFailed(of_host, f"host {of_host} has not {what} within {seconds:.0f} s")
            time.sleep(every)

    def gather(self, key: str, value: Any, seconds: float) -> list[Any]:
        """What all hosts tell, in order, this one included: values of one type.

        Raises as `get` does, and UserError where a host tells one of another type.
        """
        self.put(key, value)
        hint = type(value)
        return [as_type(self.get(key, seconds, host), hint, host, key) for host in range(self.hosts)]

    def connect(self, seconds: float) -> Store:
        """Another connection to the same. Raises StoreLost."""
        return Store.connect(self.joint.store, seconds).within(self.joint.prefix)

    @property
    def store(self) -> Store:
        """For what is no JSON."""
        return self._store


class _Farewell:
    """What a host tells the others of the start that it has come to, where it is stopped meanwhile.

    From a signal's handler: calls to the store may be begun while others wait for their answers.
    """

    def __init__(self, host: int, interrupts: Interrupts) -> None:
        self._host, self._interrupts = host, interrupts
        self._store: Store | None = None
        interrupts.farewell = self

    def name(self, store: Store, name: str) -> None:
        """The start's name, by which those who are there can be told."""
        self._store = store.within(name)

    def __call__(self) -> None:
        if self._store is None:
            return
        with suppress(StoreLost):  # nobody can be told then
            self.put(HostFailed(self._host, f"host {self._host}: {STOPPED}", self._interrupts.code))

    def put(self, end: HostFailed) -> None:
        """Why this host leaves. Those who are there have the time to read it."""
        assert self._store is not None
        self._store.put(f"end/{self._host}", {"code": end.code, "text": str(end), "failed": True})
        time.sleep(FAREWELL_SECONDS if self._host == 0 else 0)


def meet(
    hosts: int,
    host: int,
    point: str,
    address: str | None,
    seconds: float,
    own_store: bool,
    interrupts: Interrupts,
) -> Meeting:
    """Comes together with the launchers of all other hosts.

    point: ADDRESS:PORT. address: where this host's trainers are to listen; None: which reaches `point`.
    own_store: host 0 makes the store; else somebody else has it there. interrupts: get what is to be told
    where this one is stopped. Raises UserError where this can't be, or naming who has not come after so many
    seconds; HostFailed naming one that has left.
    """
    where = resolve(address_and_port(point))
    load_torch()  # now, so that it does not count
    until = time.monotonic() + seconds
    farewell = _Farewell(host, interrupts)
    if own_store and host == 0:
        store = Store.serve(listen(where))
        name = _invite(store, hosts, until, farewell)
    else:
        store, name = _reach(hosts, host, where, until, farewell)
    try:
        joint = Joint(where, name, address or own_address(where))
    except OSError as error:
        raise UserError(f"address: none of this host reaches {point}: {error.strerror}; name one") from error
    meeting = Meeting(hosts, host, joint, store.within(name))
    try:
        addresses = meeting.gather("address", joint.address, seconds)
        check_reachable(addresses)
        port = meeting.lifelines.listen(joint.address)
        for other, place in enumerate(places(meeting, addresses, port, seconds)):
            if other != host:
                meeting.lifelines.hold(other, place, seconds)
    except (UserError, HostFailed) as error:
        text = str(error) if isinstance(error, HostFailed) else f"host {host}: {error}"
        with suppress(StoreLost):  # nobody can be told then
            farewell.put(HostFailed(host, text, error.code))
        raise
    return meeting


def places(meeting: Meeting, addresses: list[str], port: int, seconds: float) -> list[Address]:
    """Where each host's launcher listens for the others. port: at which this one does. Raises as `gather`."""
    ports = meeting.gather("port", port, seconds)
    for host, told in enumerate(ports):
        if not 0 < told < 1 << 16:
            raise refusal(host, "port", told)
    return list(zip(addresses, ports, strict=True))


def _reach(hosts: int, host: int, where: Address, until: float, farewell: _Farewell) -> tuple[Store, str]:
    """Comes together in a store that somebody else has; again where that one goes away meanwhile."""
    while True:
        try:
            store = Store.connect(where, max(0.0, until - time.monotonic()))
            if host == 0:
                return store, _invite(store, hosts, until, farewell)
            return store, _answer(store, host, hosts, until, farewell)
        except StoreLost as error:
            if time.monotonic() > until:
                text = f"meeting_point: host 0 has not come to {show(where)}, as far as host {host} can see"
                raise UserError(f"{text}: {error}") from error


def _invite(store: Store, hosts: int, until: float, farewell: _Farewell) -> str:
    """Host 0's part: invites whoever has said hello until all have read their number. The start's name."""
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
        if time.monotonic() > until:
            text = f"{_named(missing)} not come to the meeting point"
            store.put("invitation", {"refused": text, "numbers": numbers})
            time.sleep(FAREWELL_SECONDS)  # for those who are there to read it
            raise UserError(f"meeting_point: {text}")
        time.sleep(LOOK_SECONDS)


def _answer(store: Store, host: int, hosts: int, until: float, farewell: _Farewell) -> str:
    """The others' part. Returns the start's name."""
    number, name = secrets.token_hex(8), ""
    store.put(f"hello/{host}", number)
    while True:
        told = store.look("invitation")
        numbers = told.get("numbers") if isinstance(told, dict) else {}
        numbers = numbers if isinstance(numbers, dict) else {}  # else it is no invitation of this version
        if numbers.get(str(host)) == number:
            if "refused" in told:
                raise UserError(f"meeting_point: {one_line(told['refused'], LONGEST)}")
            if told.get("hosts") != hosts:
                raise UserError(f"hosts: {hosts} on host {host}, {one_line(told.get('hosts'))} on host 0")
            if told.get("name") != name:
                name = as_type(_number(told.get("name")), str, 0, "invitation")
                farewell.name(store, name)
                store.put(f"{name}/{host}", number)
            if store.look(f"{name}/go"):
                return str(name)
            if (end := store.look(f"{name}/end/0")) is not None:
                raise ended(0, end)
        if time.monotonic() > until + FAREWELL_SECONDS:
            raise UserError(f"meeting_point: {_why_not(numbers, host, number)}")
        time.sleep(LOOK_SECONDS)


def _number(told: Any) -> str | None:
    """One that a launcher has drawn; None for anything else."""
    return told if isinstance(told, str) and len(told) == len(secrets.token_hex(8)) else None


def _why_not(numbers: dict[str, Any], host: int, number: str) -> str:
    """Who is missing, as far as host 0's last invitation tells."""
    if not numbers:
        return "host 0 has not come to the meeting point"
    if numbers.get(str(host)) not in (None, number):
        return f"another launcher has come as host {host}, too: each needs a number of its own"
    missing = [other for other, said in numbers.items() if said is None]
    return f"{_named(missing or ['0'])} not come to the meeting point"


def _named(hosts: list[str]) -> str:
    return " and ".join(f"host {host}" for host in hosts) + (" has" if len(hosts) == 1 else " have")
