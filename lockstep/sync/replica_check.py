"""The check that replicas are bitwise equal: at the start, every few steps, and before checkpoints."""

import hashlib
from collections.abc import Callable

from lockstep.comm.group import Group
from lockstep.comm.messages import Order
from lockstep.network.arena import Arena

Compare = Callable[[str, str], None]


def check_replicas(group: Group, arena: Arena, when: str, between_hosts: Compare | None = None) -> None:
    """Compare the replicas of all trainers, who call it at once. A lone trainer has nothing to compare.

    One digest of everything is compared. Digests by tensor travel only if it differs.

    Args:
        group: The trainers of this host.
        arena: This trainer's replica.
        when: For the error.
        between_hosts: Compares a digest and `when` with those of other hosts; None for a run of one host.

    Raises:
        RuntimeError: The message names the first tensor that differs.
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
    """The schedule of comparisons: before checkpoints, and after `every` steps at the next barrier.

    Args:
        group: The trainers of this host.
        arena: This trainer's replica.
        every: None to compare before checkpoints only.
        between_hosts: As of check_replicas.
    """

    def __init__(
        self, group: Group, arena: Arena, every: int | None, between_hosts: Compare | None = None
    ) -> None:
        self._group, self._arena, self._every, self._between_hosts = group, arena, every, between_hosts
        self._n_steps = 0

    def before_saving(self, when: str) -> None:
        """Compare the replicas. Raises as check_replicas."""
        check_replicas(self._group, self._arena, when, self._between_hosts)

    def after_step(self, order: Order, equal: bool) -> None:
        """Count a step, and compare the replicas if that is due. Raises as check_replicas.

        Args:
            order: The step's last minibatch.
            equal: Whether replicas should be equal now.
        """
        self._n_steps += 1
        if equal and self._every is not None and self._n_steps >= self._every:
            self._n_steps = 0
            check_replicas(self._group, self._arena, str(order), self._between_hosts)
