"""Restarting killed loaders, with `loader_restarts`.

The launcher starts a killed loader again, with the next of its spare pipes
(`Processes._restart_loader`, launch/processes.py). Its trainer finds the new
loader at the other end of that pipe (loading/feed.py) and repeats its requests, so the bits are the same.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.launch.processes import Child


def restart_killed_loaders(
    failing: Callable[[], list["Child"]], listen: Callable[[], None], restart: Callable[["Child"], None]
) -> bool:
    """Restart killed loaders that have spare pipes.

    Args:
        failing: Returns the children that have failed or stand still.
        listen: Receives the last messages of children.
        restart: Starts a killed loader again.

    Returns:
        Whether all children are well then.
    """
    while children := failing():
        listen()
        killed = [child for child in children if child.spares and not child.is_well() and not child.failure]
        if not killed:
            return False
        for child in killed:  # meanwhile others may be killed, hence the loop around
            restart(child)
    return True
