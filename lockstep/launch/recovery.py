"""Going on after a process was lost, from the newest whole checkpoint: `on_loss` in the configuration."""

import dataclasses

from lockstep.config import Config
from lockstep.config.rules import settle
from lockstep.errors import UserError
from lockstep.launch.processes import Ending
from lockstep.runs.folder import Run, find_checkpoint, remove_unfinished


def next_try(config: Config, run: Run, ending: Ending, n_restarts: int) -> tuple[Config, Run] | None:
    """What to go on with, None where the run ends. n_restarts: how often it has gone on already.

    Only a process that was killed or hangs is a loss: an error would come again.
    """
    if not ending.lost or config.on_loss == "stop" or n_restarts >= config.restarts:
        return None
    if config.on_loss == "shrink":
        smaller = _without(config, int(ending.lost.split()[-1]))
        if smaller is None:
            return None
        config = smaller
    remove_unfinished(run.folder)
    try:
        start, notices = find_checkpoint(run.folder, "latest")
        where, run = f"going on from {start.path.stem}", dataclasses.replace(run, start=start)
    except UserError:  # it has none yet
        begin = f"again from {run.start.path}" if run.start else "from scratch"
        where, notices = f"starting {begin}, for there is no checkpoint yet", []
    many = f"{len(config.devices)} trainer(s), restart {n_restarts + 1} of {config.restarts}"
    notices = [f"{where} with {many}", *notices]
    return config, dataclasses.replace(run, notices=notices)


def _without(config: Config, rank: int) -> Config | None:
    """With one trainer less; with `parts`, as many as are left of a power of two. None: nobody is left."""
    devices = config.devices[:rank] + config.devices[rank + 1 :]
    if not devices:
        return None
    if config.parts is not None:
        devices = devices[: 1 << (len(devices).bit_length() - 1)]
    return settle(dataclasses.replace(config, devices=devices))[0]
