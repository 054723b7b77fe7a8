"""What a fork server imports for its processes. One that needs what can't be imported reports it itself."""

import signal
from contextlib import suppress

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; here it would end the import

with suppress(Exception):
    import lockstep.network.replica  # noqa: F401
