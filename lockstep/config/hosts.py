"""The keys of several hosts: from torchrun's variables, and checks of keys that need others or one host."""

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.optim import OPTIMIZERS

if TYPE_CHECKING:
    from lockstep.config import Config

NETWORK_KEYS = ("network", "network_dtype")
OWN_KEYS = ("host_rank", "rendezvous", "host_address", "rejoin_seconds")  # of a host and its place in the run
SEVERAL_HOSTS_KEYS = (*OWN_KEYS, *NETWORK_KEYS)
_RENDEZVOUS = re.compile(r"(?P<address>[^\s:]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
_PORTS = range(1, 1 << 16)
_TORCHRUN_KEYS = ("n_hosts", "host_rank", "rendezvous")


def address_and_port(rendezvous: str) -> tuple[str, int]:
    """Return the address and the port of "ADDRESS:PORT", where an IPv6 address is in brackets.

    Raises:
        ValueError: The text has another form, or the port is no port.
    """
    match = _RENDEZVOUS.fullmatch(rendezvous)
    if not match or int(match["port"]) not in _PORTS:
        raise ValueError(rendezvous)
    return match["address"].strip("[]"), int(match["port"])


def show(point: tuple[str, int]) -> str:
    """Return an address and a port as `address_and_port` reads them."""
    address, port = point
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Yield each key that can't work with this number of hosts, and the problem."""
    if config.n_hosts <= 1:
        for key in SEVERAL_HOSTS_KEYS:
            if getattr(config, key) != config.__dataclass_fields__[key].default:
                yield key, "is for several hosts: it needs n_hosts, the number of hosts"
        return
    if config.run_name is None:
        yield "run_name", "must be given with n_hosts: it identifies the run on all hosts"
    yield from _bad_addresses(config)
    yield from _bad_rules(config)
    if config.rejoin_seconds and config.on_failure == "stop":
        yield "rejoin_seconds", "needs on_failure: restart, because a run with stop does not resume"


def _bad_addresses(config: "Config") -> Iterable[tuple[str, str]]:
    if config.host_rank is None:
        yield "host_rank", f"must be this host's number, 0 to {config.n_hosts - 1}"
    elif not 0 <= config.host_rank < config.n_hosts:
        yield (
            "host_rank",
            f"must be from 0 to {config.n_hosts - 1} with {config.n_hosts} hosts: {config.host_rank}",
        )
    if config.rendezvous is None:
        yield "rendezvous", "must be given with n_hosts: ADDRESS:PORT of host 0"
        return
    try:
        address_and_port(config.rendezvous)
    except ValueError:
        yield "rendezvous", f"must be ADDRESS:PORT of host 0, not {config.rendezvous!r}"


def _bad_rules(config: "Config") -> Iterable[tuple[str, str]]:
    n_hosts = f"{config.n_hosts} hosts"
    if config.on_failure == "shrink":
        yield "on_failure", f"can't be shrink with {n_hosts}, which need equally many devices: set restart"
    if config.load_epoch != "latest":
        yield (
            "load_epoch",
            f"must be latest with {n_hosts}: all resume from the newest checkpoint of any host",
        )
    if config.rule in ("elastic", "gossip"):
        yield "rule", f"{config.rule} is for one host: with {n_hosts} set gradients, weights, local or outer"
    if config.exchange == "swap":
        yield "exchange", f"swap is for one host: with {n_hosts} set auto, p2p or staged"
    if config.sync_batch_norm:
        yield (
            "sync_batch_norm",
            f"would synchronize over the network in every layer: with {n_hosts} set it to false",
        )
    if config.logical_ranks is not None and config.n_hosts & (config.n_hosts - 1):
        yield "n_hosts", f"must be a power of two with logical_ranks, not {config.n_hosts}"
    other = "" if config.rule in ("auto", "gradients") else f"rule: {config.rule}"
    if config.logical_ranks is not None:
        other = "logical_ranks, whose bits are exact"
    if other and config.network_dtype != "float32":
        yield (
            "network_dtype",
            f"{config.network_dtype} rounds gradients: it goes with rule: gradients, not with {other}",
        )


def check_devices(config: "Config") -> None:
    """Raise UserError if the rule is not exact for this number of hosts and devices."""
    has_local_peers = config.n_hosts > 1 and len(config.devices) > 1
    exact = not (OPTIMIZERS[config.optimizer].inexact or config.clip_norm)
    if has_local_peers and config.rule in ("local", "outer") and not exact:
        what = "clip_norm" if config.clip_norm else f"optimizer: {config.optimizer}"
        raise UserError(
            f"rule: {config.rule} averages weights and momenta inside a host of several devices, which is "
            f"exact for sgd without clip_norm only, not with {what}: give each host one device"
        )


def torchrun_keys(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration keys that torchrun's variables stand for; none if torchrun did not start us.

    torchrun starts one launcher on each host, and the launcher starts the trainers. A process of torchrun's
    for each device would have no launcher that watches it and its loader.

    Args:
        environment: The environment variables of this process.
        given: The keys on the command line, which may not repeat what torchrun says.

    Raises:
        UserError: A key is given twice, or the variables can't be used.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    twice = [key for key in _TORCHRUN_KEYS if key in given]
    if twice:
        raise UserError(f"{twice[0]}: torchrun says it: leave it out, or start without torchrun")
    try:
        n_workers, n_local, rank = (
            int(environment[key]) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")
        )
        point = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UserError(f"torchrun: its variables can't be used: {error}") from error
    if n_local != 1:
        raise UserError(
            f"torchrun: starts {n_local} launchers on this host: give it --nproc-per-node=1, and the devices "
            "in devices; the launcher starts a trainer for each"
        )
    if n_workers == 1:
        return {"n_hosts": 1}
    return {"n_hosts": n_workers, "host_rank": rank, "rendezvous": show(point)}


def torchrun_has_store() -> bool:
    """Return whether torchrun started this process and has a store at the rendezvous address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
