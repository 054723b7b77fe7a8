"""The process of one section: python -m benchmarks.gpu.section <name> <folder to work in> <setting> <record>
<seconds>. The harness starts it."""

import faulthandler
import importlib
import os
import sys
import time
from pathlib import Path

from benchmarks.gpu import rehearsal
from benchmarks.gpu.harness import BEGAN
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import REAL, REHEARSAL

# In the order of worth; the limits of a part's sections sum to no more than a call has (__main__.SECONDS).
PARTS = {
    1: ("preflight", "alexnet", "layers", "compiled", "loading"),
    2: ("tests", "tests2", "table1"),
    3: ("exchange", "precisions", "resnet50", "functions", "flow", "hosts"),
}
NAMES = PARTS[1] + PARTS[2] + PARTS[3]


def main(name: str, work: str, setting: str, record_file: str, seconds: str) -> int:
    """Returns the exit code: 0 all is measured, 1 parts of it failed."""
    print(f"===== {name}, at most {seconds} s", flush=True)
    began = float(os.environ[BEGAN])  # the harness counts from there; imports may have taken many seconds
    left = float(seconds) - (time.monotonic() - began)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, left - 2))  # where it hangs, before it is killed
    if setting == "rehearsal":
        rehearsal.join()
    assert name in NAMES
    record = Record(Path(record_file), left)
    module = importlib.import_module(f"benchmarks.gpu.{name}")
    with record.attempt(name):
        module.run(REHEARSAL if setting == "rehearsal" else REAL, Path(work), record)
    return 0 if record.complete() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
