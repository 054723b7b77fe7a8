"""Runs with and without a trainer that computes wrong gradients.

    make recheck N=200

Three trainers check one logical rank's gradient in every step. In each faulty run one bit of a random
element of one trainer's gradients is wrong, from a random step on. The trainer must be named within
`logical_ranks` checks. As many runs without a fault must end without an accusation. Results are in
docs/results/recheck.json.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import limits
from conftest import ROOT, make_folder
from faulty_gradients import KEYS, config_of, train_faultily

from benchmarks.measure import machine
from lockstep.config import Config
from lockstep.launch.ranks import run_ranks

RESULTS = ROOT / "docs" / "results" / "recheck.json"
N_TRAINERS = 3
N_IMAGES = 61  # 8 steps of 8 images in each of two epochs, in the last of which 5 images are left
LAST_START = 10  # the latest step from which a gradient is wrong; 4 more steps follow it


def run_case(config: Config, dice: random.Random | None) -> dict[str, Any]:
    """Train once, with a random fault if `dice` is given, and say whether the promise was kept."""
    wrong = dice.randrange(N_TRAINERS) if dice else None
    from_step, seed = (dice.randint(1, LAST_START), dice.randrange(1 << 30)) if dice else (0, 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoints").mkdir()
        results = run_ranks(train_faultily, N_TRAINERS, config, Path(folder), wrong, from_step, seed)
    case = {"wrong": wrong, "from_step": from_step, "seed": seed}
    if wrong is None:
        return {**case, "kept": all(name == "" for name, _, _ in results)}
    name, text, step = results[wrong]
    others = [results[rank] for rank in range(N_TRAINERS) if rank != wrong]
    is_named = name == "DeviceFault" and "is not that of two other trainers" in text
    others_name_it = all(f"trainer {wrong} computes wrong gradients" in text for _, text, _ in others)
    in_time = from_step <= step < from_step + KEYS["logical_ranks"]
    return {**case, "checks": step - from_step + 1, "kept": is_named and others_name_it and in_time}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=int, nargs="?", default=200, help="with a fault, and as many without")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    limits.measure(1)
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = make_folder(Path(folder) / "set", n_train=N_IMAGES, n_val=9)
        config = config_of(data, N_TRAINERS, recheck_every=1)
        faulty = [run_case(config, dice) for _ in range(arguments.runs)]
        true = [run_case(config, None) for _ in range(arguments.runs)]
    checks = [case.get("checks", 0) for case in faulty]
    result = {
        "machine": machine(),
        "seed": arguments.seed,
        "logical_ranks": KEYS["logical_ranks"],
        "faulty_runs": len(faulty),
        "found_after_checks": {str(number): checks.count(number) for number in sorted(set(checks))},
        "true_runs": len(true),
        "broken": [case for case in faulty + true if not case["kept"]],
    }
    RESULTS.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    print(
        f"{len(faulty)} faulty and {len(true)} true runs, {len(result['broken'])} broken promises; {RESULTS}"
    )
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main())
