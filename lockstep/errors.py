"""The three ways in which a run can fail that are not bugs."""


class UserError(ValueError):
    """Something the user gave (a key, a file, a device) can't be used; the message says what to do."""


class PeerLost(RuntimeError):
    """Another process of the run closed its end of a pipe: it has died or has left."""


class DeadlinePassed(RuntimeError):
    """Another process of the run did not answer within `wait_deadline` seconds."""
