"""The agreement of all hosts before the first step and when an attempt to train ends.

Before the first step all hosts compare their programs, keys, data and devices. At the end of an attempt each
launcher sends how its processes ended and which memory checkpoints it retains, and waits for the same of all
others. All launchers then decide by the same values, so no further message is needed for the decision.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.config.layers import DATASET_PATHS, with_order
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.hosts.heartbeat import Heartbeat
from lockstep.hosts.rendezvous import Rendezvous, attempt_key
from lockstep.hosts.store import HostLost, as_record, one_line, refusal
from lockstep.runs import versions
from lockstep.runs.network_source import digest_of_source

Facts = dict[str, Any]
Moment = tuple[int, ...]  # of a memory checkpoint: epoch, position in it, validations so far

# Keys that may differ among hosts: paths, and keys that make no difference to what is learned.
_OWN = ("weights_dir", "host_rank", "host_address", "rendezvous", "devices", "cpu_threads", "pin_cores")
_LOADING = ("cache_folder", "para_load", "read_threads", "n_slots", "check_sums")
_FREE = {*DATASET_PATHS, *_OWN, *_LOADING, "trace", "tensorboard", "report"}
_KINDS = "kinds of processors"  # may differ, with a note
_LOOK_SECONDS = 0.02  # between two looks for the ends of the others


def facts_of(config: Config, dataset: Dataset) -> Facts:
    """Return what hosts compare: values that JSON can hold, by names that a user knows."""
    settings = with_order(dataclasses.asdict(config))
    keys = {key: value for key, value in settings.items() if key not in _FREE}
    packages = {f"version of {name}": version for name, version in versions.of_packages().items()}
    # Devices come before the keys: with global_batch_size, batch_size follows from their number.
    first = {"devices": f"{len(config.devices)} x {'GPU' if devices.on_gpus(config.devices) else 'CPU'}"}
    code = filter(None, (config.model, config.loss, config.augmentation))  # may be the user's
    sources = {f"source of {name}": digest_of_source(name) for name in code}
    data = {"checksum of the data": _digest_of(dataset)}
    exact = _facts_of_rounding(config) if config.logical_ranks else {}
    return dict(json.loads(json.dumps({**first, **keys, **packages, **sources, **data, **exact})))


def _facts_of_rounding(config: Config) -> Facts:
    """Return what else the bits of a step depend on, which logical_ranks promises for any devices."""
    import torch  # which the rendezvous has loaded

    kinds = set(devices.describe(config.devices).values())
    if not devices.on_gpus(config.devices):
        kinds = {torch.backends.cpu.get_cpu_capability()}
    return {"cpu_threads": config.cpu_threads, _KINDS: ", ".join(sorted(kinds))}


def agree(rendezvous: Rendezvous, facts: Facts, seconds: float, key: str = "agreement") -> list[str]:
    """Compare the facts of all hosts. All hosts call it at once.

    Args:
        rendezvous: Where they meet.
        facts: This host's, by names that a user knows; values that JSON can hold.
        seconds: Time to wait for each of the others.
        key: The name of this comparison, which is made once.

    Returns:
        Notes on differences that are allowed.

    Raises:
        UserError: On all hosts, if a host differs from host 0; the message names it, the key and both values.
        HostFailed: A host has ended, or has not sent its facts in time.
    """
    notes = []
    first, *others = rendezvous.gather(key, facts, seconds)
    for host, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            ours, other = (each.get(name, "nothing") for each in (first, theirs))
            if ours != other:
                text = f"{one_line(name)}: {one_line(ours)} on host 0, {one_line(other)} on host {host}"
                if name != _KINDS:
                    advice = (
                        " with logical_ranks. Set cpu_threads on all hosts" if name == "cpu_threads" else ""
                    )
                    raise UserError(f"{text}: it has to be the same on all hosts{advice}")
                notes.append(f"{text}: they may round differently, and then one host gives other bits")
    return notes


def _digest_of(dataset: Dataset) -> str:
    """Return a digest of the manifest's checksums, and of labels, sizes and mean, which need no manifest."""
    digest = hashlib.sha256(dataset.mean.tobytes())
    if dataset.survey:
        return dataset.digest[:16]
    for split in (dataset.train, dataset.val):
        digest.update(split.labels.tobytes())
        digest.update(repr((split.file_rows, dataset.image_shape)).encode())
    if dataset.manifest:
        digest.update(json.dumps(sorted(dataset.manifest.checksums().items())).encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt on one host.

    Attributes:
        kind: 'done': all processes have finished. 'lost': one of this host was lost. 'affected': they could
            not continue without another host's. 'stopped': a signal ended them before they had saved.
        code: The exit status that a signal to this launcher asks for; 0 without a signal.
        lost: The name of the process that was lost, or ''.
        message: How it was lost.
        step: The last completed step, counted from the start of the run.
        moments: Of the memory checkpoints that this launcher retains.
    """

    kind: Literal["done", "lost", "affected", "stopped"]
    code: int
    lost: str
    message: str
    step: int
    moments: tuple[tuple[int, ...], ...]


def exchange_ends(
    rendezvous: Rendezvous,
    heartbeat: Heartbeat,
    number: int,
    end: AttemptEnd,
    seconds: float,
) -> list[AttemptEnd]:
    """Send this host's end of attempt `number`, and return those of all hosts, by host.

    Args:
        seconds: The deadline. A host whose processes have finished waits without one.

    Raises:
        HostFailed: A host has ended, or has not sent its end in time; or a second signal ends the waiting.
    """
    key = attempt_key(number)
    values: list[Any] = [None] * rendezvous.hosts
    deadline = time.monotonic() + seconds
    rendezvous.put(key, vars(end))
    while not all(values):
        values = [value or rendezvous.look(key, host) for host, value in enumerate(values)]
        missing = next((host for host, value in enumerate(values) if not value), None)
        if missing is None:
            break
        if (failed := heartbeat.problem()) is not None:
            raise failed
        rendezvous.check_interrupts()
        if end.kind != "done" and time.monotonic() > deadline:
            raise HostLost(missing, f"host {missing} has not ended its processes within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return [_read(value, host, key) for host, value in enumerate(values)]


def await_other_end(rendezvous: Rendezvous, heartbeat: Heartbeat, number: int, seconds: float) -> bool:
    """Wait until another host has sent its end of an attempt. Return whether one has, in time.

    A host whose processes miss those of another host waits for the other host to report the cause.

    Args:
        rendezvous: Has the ends that hosts have sent.
        heartbeat: Reports hosts that have ended.
        number: The attempt's.
        seconds: Time after which to give up.

    Raises:
        HostFailed: A host has ended, or a second signal ends the waiting.
    """
    others = [host for host in range(rendezvous.hosts) if host != rendezvous.host]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(rendezvous.look(attempt_key(number), host) is not None for host in others):
            return True
        if (failed := heartbeat.problem(alarmed=True)) is not None:
            raise failed
        rendezvous.check_interrupts()
        time.sleep(_LOOK_SECONDS)
    return False


def newest_common(ends: Sequence[AttemptEnd]) -> Moment | None:
    """Return the moment of the newest memory checkpoint that all hosts have, or None."""
    common = set.intersection(*(set(end.moments) for end in ends))
    return max(common, default=None)


def describe_losses(ends: Sequence[AttemptEnd]) -> str:
    """Return which processes were lost, with the names of their hosts."""
    return "; ".join(
        f"host {host}: {one_line(end.message, 2000)}" for host, end in enumerate(ends) if end.kind == "lost"
    )


def _read(value: Any, host: int, key: str) -> AttemptEnd:
    end = as_record(AttemptEnd, value, host, key)
    if not 0 <= end.code < 256:
        raise refusal(host, key, value)
    return end
