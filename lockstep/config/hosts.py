"""What can't be where several hosts train together: keys that need others, and rules that don't go so far."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lockstep.errors import UserError
from lockstep.optim import OPTIMIZERS

if TYPE_CHECKING:
    from lockstep.config import Config

_OF_HOSTS = {"host": None, "meeting_point": None, "address": None, "network": "auto", "wire": "float32"}
_MEETING_POINT = re.compile(r"(?P<address>[^\s:]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})")
_PORTS = range(1, 1 << 16)


def address_and_port(meeting_point: str) -> tuple[str, int]:
    """The two halves of ADDRESS:PORT; an address of IPv6 stands in brackets. Raises ValueError."""
    found = _MEETING_POINT.fullmatch(meeting_point)
    if not found or int(found["port"]) not in _PORTS:
        raise ValueError(meeting_point)
    return found["address"].strip("[]"), int(found["port"])


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Keys that can't work, and what is wrong with each."""
    if config.hosts <= 1:
        for key, usual in _OF_HOSTS.items():
            if getattr(config, key) != usual:
                yield key, "is for several hosts: it needs hosts, their number"
        return
    if config.run_name is None:
        yield "run_name", "must be given with hosts: all of them know the run by it"
    yield from _bad_places(config)
    yield from _bad_rules(config)


def _bad_places(config: "Config") -> Iterable[tuple[str, str]]:
    if config.host is None:
        yield "host", f"must say which of the hosts this is, 0 to {config.hosts - 1}"
    elif not 0 <= config.host < config.hosts:
        yield "host", f"must be from 0 to {config.hosts - 1}, for there are {config.hosts}: {config.host}"
    if config.meeting_point is None:
        yield "meeting_point", "must be given with hosts: ADDRESS:PORT of host 0"
        return
    try:
        address_and_port(config.meeting_point)
    except ValueError:
        yield "meeting_point", f"must be ADDRESS:PORT of host 0, not {config.meeting_point!r}"


def _bad_rules(config: "Config") -> Iterable[tuple[str, str]]:
    n_hosts = f"{config.hosts} hosts"
    if config.on_loss != "stop":
        yield "on_loss", f"can't be {config.on_loss} with {n_hosts}: torchrun or Slurm starts all again"
    if config.load_epoch != "latest":
        yield "load_epoch", f"must be latest with {n_hosts}: all go on from the newest that one of them has"
    if config.rule in ("elastic", "gossip"):
        yield "rule", f"{config.rule} is for one host: with {n_hosts} set gradients, weights, local or outer"
    if config.exchange == "swap":
        yield "exchange", f"swap is for one host: with {n_hosts} set auto, p2p or staged"
    if config.sync_batch_norm:
        yield "sync_batch_norm", f"would meet over the network in every layer: with {n_hosts} set it to false"
    if config.parts is not None and config.hosts & (config.hosts - 1):
        yield "hosts", f"must be a power of two with parts, not {config.hosts}"
    if config.wire != "float32" and (config.parts is not None or config.rule not in ("auto", "gradients")):
        other = "parts, whose bits are exact" if config.parts is not None else f"rule: {config.rule}"
        yield "wire", f"{config.wire} rounds gradients: it goes with rule: gradients, not with {other}"


def check_devices(config: "Config") -> None:
    """Raises UserError where hosts of so many devices can't keep the rule."""
    inside = config.hosts > 1 and len(config.devices) > 1
    exact = not (OPTIMIZERS[config.optimizer].inexact or config.clip_norm)
    if inside and config.rule in ("local", "outer") and not exact:
        what = "clip_norm" if config.clip_norm else f"optimizer: {config.optimizer}"
        raise UserError(
            f"rule: {config.rule} averages weights and momenta inside a host of several devices, which is "
            f"exact for sgd without clip_norm only, not with {what}: give each host one device"
        )
