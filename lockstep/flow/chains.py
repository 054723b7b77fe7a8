"""Which neighbouring operations of a program can be handed to a lane as one, so that nobody could tell."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class Node(NamedTuple):
    """One operation. needs, follows: numbers of earlier ones. lane: where it runs.

    opens, closes: whether a chain may go on before it, and behind it.
    """

    lane: Any
    needs: Sequence[int]
    follows: Sequence[int]
    opens: bool
    closes: bool


def chains(nodes: Sequence[Node]) -> list[list[int]]:
    """Lists of the numbers of all nodes, which are in program order.

    A chain's operations are neighbours on their lane, and each needs the one before. Whatever else one of
    them waits for, the first waits for, too; and whoever waits for one of them waits for the last. So a chain
    begins and ends no earlier or later for anyone, and what fails takes along the same operations.
    """
    before, after = _Reach(nodes), _Reach(nodes, backwards=True)
    made: list[list[int]] = []
    newest: dict[Any, list[int]] = {}  # chain of each lane
    waiting: dict[int, tuple[int, int]] = {}  # who waits for a chain's operations, by its first
    for number, node in enumerate(nodes):
        chain = newest.get(node.lane)
        if chain is not None and not node.opens and chain[-1] in node.needs and not nodes[chain[-1]].closes:
            first, last = chain[0], chain[-1]
            own = _bits(chain)
            by_need, by_order = (
                (old | new) & ~(1 << number)
                for old, new in zip(waiting[first], after.direct(last), strict=True)
            )
            needs, follows = (bits & ~own for bits in before.direct(number))
            if not (
                needs & ~before.needs[first] or follows & ~before.all[first]
                or by_need & ~after.needs[number] or by_order & ~after.all[number]
            ):  # fmt: skip
                chain.append(number)
                waiting[first] = by_need, by_order
                continue
        newest[node.lane] = [number]
        made.append(newest[node.lane])
        waiting[number] = 0, 0
    return made


class _Reach:
    """Sets of numbers as bits: who is before each node (backwards: after), by needs alone and by all."""

    def __init__(self, nodes: Sequence[Node], backwards: bool = False) -> None:
        n = len(nodes)
        self._direct = [(_bits(node.needs), _bits(node.follows)) for node in nodes]
        if backwards:
            turned = [[0, 0] for _ in nodes]
            for number, node in enumerate(nodes):
                for kind, others in enumerate((node.needs, node.follows)):
                    for other in others:
                        turned[other][kind] |= 1 << number
            self._direct = [(needs, follows) for needs, follows in turned]
        self.needs, self.all = [0] * n, [0] * n
        for number in reversed(range(n)) if backwards else range(n):
            needs, follows = self._direct[number]
            self.needs[number] = needs
            self.all[number] = needs | follows
            for other in _numbers(needs):
                self.needs[number] |= self.needs[other]
            for other in _numbers(needs | follows):
                self.all[number] |= self.all[other]

    def direct(self, number: int) -> tuple[int, int]:
        return self._direct[number]


def _bits(numbers: Sequence[int]) -> int:
    made = 0
    for number in numbers:
        made |= 1 << number
    return made


def _numbers(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
