"""What torchrun tells the launcher that it starts on each host: how many there are, and where they meet.

torchrun starts one launcher a host, which starts trainers itself: a process of torchrun's for each device
would have nobody to watch over it and its loader.
"""

import os
from collections.abc import Mapping
from typing import Any

from lockstep.errors import UserError
from lockstep.hosts.addresses import show

SOURCE = "torchrun"
_KEYS = ("hosts", "host", "meeting_point")


def keys(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that torchrun's variables stand for; none where it has not started this.

    given: on the command line, where they have no place then. Raises UserError for what can't be.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    twice = [key for key in _KEYS if key in given]
    if twice:
        raise UserError(f"{twice[0]}: torchrun says it: leave it out, or start without torchrun")
    try:
        n_workers, here, number = (
            int(environment[key]) for key in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")
        )
        point = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise UserError(f"torchrun: its variables can't be used: {error}") from error
    if here != 1:
        raise UserError(
            f"torchrun: starts {here} launchers on this host: give it --nproc-per-node=1, and the devices in "
            "devices; the launcher starts a trainer for each"
        )
    if n_workers == 1:
        return {"hosts": 1}
    return {"hosts": n_workers, "host": number, "meeting_point": show(point)}


def has_store() -> bool:
    """Whether a torchrun that has started this has a store at the meeting point."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
