"""Random signals to running programs: python -m campaigns.chaos 500 --seed 1

Each case sends one signal to a program at a random moment or at a named point, and then starts the program
again. Programs are train.py on one host or two, and those of synk and flow in programs.py. The program must
exit in time with the right exit status and last line, leave no process, file or shared memory, and leave a
whole newest checkpoint. After the second start the final weights must equal those of an uninterrupted run.

With --resizing each run is asked for other devices right before its signal.

A journal beside the results records each case, so that the same command resumes an interrupted campaign.
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
from campaigns.cases import HOSTS, LAUNCHER_DIED, STANDS_STILL, Case, cases, resized_cases
from campaigns.watching import ROOT, Watched
from lockstep.comm.pipes import START_SECONDS
from lockstep.errors import UserError

ENDS_IN = 10.0  # seconds until exit, on an idle machine
WHOLE_RUN = 300.0  # seconds of an uninterrupted run, on an idle machine
NEVER_CAME = (1, 2)  # exit statuses of a host whose peer never joins
NAMED_MEMORY = ("psm_", "sem.", "torch_", "cuda.shm", "lockstep")  # prefixes of our names in /dev/shm


def strike(run: Watched, case: Case) -> bool:
    """Send the signal. Return false if the program had exited before or the victim never existed."""
    run.wait_for(lambda: case.has_come(run), WHOLE_RUN)
    run.wait_for(lambda: case.pid(run), WHOLE_RUN)
    case.prepare(run)
    pid = case.pid(run)
    if run.process.poll() is not None or not pid:
        return False
    try:
        (os.killpg if case.victim == "the group" else os.kill)(pid, getattr(signal, case.signal))
    except ProcessLookupError:
        return False
    return True


def problems_of(run: Watched, case: Case, host: int, patience: float) -> Iterator[str]:
    """Yield the broken promises of a program that was hit. `patience` multiplies the time limits."""
    began = bool(run.pids()) if case.is_training else "\nstep" in run.text()
    expected, word = case.expected(host)
    in_vain = case.program == HOSTS and not began  # it still waits for the other host
    if in_vain and host != case.host:
        expected += NEVER_CAME
    still = STANDS_STILL[case.program] if in_vain or case.signal == "SIGSTOP" else 0
    if case.signal == "SIGSTOP" and (not began or case.moment == "starting"):
        still = max(still, START_SECONDS)
    seconds = patience * (ENDS_IN + still)
    code = run.code(patience * WHOLE_RUN if 0 in expected else seconds)
    all_left = run.wait_for_none_left(seconds)  # the message about a launcher's death follows it
    is_done = "\ndone" in run.text()
    if code is None:
        yield f"it had not ended {seconds:.0f} s after"
    elif code not in expected and not (is_done and code == 0):
        yield f"its exit code is {code}, not {expected[0]}: {run.last_line()}"
    elif began and code in expected and not is_said(word, run):
        yield f"its last line does not say '{word}': {run.last_line()}"
    if case.is_training and "Traceback" in run.text():
        yield "it showed a traceback"
    if not all_left:
        yield f"{len(run.left())} processes were left"


def is_said(word: str, run: Watched) -> bool:
    """Return whether the last line says the word, or trainer 0 was already exiting that would say it."""
    return word in run.last_line() or (word == LAUNCHER_DIED and run.is_at("leaving", "trainer 0"))


def finish(case: Case, folder: Path, patience: float) -> str:
    """Run the case's programs to their end; return what went wrong, or ''."""
    runs = case.start(folder, patience)
    try:
        codes = [run.code(patience * WHOLE_RUN) for run in runs]
    finally:
        for run in runs:
            run.end()
    lines = [run.last_line() for run in runs]
    is_over = all(code == 0 or "epochs are done" in line for code, line in zip(codes, lines, strict=True))
    return "" if is_over else f"{codes}: {' / '.join(lines)}"


def resuming(folder: Path, case: Case, unbroken: Path, patience: float) -> Iterator[str]:
    """Start the programs again and yield the broken promises; the end must equal the uninterrupted run's."""
    if wrong := finish(case, folder, patience):
        yield f"going on with it ended with {wrong}"
        return
    for place, whole in zip(case.places(folder), case.places(unbroken), strict=True):
        ours, theirs = (load_file(case.end(each)) for each in (place, whole))
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
            yield "its end has other bits than the unbroken run's"
        left = [
            *place.glob("run/checkpoints/.*"),
            *place.glob(".*.safetensors.*"),
            *place.glob("run/resize.json"),
        ]
        if left and case.is_training:
            yield f"files were left: {', '.join(path.name for path in left)}"


