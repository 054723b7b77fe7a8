"""Tests of docs/reading.md: the tour names existing files and has at most 2,000 lines."""

import re

from conftest import ROOT

ROW = re.compile(r"^\|[^|]*\| `([\w/.]+)` \| (\d+) \|$", re.MULTILINE)


def test_the_tour_has_at_most_2000_lines_and_its_counts_are_about_right() -> None:
    rows = {path: int(count) for path, count in ROW.findall((ROOT / "docs" / "reading.md").read_text())}
    assert {"train.py", "train_funcs.py", "proc_load.py"} < set(rows) and len(rows) > 8
    counts = {path: len((ROOT / path).read_text().splitlines()) for path in rows}
    assert sum(counts.values()) <= 2000
    wrong = {
        path: (rows[path], count) for path, count in counts.items() if abs(rows[path] - count) > count // 3
    }
    assert wrong == {}


def test_no_file_of_the_tour_imports_the_other_front_ends() -> None:
    paths = [path for path, _ in ROW.findall((ROOT / "docs" / "reading.md").read_text())]
    texts = {path: (ROOT / path).read_text() for path in paths}
    assert [path for path, text in texts.items() if re.search(r"lockstep\.(synk|flow)", text)] == []
