"""The check that all hosts have equal programs, keys, data and devices before their first step."""

import dataclasses
import hashlib
import json
from typing import Any

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.hosts.rendezvous import Rendezvous
from lockstep.hosts.store import one_line
from lockstep.runs import versions

Facts = dict[str, Any]

# Keys that may differ among hosts: paths, and keys that make no difference to what is learned.
_DATA = ("data_folder", "train_folder", "val_folder", "label_folder", "mean_file")
_OWN = ("weights_dir", "host_rank", "host_address", "rendezvous", "devices", "cpu_threads", "pin_cores")
_LOADING = ("para_load", "read_threads", "n_slots", "check_sums")
_FREE = {*_DATA, *_OWN, *_LOADING, "trace", "tensorboard", "report"}
_KINDS = "kinds of processors"  # may differ, with a note


def facts_of(config: Config, dataset: Dataset) -> Facts:
    """Return what hosts compare: values that JSON can hold, by names that a user knows."""
    keys = {key: value for key, value in dataclasses.asdict(config).items() if key not in _FREE}
    packages = {f"version of {name}": version for name, version in versions.of_packages().items()}
    # Devices come before the keys: with global_batch_size, batch_size follows from their number.
    first = {"devices": f"{len(config.devices)} x {'GPU' if devices.on_gpus(config.devices) else 'CPU'}"}
    data = {"checksum of the data": _digest_of(dataset)}
    exact = _facts_of_rounding(config) if config.logical_ranks else {}
    return dict(json.loads(json.dumps({**first, **keys, **packages, **data, **exact})))


def _facts_of_rounding(config: Config) -> Facts:
    """Return what else the bits of a step depend on, which logical_ranks promises for any devices."""
    import torch  # which the rendezvous has loaded

    kinds = set(devices.describe(config.devices).values())
    if not devices.on_gpus(config.devices):
        kinds = {torch.backends.cpu.get_cpu_capability()}
    return {"cpu_threads": config.cpu_threads, _KINDS: ", ".join(sorted(kinds))}


def agree(rendezvous: Rendezvous, facts: Facts, seconds: float) -> list[str]:
    """Compare the facts of all hosts. All hosts call it at once.

    Returns:
        Notes on differences that are allowed.

    Raises:
        UserError: On all hosts, if a host differs from host 0; the message names it, the key and both values.
        HostFailed: A host has ended, or has not sent its facts in time.
    """
    notes = []
    first, *others = rendezvous.gather("agreement", facts, seconds)
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
