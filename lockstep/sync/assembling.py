"""Assembly of a tensor that exists in shards, for a checkpoint."""

from collections.abc import Mapping, Sequence

import torch

from lockstep.exchange import Span
from lockstep.exchange.transport import Transport


def assemble(
    transport: Transport, spans: Sequence[Span], flat: torch.Tensor, values: Mapping[Span, torch.Tensor]
) -> torch.Tensor:
    """Return the whole tensor, (elements of `flat`,), in host memory. All ranks call it at once.

    Args:
        transport: Over the blocks `flat`.
        spans: The same on all ranks.
        flat: This rank's block, (n,), in which the values travel. Its elements of the spans are overwritten.
        values: This rank's part, by the pieces of its shards of the spans. A piece may end in padding and
            have fewer values.
    """
    for (first, _), piece in values.items():
        flat[first : first + len(piece)].copy_(piece)
    for span in spans:
        transport.all_gather(span)
    return in_host_memory(flat)


def in_host_memory(flat: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which shares nothing with `flat`."""
    return flat.cpu().clone()
