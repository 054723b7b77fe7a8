"""Kills, stops and signals at random, by the hundred: python -m campaigns.chaos 500 --seed 1

Every case is a program to which one thing happens, at a random moment or at a named point, and which is then
started again: a run of train.py, or one of the programs of synk and flow in programs.py. What must hold: it
ends in time with the right exit code and last line, no process, no file and no shared memory of it is left,
its newest checkpoint is whole, and the end has the bits of the unbroken run.

What has been done is kept in runs/chaos: interrupted, the same command goes on.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.measure import commit, table, write_results
from campaigns.cases import STANDS_STILL, Case, cases
from campaigns.watching import ROOT, Watched
from lockstep.errors import UserError

ENDS_IN = 10.0  # seconds, on an idle machine
WHOLE_RUN = 300.0  # the same, for a program that nothing happens to
NAMED_MEMORY = ("psm_", "sem.", "torch_", "cuda.shm", "lockstep")  # what may be ours in /dev/shm


def strike(run: Watched, case: Case) -> bool:
    """Does it. False where the program had ended before, or the victim was never there."""
    run.wait_for(lambda: case.has_come(run), WHOLE_RUN)
    run.wait_for(lambda: case.pid(run), WHOLE_RUN)
    pid = case.pid(run)
    if run.process.poll() is not None or not pid:
        return False
    try:
        (os.killpg if case.victim == "the group" else os.kill)(pid, getattr(signal, case.signal))
    except ProcessLookupError:
        return False
    return True


def problems_of(run: Watched, case: Case, patience: float) -> Iterator[str]:
    """Promises that a program which was hit has broken. patience: how much slower than idle it is."""
    began = bool(run.pids()) if case.program == "train.py" else "\nstep" in run.text()
    seconds = patience * (ENDS_IN + (STANDS_STILL[case.program] if case.signal == "SIGSTOP" else 0))
    expected, word = case.expected()
    code = run.code(patience * WHOLE_RUN if 0 in expected else seconds)
    is_done = "\ndone" in run.text()
    if code is None:
        yield f"it had not ended {seconds:.0f} s after"
    elif code not in expected and not (is_done and code == 0):
        yield f"its exit code is {code}, not {expected[0]}"
    elif began and code in expected and word not in run.last_line():
        yield f"its last line does not say '{word}': {run.last_line()}"
    if case.program == "train.py" and "Traceback" in run.text():
        yield "it showed a traceback"
    if not run.wait_for_none_left(seconds):
        yield f"{len(run.left())} processes were left"


def going_on(folder: Path, case: Case, unbroken: Path, patience: float) -> Iterator[str]:
    """The same for its next start, whose end must be the unbroken run's."""
    run = case.start(folder, patience)
    try:
        code = run.code(patience * WHOLE_RUN)
    finally:
        run.end()
    if code != 0 and "epochs are done" not in run.last_line():
        yield f"going on with it ended with {code}: {run.last_line()}"
        return
    ours, theirs = (load_file(case.end(place)) for place in (folder, unbroken))
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        yield "its end has other bits than the unbroken run's"
    left = [path for pattern in ("run/checkpoints/.*", ".*.safetensors.*") for path in folder.glob(pattern)]
    if left and code == 0 and case.program == "train.py":
        yield f"files were left: {', '.join(path.name for path in left)}"


def run_case(case: Case, place: Path, patience: float) -> tuple[bool, list[str]]:
    """Whether it was hit before its end, and which promises it broke. place: keeps unbroken runs."""
    unbroken = place / case.name
    if not unbroken.exists():
        unbroken.mkdir()
        whole = dataclasses.replace(case, signal="none").start(unbroken, patience)
        try:
            code = whole.code(patience * WHOLE_RUN)
        finally:
            whole.end()
        if code != 0:
            raise UserError(f"{unbroken}: the unbroken run did not end well: {whole.last_line()}")
    before = named_memory(), len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(dir=place) as folder:
        run = case.start(Path(folder), patience)
        try:
            struck = strike(run, case)
            problems = list(problems_of(run, case, patience))
        finally:
            run.end()
        if wrong := case.broken_files(Path(folder)):
            problems.append(f"its newest checkpoint is not whole: {wrong}")
        problems += going_on(Path(folder), case, unbroken, patience)
    problems += [f"left in /dev/shm: {name}" for name in sorted(named_memory() - before[0])]
    if len(os.listdir("/proc/self/fd")) > before[1]:
        problems.append("a descriptor of it was left here")
    return struck, problems


def named_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(NAMED_MEMORY)}


def run_all(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What came of each case, from the journal where it has been done before."""
    journal = words.state / f"seed_{words.seed}.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    done = {entry["case"]: entry for entry in (json.loads(line) for line in lines if line.endswith("\n"))}
    with tempfile.TemporaryDirectory() as place, open(journal, "a") as file:
        for number, case in enumerate(cases(words.n, words.seed), 1):
            entry = done.get(f"{number}: {case}")
            if entry is None:
                struck, problems = run_case(case, Path(place), words.patience)
                kept = "broken" if problems else "kept" if struck else "kept; ended before it was hit"
                entry = {"case": f"{number}: {case}", "kept": kept, "problems": problems}
                entry |= {"program": case.program, "signal": case.signal, "commit": commit()}
                print(json.dumps(entry), file=file, flush=True)
                print(f"{number}/{words.n} {case}: {'; '.join(problems) or kept}", flush=True)
            yield entry


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all promises were kept; 1: some case broke one; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=100, help="cases (100)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases (1)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a busy machine (1)")
    parser.add_argument("--results", type=Path, help="folder for chaos.md and chaos.json: docs/results, say")
    parser.add_argument(
        "--state", type=Path, default=ROOT / "runs/chaos", help="what has been done (runs/chaos)"
    )
    words = parser.parse_args(arguments)
    try:
        return report(words, list(run_all(words)))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130


def report(words: argparse.Namespace, entries: list[dict[str, Any]]) -> int:
    """Prints the tally, and writes it down. Returns the exit code."""
    tally = Counter((entry["program"], entry["signal"], entry["kept"]) for entry in entries)
    broken = [f"{entry['case']}: {problem}" for entry in entries for problem in entry["problems"]]
    rows = [("program", "what happened", "promises", "cases")]
    rows += [(*key, str(n)) for key, n in sorted(tally.items())]
    title = f"{words.n} programs of 1 to 4 processes, seed {words.seed}: {len(broken)} broken promises"
    commits = ", ".join(sorted({entry["commit"] for entry in entries}))
    text = "\n".join([table(title, rows), f"Commits: {commits}\n", *(f"- {line}" for line in broken)])
    print(text)
    if words.results:
        numbers = {"seed": words.seed, "cases": words.n, "broken": broken}
        command = f"python -m campaigns.chaos {words.n} --seed {words.seed} --patience {words.patience:g}"
        write_results(words.results, "chaos", [(text, numbers)], command)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
