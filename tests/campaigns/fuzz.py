"""Randomly damaged files and arguments: python -m campaigns.fuzz 10000 --seed 1

Each reader of readers.py gets a valid folder in which one file was changed at random. It must succeed, or
raise a ValueError (UserError) whose message names a file in that folder. It must not raise anything else, run
code from the file, start a process, open files outside the folder, take long, or need much memory.

A case depends only on the seed, the reader and its number, so that it can be repeated separately:

    python -m campaigns.fuzz --only tars --case 123 --seed 1 --keep /tmp/case
"""

import argparse
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measure import table, write_results
from campaigns.mangling import mangle
from campaigns.readers import READERS, Reader

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0  # seconds per case, on an idle machine
START_SECONDS = 120.0  # seconds until torch is imported
ROOM = 2 << 30  # bytes of address space per case
_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pty.spawn"}
_FORBIDDEN = _STARTS | {"pickle.find_class", "socket.connect", "socket.bind"}
_OWN = tuple(
    str(place) for place in (sys.prefix, sys.base_prefix, ROOT, "/proc", "/sys", "/usr", "/dev/null")
)

Case = tuple[str, int]  # the reader's name and a number


@dataclass(frozen=True)
class Result:
    """The result of a case: 'read', 'refused' or a broken promise, and the bytes of memory that it added."""

    words: str
    peak: int = 0

    @property
    def is_finding(self) -> bool:
        return self.words not in ("read", "refused")


def change(seed: int, case: Case) -> tuple[str, bytes | None]:
    """Return the damaged file of a case and its content, None if the file is missing."""
    reader, dice = READERS[case[0]], random.Random(f"{seed}/{case[0]}/{case[1]}")
    name = dice.choice(reader.bad_ones)
    kind = dice.random()
    if kind < 0.01:
        return name, None
    if kind < 0.03:
        return name, reader.files[dice.choice(list(reader.files))]
    return name, mangle(dice, name, reader.files[name])


def lay(folder: Path, files: dict[str, bytes | None]) -> None:
    """Write files by name; remove those whose content is None."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # not in place: an earlier reader may have mapped the file
        if content is not None:
            path.write_bytes(content)


class Watch:
    """An audit hook that records forbidden actions of a reader. Python cannot remove an audit hook."""

    def __init__(self) -> None:
        self.folder = ""
        self.may: tuple[str, ...] = ()
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.folder:
            return
        if event in _FORBIDDEN and event not in self.may:
            self.seen.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.normpath(os.path.join(self.folder, os.fsdecode(arguments[0])))
            if not path.startswith((self.folder, *_OWN)):
                self.seen.append(f"opened {path}"[:200])


def judge(reader: Reader, folder: Path, watch: Watch, bad: str | None = None) -> str:
    """Read the folder, in which the file `bad` was changed, and return the result."""
    watch.seen.clear()
    watch.folder, watch.may = str(folder), reader.may
    try:
        if bad and reader.read_one:
            reader.read_one(folder / bad)
        else:
            reader.read(folder)
        words = "read"
    except ValueError as error:
        names = any(name in str(error) for name in (str(folder), *reader.named))
        words = "refused" if names else f"names no file: {_described(error)}"
    except BaseException as error:
        words = f"raised {_described(error)}"
    finally:
        watch.folder = ""
    if Path("ran").exists():
        Path("ran").unlink()
        return "ran code"
    return f"did {watch.seen[0]}" if watch.seen else words


def _described(error: BaseException) -> str:
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))
    ]
    own = [frame for frame in frames if ".venv" not in frame.filename and "campaigns" not in frame.filename]
    where = f" at {Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def limit_memory() -> None:
    """Limit the address space to the present size and ROOM."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))


