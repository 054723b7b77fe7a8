"""The imports of a fork server for its processes. A process reports itself what can't be imported."""

import signal
from contextlib import suppress

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; here it would end the import

with suppress(Exception):
    import lockstep.network.replica  # noqa: F401
