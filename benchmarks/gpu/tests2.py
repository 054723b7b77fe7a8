"""The tests for GPUs that the section `tests` leaves out."""

from pathlib import Path

from benchmarks.gpu import tests
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting


def run(setting: Setting, work: Path, record: Record) -> None:
    tests.run_rest(setting, work, record)
