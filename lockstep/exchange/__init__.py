"""Collective operations on memory that several processes share, directly from memory to memory.

Every rank has a *block* of the same size. A collective works on a *span* of it, elements [first, last), the
same in every block, and rank r owns *shard* r of the span: only rank r reads that part of all blocks, reduces
it in rank order, and writes the result. No rank needs memory for a second copy. An all-reduce moves
2 S (P - 1) / P bytes per rank for a span of S bytes and P ranks. A shard is computed once and copied, so all
blocks are bitwise equal afterwards, for any P.

`transport.py` defines a collective and its phases, `tree.py` the order of sums that is the same for any
number of ranks. `host.py` implements it in host memory (`reduction.py`),
`p2p.py` between GPUs that reach each other's memory, `staged.py` between devices that don't. `direct.py` is
what these three have in common. `proof.py` tests which GPUs reach each other. A rule decides which values are
exchanged, and when: lockstep/sync.
"""

from typing import Literal, get_args

ALIGNMENT = 16  # elements: 64 bytes of float32. Spans begin on it, so that no cache line has two writers

# pairwise: the sum along a binary tree (tree.py), which may begin with several partial sums of each rank
Op = Literal["mean", "sum", "max", "min", "prod", "pairwise"]
OPS: tuple[Op, ...] = get_args(Op)
Span = tuple[int, int]


def shard(span: Span, rank: int, n_ranks: int) -> Span:
    """Return the part of a span that `rank` reduces.

    Shards are disjoint, begin on the alignment and cover the span.
    """
    first, last = span
    assert first % ALIGNMENT == 0, f"a span begins on a multiple of {ALIGNMENT} elements, not at {first}"

    def boundary(number: int) -> int:
        aligned = (last - first) * number // n_ranks // ALIGNMENT * ALIGNMENT
        return last if number == n_ranks else first + aligned

    return boundary(rank), boundary(rank + 1)


def padded(n_elements: int) -> int:
    """Return a number of elements, rounded up to a multiple of ALIGNMENT."""
    return -(-n_elements // ALIGNMENT) * ALIGNMENT
