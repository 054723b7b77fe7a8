"""The benchmark of sums over hosts (benchmarks/hosts/sums.py)."""

import pytest

from benchmarks.hosts.sums import Place, free_port, time_overlap
from lockstep.launch.ranks import run_ranks


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_sums_beside_the_backward_pass_are_measured() -> None:
    here = Place(("", ""), ("127.0.0.1", "127.0.0.1"), free_port())
    for seconds in run_ranks(time_overlap, 2, here):
        assert seconds.keys() == {"backward", "network", "both"} and min(seconds.values()) > 0
