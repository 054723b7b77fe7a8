"""Keys from torchrun's environment variables: the number of hosts, this host's rank, the rendezvous.

torchrun starts one launcher on each host, and the launcher starts the trainers. A process of torchrun's for
each device would have no launcher that watches it and its loader.
"""

import os
from collections.abc import Mapping
from typing import Any

from lockstep.errors import UserError
from lockstep.hosts.addresses import show

SOURCE = "torchrun"
_KEYS = ("n_hosts", "host_rank", "rendezvous")


def keys(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration keys that torchrun's variables stand for; none if torchrun did not start us.

    Args:
        environment: The environment variables of this process.
        given: The keys on the command line, which may not repeat what torchrun says.

    Raises:
        UserError: A key is given twice, or the variables can't be used.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    twice = [key for key in _KEYS if key in given]
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


def has_store() -> bool:
    """Return whether torchrun started this process and has a store at the rendezvous address."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