def work(seed: int, cases: list[Case], pipe: Connection) -> None:
    """Send a Result for each case, after a first message that this worker is ready."""
    import torch

    torch.set_num_threads(1)
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)  # messages of decoders
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        folders: dict[str, Path] = {}
        watch = Watch()
        limit_memory()
        pipe.send(Result("ready"))
        for name, number in cases:
            reader = READERS[name]
            if name not in folders:
                folders[name] = Path(place) / f"folder{len(folders)}"
                lay(folders[name], dict(reader.files))
                judge(reader, folders[name], watch)  # what is imported, is imported
            bad, content = change(seed, (name, number))
            lay(folders[name], {bad: content})
            before = _peak()
            words = judge(reader, folders[name], watch, bad)
            pipe.send(Result(words, _peak() - before))
            lay(folders[name], {bad: reader.files[bad]})


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_cases(seed: int, cases: list[Case], patience: float) -> Iterator[tuple[Case, Result]]:
    """Yield the results of all cases, run in a process that is replaced when a case kills it."""
    left = list(cases)
    context = multiprocessing.get_context("spawn")
    while left:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(seed, left, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            _hear(ours, process, patience * START_SECONDS)
            while left:
                result = _hear(ours, process, patience * SECONDS)
                yield left.pop(0), result
                if result.words.startswith(("took", "died")):
                    break
        finally:
            process.kill()
            process.join()
            ours.close()


def _hear(pipe: Connection, process: multiprocessing.process.BaseProcess, seconds: float) -> Result:
    if not pipe.poll(seconds):
        return Result(f"took more than {seconds:.0f} s")
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return Result(f"died with exit code {process.exitcode}")


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign. Exit status 0: all promises were kept; 1: some were broken."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("n", type=int, nargs="?", default=1000, help="cases of each kind (1000)")
    parser.add_argument("--seed", type=int, default=1, help="other seeds, other cases (1)")
    parser.add_argument("--only", choices=READERS, help="one kind")
    parser.add_argument("--case", type=int, help="one case of it")
    parser.add_argument("--keep", type=Path, help="leave the case's files in this folder, unread")
    parser.add_argument("--patience", type=float, default=1.0, help="times the limits, on a busy machine (1)")
    parser.add_argument("--results", type=Path, help="folder for fuzz.md and fuzz.json: docs/results, say")
    words = parser.parse_args(arguments)
    if words.keep and (words.only is None or words.case is None):
        parser.error("--keep needs --only and --case")
    if words.keep:
        bad, content = change(words.seed, (words.only, words.case))
        lay(words.keep, {**READERS[words.only].files, bad: content})
        print(f"{words.keep / bad} is the bad one")
        return 0
    names = [words.only] if words.only else list(READERS)
    numbers = range(words.n) if words.case is None else [words.case]
    cases = [(name, number) for name in names for number in numbers]
    return report(words, names, run_cases(words.seed, cases, words.patience))


def report(words: argparse.Namespace, names: list[str], results: Iterator[tuple[Case, Result]]) -> int:
    """Print findings as they occur, then the table; write it if a folder is given."""
    tally: Counter[tuple[str, str]] = Counter()
    peaks: Counter[str] = Counter()
    findings = []
    for (name, number), result in results:
        tally[name, "finding" if result.is_finding else result.words] += 1
        peaks[name] = max(peaks[name], result.peak)
        if result.is_finding:
            again = f"python -m campaigns.fuzz --only '{name}' --case {number} --seed {words.seed}"
            findings.append(f"{result.words} ({again})")
            print(findings[-1], flush=True)
    head = (
        "what is read",
        "read all the same",
        "refused, the file named",
        "broken promises",
        "most memory, MB",
    )
    columns = ("read", "refused", "finding")
    rows = [
        (name, *(str(tally[name, kind]) for kind in columns), f"{peaks[name] / 1e6:.0f}") for name in names
    ]
    title = f"{sum(tally.values()):,} cases, seed {words.seed}: {len(findings)} broken promises"
    text = "\n".join([table(title, [head, *rows]), *(f"- {line}" for line in findings)])
    print(text)
    if words.results:
        numbers = {"seed": words.seed, "cases": {f"{name}: {kind}": n for (name, kind), n in tally.items()}}
        command = f"python -m campaigns.fuzz {words.n} --seed {words.seed} --patience {words.patience:g}"
        write_results(words.results, "fuzz", [(text, {**numbers, "findings": findings})], command)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
