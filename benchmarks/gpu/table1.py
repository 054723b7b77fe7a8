"""theano_alexnet's report, in its own form: seconds per 20 iterations of minibatch 256, by train.py itself.

One rank or two, with loaders (para_load) or without. On a machine with one GPU two ranks share it: that is no
speed-up, and it is labelled so.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.exchange import places
from benchmarks.gpu.images import dataset_folder
from benchmarks.gpu.record import Record
from benchmarks.gpu.setting import Setting

PRECISION = "bf16"
_ROOT = Path(__file__).resolve().parents[2]


def run(setting: Setting, work: Path, record: Record) -> None:
    runs = {}
    for name, keys in _cases(setting).items():
        with record.attempt(name):
            runs[name] = _train(setting, work, keys, record.seconds_left())
            record.keep("runs", runs)
    record.keep("precision", PRECISION)


def _cases(setting: Setting) -> dict[str, dict[str, Any]]:
    cases = {}
    for place, devices in {"one rank": ["cuda:0"], **places()}.items():
        for para_load in ("true", "false"):
            ranks = place if place == "one rank" else f"two ranks on {place}"
            cases[f"{ranks}, para_load: {para_load}"] = {
                "devices": f"[{', '.join(devices)}]",
                "batch_size": setting.batch_size // len(devices),
                "para_load": para_load,
            }
    if setting.rehearsal:  # half of them show everything; the simulated device takes long to prove itself
        cases = dict(list(cases.items())[1:3])
        for keys in cases.values():
            keys["exchange"] = "staged"
    return cases


def _train(setting: Setting, work: Path, keys: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One epoch by train.py in `seconds` at most; what its log says. Raises RuntimeError where it fails."""
    values = {
        "model": setting.model,
        "model_args": json.dumps(setting.model_args),
        "n_classes": setting.n_classes,
        "data_folder": dataset_folder(setting, work),
        "rand_mirror": "true",
        "shuffle_block": setting.batch_size // 8,
        "learning_rate": 0.01,
        "n_epochs": 1,
        "precision": PRECISION,
        "print_freq": setting.table1_freq,
        "weights_dir": work / "runs",
        "run_name": "table1",
        **keys,
    }
    words = [f"{key}={value}" for key, value in values.items()]
    print("--- train.py", *words, flush=True)
    shutil.rmtree(work / "runs", ignore_errors=True)
    command = [sys.executable, "train.py", *words]
    code = subprocess.run(command, cwd=_ROOT, timeout=min(seconds, setting.table1_seconds)).returncode
    if code:
        raise RuntimeError(f"train.py ended with exit code {code}: see the log")
    lines = (work / "runs" / "table1" / "log.jsonl").read_text().splitlines()
    return read_log([json.loads(line) for line in lines])


def read_log(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the lines of progress but the first, in which algorithms are chosen and caches fill."""
    lines = [event for event in events if event["event"] == "progress"][1:]
    assert lines, "the run was too short: one line of progress only"
    phases = lines[0]["seconds"]
    total = sum(sum(line["seconds"].values()) for line in lines)
    return {
        "seconds_per_20": median(line["seconds_per_20"] for line in lines),
        "images_per_second": median(line["images_per_second"] for line in lines),
        "shares": {phase: sum(line["seconds"][phase] for line in lines) / total for phase in phases},
        "lines": len(lines),
        "notices": [event["text"] for event in events if event["event"] == "warning"],
    }
