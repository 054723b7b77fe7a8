"""Single-bit changes in a run's receipts, checkpoints, data and configuration, and replays of true runs.

    make tampering N=1000 ARGS="--replays 200"

It trains on the digits with two trainers. Each change must be found and its file named; each replay, on one,
two and three trainers in turns, must be equal. Results are in docs/results/tampering.json.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import verify
from benchmarks.measure import machine
from lockstep.runs.receipts import NAME
from lockstep.signals import Interrupts

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "tampering.json"
KEYS = ("logical_ranks=8", "global_batch_size=64", "check_every=5", "snapshot_freq=2", "n_epochs=8")
DATA = ("manifest.json", "labels/*.npy", "misc/img_mean.npy", "*_hkl/*.hkl")


def train(place: Path) -> Path:
    """Train a run with two trainers and return its folder."""
    keys = (f"weights_dir={place}", "run_name=run", f"data_folder={place / 'data'}", "devices=[cpu, cpu]")
    command = [sys.executable, str(ROOT / "train.py"), *KEYS, *keys, "cpu_threads=1"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return place / "run"


def problems_of(run: Path) -> list[str]:
    arguments = argparse.Namespace(run=run, replay=None, step=None, json=True, overrides=[])
    found: list[str] = verify.verify(arguments, Interrupts())["problems"]
    return found


def tamper(run: Path, data: Path, dice: random.Random) -> dict[str, Any]:
    """Change one bit of one file, verify, and restore the file."""
    kinds = {
        "receipts": [run / NAME],
        "checkpoint": sorted((run / "checkpoints").glob("epoch_*")),
        "configuration": [run / "config.yaml"],
        "data": sorted(path for pattern in DATA for path in data.glob(pattern)),
    }
    kind = dice.choice(list(kinds))
    path = dice.choice(kinds[kind])
    content = path.read_bytes()
    bit = dice.randrange(8 * len(content))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        problems = problems_of(run)
    finally:
        path.write_bytes(content)
    name = "receipt" if kind == "receipts" else str(path)
    is_named = any(name in problem for problem in problems)
    return {"kind": kind, "file": path.name, "bit": bit, "found": bool(problems), "named": is_named}


def replay(run: Path, number: int, n_trainers: int) -> dict[str, Any]:
    """Replay random intervals on some trainers."""
    devices = ", ".join(["cpu"] * n_trainers)
    command = [sys.executable, "verify.py", str(run), "--replay", str(number), "--json"]
    done = subprocess.run([*command, f"devices=[{devices}]"], capture_output=True, text=True, cwd=ROOT)
    found = json.loads(done.stdout) if done.returncode in (0, 1) else {"problems": [done.stderr]}
    return {"trainers": n_trainers, "intervals": number, "problems": found["problems"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("changes", type=int, nargs="?", default=1000)
    parser.add_argument("--replays", type=int, default=200, help="intervals that are replayed")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        shutil.copytree(ROOT / "data" / "digits", place / "data")
        run = train(place)
        assert problems_of(run) == [], "a true run must be verified"
        cases = [tamper(run, place / "data", dice) for _ in range(arguments.changes)]
        replays = []
        for n_trainers in (1, 2, 3):
            number = arguments.replays * n_trainers // 3 - arguments.replays * (n_trainers - 1) // 3
            replays += [replay(run, min(20, number - done), n_trainers) for done in range(0, number, 20)]
    missed = [case for case in cases if not (case["found"] and case["named"])]
    unequal = [each for each in replays if each["problems"]]
    result = {
        "machine": machine(),
        "seed": arguments.seed,
        "changes": len(cases),
        "by_kind": {kind: sum(case["kind"] == kind for case in cases) for kind in {c["kind"] for c in cases}},
        "missed": missed,
        "replayed_intervals": sum(each["intervals"] for each in replays),
        "unequal": unequal,
    }
    RESULTS.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(f"{len(cases)} changes, {len(missed)} missed; {result['replayed_intervals']} intervals replayed, ")
    print(f"{len(unequal)} replays differ; {RESULTS}")
    return int(bool(missed or unequal))


if __name__ == "__main__":
    sys.exit(main())
