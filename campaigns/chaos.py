"""Kills, stops and signals at random, by the hundred: python -m campaigns.chaos 500 --seed 1

Every case is a program to which one thing happens, at a random moment or at a named point, and which is then
started again: train.py on one host or on two, or one of the programs of synk and flow in programs.py. What
must hold: it ends in time with the right exit code and last line, no process, no file and no shared memory of
it is left, its newest checkpoint is whole, and the end has the bits of the unbroken run.

What has been done is kept beside the results: interrupted, the same command goes on.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.measure import commit, table, write_results
from campaigns.cases import HOSTS, STANDS_STILL, Case, cases
from campaigns.watching import ROOT, Watched
from lockstep.comm.pipes import START_SECONDS
from lockstep.errors import UserError

ENDS_IN = 10.0  # seconds, on an idle machine
WHOLE_RUN = 300.0  # the same, for a program that nothing happens to
NEVER_CAME = (1, 2)  # the exit codes of a host that waits in vain for another
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


def problems_of(run: Watched, case: Case, host: int, patience: float) -> Iterator[str]:
    """Promises that a program which was hit has broken. patience: how much slower than idle it is."""
    began = bool(run.pids()) if case.is_training else "\nstep" in run.text()
    expected, word = case.expected(host)
    in_vain = case.program == HOSTS and not began  # is the wait for a host that has not come
    if in_vain and host != case.host:
        expected += NEVER_CAME
    still = STANDS_STILL[case.program] if in_vain or case.signal == "SIGSTOP" else 0
    if case.signal == "SIGSTOP" and not began:
        still = max(still, START_SECONDS)
    seconds = patience * (ENDS_IN + still)
    code = run.code(patience * WHOLE_RUN if 0 in expected else seconds)
    all_left = run.wait_for_none_left(seconds)  # the last word on a launcher's death comes after it
    is_done = "\ndone" in run.text()
    if code is None:
        yield f"it had not ended {seconds:.0f} s after"
    elif code not in expected and not (is_done and code == 0):
        yield f"its exit code is {code}, not {expected[0]}: {run.last_line()}"
    elif began and code in expected and word not in run.last_line():
        yield f"its last line does not say '{word}': {run.last_line()}"
    if case.is_training and "Traceback" in run.text():
        yield "it showed a traceback"
    if not all_left:
        yield f"{len(run.left())} processes were left"


def finish(case: Case, folder: Path, patience: float) -> str:
    """Starts it, and lets it come to its end. What is wrong with that, or ''."""
    runs = case.start(folder, patience)
    try:
        codes = [run.code(patience * WHOLE_RUN) for run in runs]
    finally:
        for run in runs:
            run.end()
    lines = [run.last_line() for run in runs]
    is_over = all(code == 0 or "epochs are done" in line for code, line in zip(codes, lines, strict=True))
    return "" if is_over else f"{codes}: {' / '.join(lines)}"


def going_on(folder: Path, case: Case, unbroken: Path, patience: float) -> Iterator[str]:
    """The same for its next start, whose end must be the unbroken run's."""
    if wrong := finish(case, folder, patience):
        yield f"going on with it ended with {wrong}"
        return
    for place, whole in zip(case.places(folder), case.places(unbroken), strict=True):
        ours, theirs = (load_file(case.end(each)) for each in (place, whole))
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            yield "its end has other bits than the unbroken run's"
        left = [*place.glob("run/checkpoints/.*"), *place.glob(".*.safetensors.*")]
        if left and case.is_training:
            yield f"files were left: {', '.join(path.name for path in left)}"


def run_case(case: Case, place: Path, patience: float) -> dict[str, Any]:
    """What came of it. place: keeps unbroken runs. seconds: from its being hit until nothing of it was left;
    None where that is not to end it.
    """
    unbroken = place / case.name
    if not unbroken.exists():
        unbroken.mkdir()
        if wrong := finish(dataclasses.replace(case, signal="none"), unbroken, patience):
            raise UserError(f"{unbroken}: the unbroken run did not end well: {wrong}")
    before = named_memory(), len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(dir=place) as name:
        is_hit, seconds, problems = hit(case, Path(name), patience)
        for where in case.places(Path(name)):
            if wrong := case.broken_files(where):
                problems.append(f"its newest checkpoint is not whole: {wrong}")
        problems += going_on(Path(name), case, unbroken, patience)
    problems += [f"left in /dev/shm: {name}" for name in sorted(named_memory() - before[0])]
    if len(os.listdir("/proc/self/fd")) > before[1]:
        problems.append("a descriptor of it was left here")
    kept = "broken" if problems else "kept" if is_hit else "kept; ended before it was hit"
    is_to_end = is_hit and 0 not in case.expected(case.host)[0]
    return {"kept": kept, "problems": problems, "seconds": round(seconds, 2) if is_to_end else None}


