"""The binary tree in which P logical ranks are added. Its shape is a function of P only.

A node is a span of leaves [first, last). Its left child has the largest power of two of leaves that is
smaller than the node. So neighbours are added first, then neighbouring pairs, and so on.

A rank that owns any contiguous range of leaves adds up each maximal subtree inside its range. The reduction
over all ranks completes the tree from these partial sums, so the bits do not depend on who owns which leaf.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Node = tuple[int, int]
# A number is a source; a pair is the sum of its two sides
Shape: TypeAlias = int | tuple["Shape", "Shape"]


def middle(node: Node) -> int:
    """Return the leaf at which the right child of a node of two leaves or more begins."""
    first, last = node
    return first + (1 << ((last - first - 1).bit_length() - 1))


def maximal_subtrees(leaves: Node, root: Node) -> list[Node]:
    """Return the largest nodes under `root` that lie inside a range of leaves, from left to right."""
    first, last = leaves
    if first <= root[0] and root[1] <= last:
        return [root]
    if last <= root[0] or root[1] <= first:
        return []
    split = middle(root)
    return [*maximal_subtrees(leaves, (root[0], split)), *maximal_subtrees(leaves, (split, root[1]))]


def n_sums(leaf: int, first: int, n_leaves: int) -> int:
    """Return how many sums are complete with a leaf, of the nodes that begin at leaf `first` or later.

    Args:
        leaf: The leaf that was added last.
        first: The first leaf of the range that is added up.
        n_leaves: The leaves of the whole tree.
    """
    node, n_complete = (0, n_leaves), 0
    while node[1] - node[0] > 1:
        n_complete += node[0] >= first and node[1] == leaf + 1
        split = middle(node)
        node = (split, node[1]) if leaf >= split else (node[0], split)
    return n_complete


def completion(parts: Sequence[Node], root: Node) -> Shape:
    """Return how the sum of `root` follows from the sums of the nodes `parts`, which cover it once."""
    if root in parts:
        return parts.index(root)
    split = middle(root)
    return completion(parts, (root[0], split)), completion(parts, (split, root[1]))


def sums_behind(shape: Shape) -> Iterator[int]:
    """Yield for each source, from left to right, how many sums a stack machine takes after pushing it."""
    if isinstance(shape, int):
        yield 0
        return
    left, right = shape
    yield from sums_behind(left)
    *before, last = sums_behind(right)
    yield from before
    yield last + 1


@dataclass(frozen=True)
class PartialSums:
    """The partial sums in the blocks of all ranks of a host, and how the tree is completed from them.

    Attributes:
        sources: (rank, element at which the partial sum begins in the rank's block), from left to right.
        shape: The rest of the tree over these sources.
    """

    sources: tuple[tuple[int, int], ...]
    shape: Shape

    @classmethod
    def of_ranks(cls, n_ranks: int) -> "PartialSums":
        """Return those of ranks that have one leaf each, at the beginning of their blocks."""
        leaves = [(rank, rank + 1) for rank in range(n_ranks)]
        return cls(tuple((rank, 0) for rank in range(n_ranks)), completion(leaves, (0, n_ranks)))

    @classmethod
    def of_ranges(cls, bounds: Sequence[int], n_leaves: int, n_elements: int) -> "PartialSums":
        """Return those of ranks that own ranges of leaves.

        The last subtree of a rank is at the beginning of its block, the others follow from left to right.

        Args:
            bounds: Rank r owns the leaves [bounds[r], bounds[r + 1]). The range of all is a node of the tree.
            n_leaves: The leaves of the whole tree.
            n_elements: The size of a partial sum.
        """
        sources, parts = [], []
        for rank in range(len(bounds) - 1):
            nodes = maximal_subtrees((bounds[rank], bounds[rank + 1]), (0, n_leaves))
            parts += nodes
            sources += [(rank, (place + 1) % len(nodes) * n_elements) for place in range(len(nodes))]
        return cls(tuple(sources), completion(parts, (bounds[0], bounds[-1])))
