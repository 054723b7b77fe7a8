"""What a step's exchange over the network costs beside its compute: timed once, before the first step."""

import time

import torch

from lockstep.hosts.network import Network

_TRIED = 1 << 20  # elements of the sum that is timed: 4 MB
_MUCH = 0.2  # the share of the compute above which it is worth a change


class Cost:
    """network: whose sums are timed. dtype: of what is summed later. All trainers of all hosts make one."""

    def __init__(self, network: Network, dtype: torch.dtype, device: torch.device) -> None:
        self._latency, _ = _time(network, torch.zeros(1, dtype=dtype, device=device))
        seconds, n_bytes = _time(network, torch.zeros(_TRIED, dtype=dtype, device=device))
        self._of_byte = max(0.0, seconds - self._latency) / n_bytes
        network.n_bytes = 0

    def describe(self, n_bytes: float, compute_seconds: float) -> str:
        """For people, of a step in which a trainer sends so many bytes to its likes."""
        seconds = self._latency + n_bytes * self._of_byte
        text = (
            f"network: {n_bytes / 1e6:,.2f} MB a step from each trainer take about {1e3 * seconds:,.1f} ms, "
            f"beside {1e3 * compute_seconds:,.1f} ms of compute"
        )
        if seconds <= _MUCH * compute_seconds:
            return text
        return f"{text}: wire: bfloat16, factors: true, rule: local or a larger accumulate make that less"


def _time(network: Network, tensor: torch.Tensor) -> tuple[float, int]:
    """Seconds of a sum, and how much it sends; the second of two, for the first opens what it needs."""
    for _ in range(2):
        network.n_bytes = 0
        begin = time.perf_counter()
        network.sum([tensor], rounded=True)
        seconds = time.perf_counter() - begin
    return seconds, max(1, network.n_bytes)
