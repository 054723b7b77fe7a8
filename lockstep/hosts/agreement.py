"""What has to be alike on all hosts before their first step: programs, keys, data, devices."""

import dataclasses
import hashlib
import json
from typing import Any

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.errors import UserError
from lockstep.hosts.meeting import Meeting
from lockstep.hosts.told import one_line
from lockstep.runs import versions

Facts = dict[str, Any]

# Keys that each host may have as it likes: places, and what makes no difference to what is learned.
_DATA = ("data_folder", "train_folder", "val_folder", "label_folder", "mean_file")
_OWN = ("weights_dir", "host", "address", "meeting_point", "devices", "cpu_threads", "pin_cores")
_LOADING = ("para_load", "read_threads", "n_slots", "check_sums")
_FREE = {*_DATA, *_OWN, *_LOADING, "trace", "tensorboard", "report"}


def facts_of(config: Config, dataset: Dataset) -> Facts:
    """What is compared, by names that a user knows; what JSON can hold. Keys first."""
    keys = {key: value for key, value in dataclasses.asdict(config).items() if key not in _FREE}
    packages = {f"version of {name}": version for name, version in versions.of_packages().items()}
    others = {
        "trainers per host": len(config.devices),
        "kind of devices": "GPUs" if devices.on_gpus(config.devices) else "CPUs",
        "checksum of the data": _digest_of(dataset),
    }
    return dict(json.loads(json.dumps({**keys, **packages, **others})))


def agree(meeting: Meeting, facts: Facts, seconds: float) -> None:
    """Raises UserError on all hosts where one differs from host 0, naming it, the key and both values.

    Raises HostFailed naming a host that has ended, or has not told its own in time.
    """
    first, *others = meeting.gather("agreement", facts, seconds)
    for host, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            ours, other = (each.get(name, "nothing") for each in (first, theirs))
            if ours != other:
                values = f"{one_line(ours)} on host 0, {one_line(other)} on host {host}"
                raise UserError(f"{one_line(name)}: {values}: it has to be the same on all hosts")


def _digest_of(dataset: Dataset) -> str:
    """Of the manifest's checksums, and of what there is without one: labels, sizes, the mean."""
    digest = hashlib.sha256(dataset.mean.tobytes())
    for split in (dataset.train, dataset.val):
        digest.update(split.labels.tobytes())
        digest.update(repr((split.file_rows, dataset.image_shape)).encode())
    if dataset.manifest:
        digest.update(json.dumps(sorted(dataset.manifest.checksums().items())).encode())
    return digest.hexdigest()[:16]
