"""A tensor that exists in shards, assembled for a checkpoint."""

from collections.abc import Mapping, Sequence

import torch

from lockstep.exchange import Span
from lockstep.exchange.transport import Transport


def assemble(
    transport: Transport, spans: Sequence[Span], flat: torch.Tensor, values: Mapping[Span, torch.Tensor]
) -> torch.Tensor:
    """All of it, (elements of `flat`,), in host memory. All ranks call it, with the same spans.

    values: what this rank has of it, by the pieces of its shards of the spans; a piece may end in padding and
    have fewer values. They travel in `flat`, the block that the transport is over, whose elements of the
    spans are lost.
    """
    for (first, _), piece in values.items():
        flat[first : first + len(piece)].copy_(piece)
    for span in spans:
        transport.all_gather(span)
    return in_host_memory(flat)


def in_host_memory(flat: torch.Tensor) -> torch.Tensor:
    """A copy that stays as it is whatever becomes of `flat`."""
    return flat.cpu().clone()