def hit(case: Case, folder: Path, patience: float) -> tuple[bool, float, list[str]]:
    """Has it happen. Whether that was before its end, seconds until all had left, broken promises."""
    runs = case.start(folder, patience)
    try:
        is_hit, since = strike(runs[case.host], case), time.monotonic()
        problems = [text for host, run in enumerate(runs) for text in problems_of(run, case, host, patience)]
        return is_hit, time.monotonic() - since, problems
    finally:
        for run in runs:
            run.end()


def named_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(NAMED_MEMORY)}


def journal_of(words: argparse.Namespace) -> Path:
    return Path(words.results / f"chaos_{words.seed}.jsonl")


def done_before(words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the journal has, by case. A line that was cut off counts for nothing."""
    path = journal_of(words)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {entry["case"]: entry for entry in (json.loads(line) for line in lines if line.endswith("\n"))}


def run_all(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What came of each case of this share, from the journal where it has been done before."""
    done = done_before(words)
    share, shares = map(int, words.share.split("/"))
    words.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, open(journal_of(words), "a") as file:
        for number, case in enumerate(cases(words.n, words.seed), 1):
            entry = done.get(f"{number}: {case}")
            if entry is None and zlib.crc32(case.name.encode()) % shares != share - 1:
                continue
            if entry is None:
                entry = {"case": f"{number}: {case}", "program": case.program, "signal": case.signal}
                entry |= run_case(case, Path(place), words.patience) | {"commit": commit()}
                print(json.dumps(entry), file=file, flush=True)
                said = "; ".join(entry["problems"]) or entry["kept"]
                print(f"{number}/{words.n} {case}: {said}", flush=True)
            yield entry


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: all promises were kept; 1: some case broke one; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=100, help="cases (100)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases (1)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a busy machine (1)")
    parser.add_argument("--share", default="1/1", help="1/2 and 2/2: two that work side by side (1/1)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results", help="folder for chaos.md")
    words = parser.parse_args(arguments)
    try:
        return report(words, list(run_all(words)))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130


def report(words: argparse.Namespace, entries: list[dict[str, Any]]) -> int:
    """Prints the tally, and writes it down where all is done. Returns the exit code."""
    broken = [f"{entry['case']}: {problem}" for entry in entries for problem in entry["problems"]]
    title = f"{len(entries)} cases, seed {words.seed}: {len(broken)} broken promises"
    commits = ", ".join(sorted({entry["commit"] for entry in entries}))
    text = "\n".join([table(title, rows_of(entries)), f"Commits: {commits}\n", *(f"- {b}" for b in broken)])
    print(text)
    if len(entries) < words.n:
        print(f"{words.n - len(entries)} of {words.n} are left to others, so {words.results} has no chaos.md")
    else:
        numbers = {"seed": words.seed, "cases": words.n, "broken": broken}
        command = f"python -m campaigns.chaos {words.n} --seed {words.seed} --patience {words.patience:g}"
        write_results(words.results, "chaos", [(text, numbers)], command)
    return 1 if broken else 0


def rows_of(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The tally: of each program and signal, how many cases, and after how long the program had ended."""
    rows = [("program", "what happened", "promises", "cases", "ended after, s: median", "longest")]
    tally: dict[tuple[str, ...], list[float | None]] = defaultdict(list)
    for entry in entries:
        tally[entry["program"], entry["signal"], entry["kept"]].append(entry["seconds"])
    for key, found in sorted(tally.items()):
        seconds = sorted(each for each in found if each is not None)
        ends = (f"{seconds[len(seconds) // 2]:.1f}", f"{seconds[-1]:.1f}") if seconds else ("", "")
        rows.append((*key, f"{len(found)}", *ends))
    return rows


if __name__ == "__main__":
    sys.exit(main())
