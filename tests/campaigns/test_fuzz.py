"""A few cases of each kind of campaigns.fuzz, and that it finds what it looks for."""

import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from campaigns import fuzz
from campaigns.fuzz import Watch, change, judge, lay
from campaigns.readers import READERS, Reader

CASES = 12  # of each kind
NEVER_REFUSED = ("logs of runs", "bytes at the rendezvous")  # of which what is bad is passed over


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize("name", READERS)
def test_bad_files_are_read_or_refused_by_name(
    name: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reader, folder = READERS[name], tmp_path / "folder"
    lay(folder, dict(reader.files))
    assert judge(reader, folder, watch) == "read"  # else nothing below would mean anything
    tally: Counter[str] = Counter()
    for number in range(CASES):
        bad, content = change(3, (name, number))
        lay(folder, {bad: content})
        words = judge(reader, folder, watch, bad)
        assert words in ("read", "refused"), f"case {number} of seed 3: {words}"
        tally[words] += 1
        lay(folder, {bad: reader.files[bad]})
    assert tally["refused"] or name in NEVER_REFUSED


def test_the_same_seed_makes_the_same_files() -> None:
    for name in ("manifests", "tars", "bytes at the rendezvous", "messages between hosts"):
        assert change(1, (name, 5)) == change(1, (name, 5)) != change(2, (name, 5))


def nothing(folder: Path) -> None:
    """Make no files, for a reader that needs none."""


def refuse(words: str):
    def read(folder: Path) -> None:
        raise ValueError(words.format(folder))

    return read


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (refuse("{}/a.npy: is bad"), "refused"),
        (refuse("it is bad"), "names no file"),
        (lambda folder: {}["key"], "raised KeyError"),
        (lambda folder: Path("/etc/hostname").read_text(), "did opened /etc/hostname"),
        (lambda folder: Path("../secret").write_text(""), "did opened"),
        (lambda folder: subprocess.run(["true"]), "did subprocess.Popen"),
        (lambda folder: Path("ran").touch(), "ran code"),
        (lambda folder: bytearray(1 << 60), "raised MemoryError"),
    ],
)
def test_what_must_not_happen_is_found(
    read, said: str, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    assert judge(Reader(nothing, (), read), tmp_path / "folder", watch).startswith(said)


class Ended:
    """Stands for a worker."""

    exitcode = -11

    def join(self) -> None:
        """It has."""


def test_a_worker_that_hangs_or_dies_is_found() -> None:
    ours, theirs = fuzz.multiprocessing.Pipe()
    begin = time.monotonic()
    assert fuzz._hear(ours, Ended(), 0.05).words.startswith("took more than")
    assert time.monotonic() - begin >= 0.05
    theirs.close()
    assert fuzz._hear(ours, Ended(), 5).words == "died with exit code -11"


@pytest.mark.slow
def test_the_campaign_writes_its_tally(tmp_path: Path) -> None:
    assert (
        fuzz.main(["3", "--only", "tars", "--seed", "4", "--results", str(tmp_path), "--patience", "9"]) == 0
    )
    assert "3 cases, seed 4: 0 broken promises" in (tmp_path / "fuzz.md").read_text()
    assert fuzz.main(["--only", "tars", "--case", "2", "--keep", str(tmp_path / "case")]) == 0
    assert (tmp_path / "case/train.tar").exists()
