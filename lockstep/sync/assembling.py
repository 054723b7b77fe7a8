"""A tensor that exists in shards, assembled for a checkpoint."""

import torch

from lockstep.exchange import Span
from lockstep.exchange.transport import Transport


def assemble(
    transport: Transport, span: Span, flat: torch.Tensor, first: int, values: torch.Tensor
) -> torch.Tensor:
    """All of it, (elements of `flat`,), in host memory. All ranks call it, with the same span.

    values: what this rank has of it, from element `first` on, within its shard of the span. It travels in
    `flat`, the block that the transport is over, whose elements of the span are lost.
    """
    flat[first : first + len(values)].copy_(values)
    transport.all_gather(span)
    return in_host_memory(flat)


def in_host_memory(flat: torch.Tensor) -> torch.Tensor:
    """A copy that stays as it is whatever becomes of `flat`."""
    return flat.cpu().clone()
