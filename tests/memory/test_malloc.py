"""A process keeps its freed memory after `keep_freed_memory`."""

import subprocess
import sys

import pytest
from conftest import ROOT

STEPS = """
import resource, sys
import numpy as np
from lockstep.memory import malloc
if sys.argv[2] == "kept":
    getattr(malloc, sys.argv[1])()
def step():
    return sum(array[-1] for array in [np.ones(int(sys.argv[3])) for _ in range(3)])
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("setting", "n_numbers"), [("keep_freed_memory", 5_000_000), ("keep_small_freed_memory", 4_000_000)]
)
def test_a_step_takes_no_new_pages(setting: str, n_numbers: int) -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", STEPS, setting, how, str(n_numbers)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 100 < faults("given back")