def run_case(case: Case, place: Path, patience: float) -> dict[str, Any]:
    """Run a case and return the entry for the journal.

    Its `seconds` run from the signal until no process was left, or are None if the signal should not end the
    program. `place` holds the uninterrupted runs.
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
        problems += resuming(Path(name), case, unbroken, patience)
    problems += [f"left in /dev/shm: {name}" for name in sorted(named_memory() - before[0])]
    if len(os.listdir("/proc/self/fd")) > before[1]:
        problems.append("a descriptor of it was left here")
    kept = "broken" if problems else "kept" if is_hit else "kept; ended before it was hit"
    is_to_end = is_hit and 0 not in case.expected(case.host)[0]
    return {"kept": kept, "problems": problems, "seconds": round(seconds, 2) if is_to_end else None}


def hit(case: Case, folder: Path, patience: float) -> tuple[bool, float, list[str]]:
    """Send the signal; return whether it came in time, seconds until all had exited, broken promises."""
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
    return Path(words.results / f"{page_of(words)}_{words.seed}.jsonl")


def page_of(words: argparse.Namespace) -> str:
    return "chaos_resizing" if words.resizing else "chaos"


def done_before(words: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the journal's entries by case. A line that was cut off is ignored."""
    path = journal_of(words)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return {entry["case"]: entry for entry in (json.loads(line) for line in lines if line.endswith("\n"))}


def run_all(words: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the entry of each case of this share, from the journal if it was run before."""
    done = done_before(words)
    share, shares = map(int, words.share.split("/"))
    draw = resized_cases if words.resizing else cases
    words.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, open(journal_of(words), "a") as file:
        for number, case in enumerate(draw(words.n, words.seed), 1):
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
    """Run the campaign. Exit status 0: all promises were kept; 1: some were broken; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=100, help="cases (100)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases (1)")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a busy machine (1)")
    parser.add_argument("--share", default="1/1", help="1/2 and 2/2: two that work side by side (1/1)")
    parser.add_argument("--resizing", action="store_true", help="ask for other devices before each signal")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results", help="folder for chaos.md")
    words = parser.parse_args(arguments)
    # Under nohup the programs would inherit SIGHUP as ignored. A handler, unlike that, is not inherited.
    signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        return report(words, list(run_all(words)))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        return 130


def report(words: argparse.Namespace, entries: list[dict[str, Any]]) -> int:
    """Print the table, write the page when all cases are done, and return the exit status.

    The page also has the tables of earlier campaigns with other seeds, whose journals are in the folder.
    """
    text, numbers = section_of(words.seed, entries)
    print(text)
    if len(entries) < words.n:
        print(f"{words.n - len(entries)} of {words.n} are left to others, so {words.results} has no page")
    else:
        options = f"--seed {words.seed} --patience {words.patience:g}" + " --resizing" * words.resizing
        command = f"python -m campaigns.chaos {words.n} {options}"
        before = [(section_of(seed, found)[0], {}) for seed, found in earlier(words)]
        write_results(words.results, page_of(words), [(text, numbers), *before], command)
    return 1 if numbers["broken"] else 0


def section_of(seed: int, entries: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the table of a campaign with its commits and broken promises, and its numbers."""
    broken = [f"{entry['case']}: {problem}" for entry in entries for problem in entry["problems"]]
    n_hit = sum("before it was hit" not in entry["kept"] for entry in entries)
    title = f"{len(entries)} cases ({n_hit} were hit), seed {seed}: {len(broken)} broken promises"
    commits = ", ".join(sorted({entry["commit"] for entry in entries}))
    text = "\n".join([table(title, rows_of(entries)), f"Commits: {commits}\n", *(f"- {b}" for b in broken)])
    return text, {"seed": seed, "cases": len(entries), "broken": broken}


def earlier(words: argparse.Namespace) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield seed and entries of the campaigns of this kind with other seeds, the highest seed first."""
    for seed in range(99, 0, -1):
        entries = done_before(argparse.Namespace(**{**vars(words), "seed": seed}))
        if entries and seed != words.seed:
            yield seed, list(entries.values())


def rows_of(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table: cases per program and signal, and the seconds until the program had exited."""
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
