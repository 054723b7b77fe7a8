"""The receipts that a trainer keeps of its run: what they say of it, and when they are due."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from lockstep.backends import devices
from lockstep.config import Config
from lockstep.data.dataset import Dataset
from lockstep.data.sampling import steps_done
from lockstep.errors import UserError
from lockstep.files import checksum
from lockstep.runs import versions
from lockstep.runs.checkpoint_files import read_state, records, verify_checksum
from lockstep.runs.receipts import (
    NAME,
    Receipt,
    ReceiptFile,
    digest_of_config,
    digest_of_settings,
    digests_of_data,
    read,
)

# They choose other instructions or another precision inside oneDNN and MKL, which torch can't tell.
_VARIABLES = (
    *(f"{prefix}_{name}" for prefix in ("ONEDNN", "DNNL") for name in ("MAX_CPU_ISA", "DEFAULT_FPMATH_MODE")),
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


class ReceiptKeeper:
    """The receipts of one process of trainer 0.

    Args:
        folder: The run's folder.
        config: The run's.
        dataset: Its manifest and labels are in every receipt.
        recovered: Whether the process started from a checkpoint in memory.

    Raises:
        UserError: The file of receipts can't be used.
    """

    def __init__(self, folder: Path, config: Config, dataset: Dataset, recovered: bool) -> None:
        self._file = ReceiptFile(folder)
        self._size = config.global_batch_size or 1
        self._n_samples = len(dataset.train)
        self._config, self._settings = digest_of_config(config), digest_of_settings(config)
        self._manifest, self._labels = digests_of_data(dataset)
        self._versions = versions_of_computing()
        self._machine = machine_of(config)
        self._first_kind: Literal["start", "recovery"] | None = "recovery" if recovered else "start"

    def add_checkpoint(self, tensors: Path) -> None:
        """Add the receipt of a checkpoint that is complete. Raises as `add`."""
        state = read_state(tensors.with_suffix(".json"))
        self.add(state.epoch, state.position, state.sha256, tensors)

    def add(self, epoch: int, position: int, state: str, tensors: Path | None = None) -> None:
        """Add the receipt of a state.

        Args:
            epoch: The current epoch, from 1.
            position: Samples of that epoch that have been trained on.
            state: SHA-256 of the checkpoint's tensors, or of those that it would have.
            tensors: The checkpoint's file of tensors, if there is one; its record lies beside it.

        Raises:
            UserError: A file can't be read or written.
        """
        try:
            self._add(epoch, position, state, tensors)
        except OSError as error:
            raise UserError(f"{self._file.path}: a receipt can't be written: {error.strerror}") from error

    def _add(self, epoch: int, position: int, state: str, tensors: Path | None) -> None:
        kind = "checkpoint" if tensors else self._first_kind or "step"
        self._first_kind = None
        receipt = Receipt(
            number=0,
            kind=kind,
            step=steps_done(epoch, position, self._n_samples, self._size),
            epoch=epoch,
            position=position,
            state=state,
            checkpoint=tensors.stem if tensors else "",
            record=checksum(tensors.with_suffix(".json")) if tensors else "",
            config=self._config,
            settings=self._settings,
            manifest=self._manifest,
            labels=self._labels,
            versions=self._versions,
            machine=self._machine,
        )
        self._file.add(receipt)


def add_missing(folder: Path) -> None:
    """Add the receipt of the newest checkpoint if it has none.

    A run may have been killed after it saved a checkpoint and before it added the receipt. A host whose disk
    was lost, or is older, gets a checkpoint from another host. A checkpoint with other settings than the
    last receipt gets none: a part of the run without `logical_ranks` has made it.

    Args:
        folder: The run's folder. Without receipts in it, none is added.

    Raises:
        UserError: A file can't be read or written.
    """
    newest = records(folder)[-1:]
    if not newest or not _has_receipts(folder):
        return
    known = read(folder)[0]
    if not known or checksum(newest[0]) in {receipt.record for receipt in known}:
        return
    try:
        found = verify_checksum(newest[0])
        settings = digest_of_settings(Config(**found.state.config))
    except (UserError, TypeError, KeyError):  # damaged or edited
        return
    if settings == known[-1].settings:  # else the last receipt doesn't say how this state was computed
        add_written_out(folder, found.path)


def add_written_out(folder: Path, tensors: Path) -> None:
    """Add the receipt of a checkpoint that another process than the trainer has written.

    Args:
        folder: The run's folder. Without receipts in it, none is added.
        tensors: The checkpoint's file of tensors; its record lies beside it.

    Raises:
        UserError: A file can't be read or written.
    """
    if not _has_receipts(folder):
        return
    known = read(folder)[0]
    if not known:
        raise UserError(f"{folder / NAME}: has no whole receipt. Move the file away to go on.")
    record = tensors.with_suffix(".json")
    state = read_state(record)
    size = int(state.config["global_batch_size"] or 1)
    receipt = replace(
        known[-1],
        kind="recovery",
        step=steps_done(state.epoch, state.position, state.n_samples, size),
        epoch=state.epoch,
        position=state.position,
        state=state.sha256,
        checkpoint=tensors.stem,
        record=checksum(record),
    )
    try:
        ReceiptFile(folder).add(receipt)
    except OSError as error:
        raise UserError(f"{folder / NAME}: a receipt can't be written: {error.strerror}") from error


def _has_receipts(folder: Path) -> bool:
    """Return whether a run has receipts. If it was killed before the first one, it may have an empty file."""
    path = folder / NAME
    return path.exists() and path.stat().st_size > 0


def versions_of_computing() -> dict[str, str]:
    """Return the versions of the packages that compute, and of oneDNN inside torch."""
    found = re.search(r"(?:MKL-DNN|oneDNN)\s+v?([\d.]+)", torch.__config__.show())
    return {**versions.of_packages(), "onednn": found[1] if found else "none"}


def machine_of(config: Config) -> dict[str, str]:
    """Return what the bits of a state may depend on in the machine, with a trainer's threads."""
    return {
        "devices": ", ".join(sorted(set(devices.describe(config.devices).values()))),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **{name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
    }
