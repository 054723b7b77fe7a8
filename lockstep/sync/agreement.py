"""Whether replicas are still one: compared bit for bit, at the start and before every checkpoint."""

import hashlib

from lockstep.comm.group import Group
from lockstep.network.arena import Arena


def check_replicas(group: Group, arena: Arena, when: str) -> None:
    """Raises RuntimeError naming the first tensor that is not bitwise equal in all trainers.

    One digest of everything is compared; digests by tensor travel only where that differs.
    """
    digests = arena.digests()
    whole = hashlib.blake2b("".join(digests.values()).encode(), digest_size=16).hexdigest()
    if len(set(group.all_gather(f"comparing replicas at {when}", whole))) == 1:
        return
    first, *others = group.all_gather(f"looking for the difference between replicas at {when}", digests)
    for rank, theirs in enumerate(others, 1):
        for name, digest in theirs.items():
            if digest != first.get(name):
                raise RuntimeError(f"replicas differ at {when}: {name} of trainer {rank} is not trainer 0's")
    raise AssertionError("replicas differ, and none of their tensors does")
