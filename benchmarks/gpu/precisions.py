"""AlexNet's training step in the precisions beside bf16: fp32 and tf32, launched and captured."""

from pathlib import Path

from benchmarks.gpu import alexnet
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting


def run(setting: Setting, work: Path, record: Record) -> None:
    alexnet.measure(setting, work, record, ("fp32", "tf32"))
