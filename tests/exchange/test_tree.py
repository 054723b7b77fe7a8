"""The tree of logical ranks: any number of trainers with any shares have the bits of a sequential tree."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.exchange.reduction import reduce_chunk
from lockstep.exchange.tree import (
    Node,
    PartialSums,
    maximal_subtrees,
    middle,
    n_sums,
    sums_behind,
)

DTYPES = st.sampled_from([np.float32, np.float64, np.float16])


@st.composite
def bounds_of_trainers(draw: st.DrawFn, most: int = 40) -> tuple[int, ...]:
    """The bounds of N trainers, 1 to P, with any shares of P logical ranks."""
    shares = draw(st.lists(st.integers(1, 9), min_size=1, max_size=9).filter(lambda s: sum(s) <= most))
    return (0, *accumulate(shares))


def leaves_of(n_leaves: int, shape: tuple[int, ...], dtype: type, seed: int) -> list[np.ndarray]:
    """Numbers of such different sizes that every order of sums has bits of its own."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** random.integers(-3, 4, (n_leaves, *shape))
    return list((random.standard_normal((n_leaves, *shape)) * scales).astype(dtype))


def sequential(leaves: list[np.ndarray]) -> np.ndarray:
    """Add neighbours, then neighbouring sums, and so on; a last one without a neighbour waits."""
    while len(leaves) > 1:
        pairs = [leaves[place : place + 2] for place in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def blocks_of(leaves: list[np.ndarray], bounds: tuple[int, ...]) -> tuple[list[np.ndarray], int]:
    """Each trainer's block after its passes, and the size of a partial sum."""
    n_elements, n_all, blocks = leaves[0].size, bounds[-1], []
    for first, last in pairwise(bounds):
        waiting: list[np.ndarray] = []
        for number in range(first, last):
            total = leaves[number].ravel()
            for _ in range(n_sums(number, first, n_all)):
                total = total + waiting.pop()
            waiting.append(total)
        *further, flat = waiting
        blocks.append(np.concatenate([flat, *further]))
    return blocks, n_elements


def reduce_blocks(blocks: list[np.ndarray], sums: PartialSums, n_elements: int) -> np.ndarray:
    sources = [blocks[rank][start : start + n_elements] for rank, start in sums.sources]
    reduce_chunk(sources, [sources[-1]], "pairwise", sums.shape)  # a target may be one of the sources
    return sources[-1]


@given(bounds_of_trainers(), st.lists(st.integers(1, 5), min_size=1, max_size=3), DTYPES, st.integers(0, 999))
def test_any_shares_have_the_bits_of_a_sequential_tree(
    bounds: tuple[int, ...], shape: list[int], dtype: type, seed: int
) -> None:
    leaves = leaves_of(bounds[-1], tuple(shape), dtype, seed)
    blocks, n_elements = blocks_of(leaves, bounds)
    total = reduce_blocks(blocks, PartialSums.of_ranges(bounds, bounds[-1], n_elements), n_elements)
    assert total.tobytes() == sequential(leaves).tobytes()


def test_sums_in_rank_order_have_other_bits() -> None:
    """The test above can fail."""
    leaves = leaves_of(8, (50,), np.float32, 0)
    in_turn = leaves[0]
    for leaf in leaves[1:]:
        in_turn = in_turn + leaf
    assert in_turn.tobytes() != sequential(leaves).tobytes()


@given(st.integers(1, 64), st.data())
def test_maximal_subtrees_cover_a_range_once_with_few_blocks(n_leaves: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, n_leaves - 1))
    last = data.draw(st.integers(first + 1, n_leaves))
    nodes = maximal_subtrees((first, last), (0, n_leaves))
    assert [leaf for node in nodes for leaf in range(*node)] == list(range(first, last))
    assert all(is_node(node, (0, n_leaves)) for node in nodes)
    assert not any(is_node((one[0], other[1]), (0, n_leaves)) for one, other in pairwise(nodes))
    assert len(nodes) <= max(1, 2 * (n_leaves - 1).bit_length() - 2)


def is_node(span: Node, root: Node) -> bool:
    """Return whether a span of leaves is a node of the tree."""
    while root != span:
        if root[1] - root[0] == 1:
            return False
        split = middle(root)
        root = (root[0], split) if span[0] < split else (split, root[1])
    return True


@pytest.mark.parametrize("n_ranks", [1, 2, 4, 8])
def test_equal_shares_of_powers_of_two_need_one_block_each(n_ranks: int) -> None:
    bounds = tuple(range(0, 9, 8 // n_ranks))
    assert PartialSums.of_ranges(bounds, 8, 100) == PartialSums.of_ranks(n_ranks)


@given(bounds_of_trainers())
def test_a_stack_machine_takes_as_many_sums_as_the_tree_has(bounds: tuple[int, ...]) -> None:
    """The kernels for GPUs follow this program."""
    leaves = leaves_of(bounds[-1], (3,), np.float32, 1)
    blocks, n_elements = blocks_of(leaves, bounds)
    sums = PartialSums.of_ranges(bounds, bounds[-1], n_elements)
    stack: list[np.ndarray] = []
    for (rank, start), number in zip(sums.sources, sums_behind(sums.shape), strict=True):
        stack.append(blocks[rank][start : start + n_elements])
        for _ in range(number):
            right = stack.pop()
            stack.append(stack.pop() + right)
    (total,) = stack
    assert total.tobytes() == sequential(leaves).tobytes()
