"""Whether replicas are still one: compared bit for bit, at the start, now and then, and in checkpoints."""

import hashlib
from collections.abc import Callable

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.network.arena import Arena

Compare = Callable[[str, str], None]


def check_replicas(group: Group, arena: Arena, when: str, between_hosts: Compare | None = None) -> None:
    """Raises RuntimeError naming the first tensor that is not bitwise equal in all trainers.

    A lone trainer has nothing to compare. One digest of everything is compared; digests by tensor travel only
    where that differs. between_hosts: compares the digest, at a time, with those of other hosts; None where
    there is no other.
    """
    if not group.pipes and between_hosts is None:
        return
    digests = arena.digests()
    whole = hashlib.blake2b("".join(digests.values()).encode(), digest_size=16).hexdigest()
    if len(set(group.all_gather(f"comparing replicas at {when}", whole))) == 1:
        if between_hosts:
            between_hosts(whole, when)
        return
    first, *others = group.all_gather(f"looking for the difference between replicas at {when}", digests)
    for rank, theirs in enumerate(others, 1):
        for name, digest in theirs.items():
            if digest != first.get(name):
                raise RuntimeError(f"replicas differ at {when}: {name} of trainer {rank} is not trainer 0's")
    raise AssertionError("replicas differ, and none of their tensors does")


class ReplicaCheck:
    """Compares replicas before checkpoints, and every `every` steps or at the first meeting after.

    every: None for before checkpoints only. between_hosts: as of check_replicas.
    """

    def __init__(
        self, group: Group, arena: Arena, every: int | None, between_hosts: Compare | None = None
    ) -> None:
        self._group, self._arena, self._every, self._between_hosts = group, arena, every, between_hosts
        self._n_steps = 0

    def before_saving(self, when: str) -> None:
        """Raises RuntimeError as check_replicas does."""
        check_replicas(self._group, self._arena, when, self._between_hosts)

    def after_step(self, order: Order, equal: bool) -> None:
        """equal: whether replicas are to be equal now. Raises RuntimeError as check_replicas does."""
        self._n_steps += 1
        if equal and self._every is not None and self._n_steps >= self._every:
            self._n_steps = 0
            check_replicas(self._group, self._arena, str(order), self._between_hosts)
