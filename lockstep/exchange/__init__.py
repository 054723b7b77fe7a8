"""Collective operations on memory that several processes share, directly from memory to memory.

Every rank has a *block* of the same size. A collective works on a *span* of it, elements [first, last), the
same in every block, and rank r owns *shard* r of the span: it alone reads that part of all blocks, folds it
in rank order, and writes the result. Nobody needs memory for a second copy; an all-reduce moves 2 S (P - 1) /
P bytes per rank for a span of S bytes and P ranks; and since a shard is computed once and copied, all blocks
are bitwise equal afterwards, for any P.

`transport.py` says what a collective is and in which order its parts come. `host.py` does it in host memory
(`fold.py`), `p2p.py` between GPUs that reach each other's memory, `staged.py` between those that don't;
`direct.py` is what these three have in common. `proof.py` finds out what GPUs reach. What is exchanged when,
and why, is a rule's business: lockstep/sync.
"""

from typing import Literal, get_args

ALIGNMENT = 16  # elements: 64 bytes of float32, so that no cache line has two writers; every span begins so

# pairwise: the sum of neighbours, then of neighbouring sums, and so on: a tree
Op = Literal["mean", "sum", "max", "min", "prod", "pairwise"]
OPS: tuple[Op, ...] = get_args(Op)
Span = tuple[int, int]


def shard(span: Span, rank: int, n_ranks: int) -> Span:
    """The part of a span that `rank` folds. Shards are disjoint, begin on the alignment, cover the span."""
    first, last = span
    assert first % ALIGNMENT == 0, f"a span begins on a multiple of {ALIGNMENT} elements, not at {first}"

    def boundary(number: int) -> int:
        return last if number == n_ranks else first + _aligned((last - first) * number // n_ranks)

    return boundary(rank), boundary(rank + 1)


def _aligned(n_elements: int) -> int:
    return n_elements // ALIGNMENT * ALIGNMENT
