"""What a process has freed stays with it, once that is asked for."""

import subprocess
import sys

from conftest import ROOT

STEPS = """
import resource, sys
import numpy as np
from lockstep.memory.malloc import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    return sum(float(np.ones(12_500_000)[-1]) for _ in range(3))
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_step_takes_no_new_pages() -> None:
    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", STEPS, how], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("kept") < 100 < faults("given back")
