"""What a fork server imports for its processes. One that needs what can't be imported reports it itself."""

from contextlib import suppress

with suppress(Exception):
    import lockstep.network.replica  # noqa: F401
