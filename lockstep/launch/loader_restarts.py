"""The restart of killed loaders, without touching trainers (`loader_restarts`)."""

import time
from collections.abc import Callable
from typing import Any

from lockstep.comm.messages import LoaderRestarted
from lockstep.launch.children import Child


def restart_killed_loaders(
    children: list[Child],
    failing: Callable[[], list[Child]],
    listen: Callable[[], None],
    start: Callable[..., Child],
    on_message: Callable[[Any], None],
) -> bool:
    """Restart killed loaders that have spare pipes, with `loader_restarts`. The trainers do not notice it.

    A loader is started again with the next of its spare pipes. Its trainer finds the new loader at the other
    end of that pipe (loading/feed.py), and repeats its requests, so the bits are the same. The loss of a
    trainer, or of a loader without spares, resumes the run: recovery.py.

    Args:
        children: All children. A restarted loader takes the place of the killed one.
        failing: Returns those that have failed or stand still.
        listen: Receives the last messages of children.
        start: Starts a child from its name, entry, arguments and spares.
        on_message: Called with a message for each restart.

    Returns:
        Whether all children are well then.
    """
    while failed := failing():
        listen()
        killed = [each for each in failed if each.spares and not each.is_well() and not each.failure]
        if not killed:
            return False
        for child in killed:  # meanwhile others may be killed, hence the loop around
            begin, failure = time.monotonic(), child.describe_silence()
            child.control.close()
            arguments, *spares = child.spares
            new = children[children.index(child)] = start(child.name, child.entry, arguments, spares)
            seconds = round(time.monotonic() - begin, 3)
            on_message(LoaderRestarted(child.name, failure, new.process.pid or 0, len(spares), seconds))
    return True
