"""The examples of the documents run unchanged."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import make_folder

ROOT = Path(__file__).resolve().parents[2]


def run(number: int, code: str) -> int:
    exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
    return number


def test_examples_of_the_dataflow_engine_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "flow.md").read_text()
    extending = (
        (ROOT / "docs" / "extending.md").read_text().partition("## A device of the dataflow engine")[2]
    )
    find = re.compile(r"```python\n(.*?)```", re.S).findall
    examples = [*find(text), *find(extending)[:1]]
    make_folder(tmp_path / "data" / "digits", size=36)
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as thread:  # its own, so it has its own current device
        ran = list(thread.map(run, range(len(examples)), examples))
    assert len(ran) == 9
    assert {"model.pt", "state.pt", "step.dot", "trace.html"} <= {path.name for path in tmp_path.iterdir()}
