"""The examples of the documents run as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

RUN = """
import json, sys
for number, code in enumerate(json.load(open("examples.json"))):
    exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
    print("ran", number)
"""


def test_examples_of_the_dataflow_engine_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "flow.md").read_text()
    extending = (
        (ROOT / "docs" / "extending.md").read_text().partition("## A device of the dataflow engine")[2]
    )
    find = re.compile(r"```python\n(.*?)```", re.S).findall
    examples = [*find(text), *find(extending)[:1]]
    (tmp_path / "examples.json").write_text(json.dumps(examples))
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran ") == len(examples) == 8
    assert {"model.pt", "state.pt", "step.dot", "trace.html"} <= {path.name for path in tmp_path.iterdir()}
