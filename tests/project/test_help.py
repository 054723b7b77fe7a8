"""Every program's --help is whole: what it does, an example, every option explained, its exit codes."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from forked_programs import forked
from limits import limit

FILES = ["train.py", "validate.py", "verify.py", "classify.py"]
MODULES = ["lockstep.report", "lockstep.doctor", "lockstep.export"]
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "preprocessing").glob("*.py")
    if "__main__" in path.read_text()
)
PROGRAMS = [*FILES, *(f"-m {module}" for module in MODULES), *SCRIPTS]
# An argument, and what is said of it: behind it, or on the next line.
ARGUMENT = re.compile(r"^  (?P<name>\S.*?)(?:  +|\n {10,})(?P<words>\S.*)$", re.MULTILINE)
NAME = re.compile(r"^  (?! )(\S+)", re.MULTILINE)


def test_the_scripts_are_found() -> None:
    assert "preprocessing/make_hkl.py" in SCRIPTS and len(SCRIPTS) >= 6


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_whole(program: str) -> None:
    result = subprocess.run(
        forked([sys.executable, *program.split(), "--help"]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert result.returncode == 0 and not result.stderr, result.stderr
    text = result.stdout
    assert f"\n    python {program}" in text, "no example"
    assert re.search(r"exit(s with an)?\s+code", text, re.IGNORECASE), "no exit codes"
    _, _, listed = text.partition("\npositional arguments:\n")
    assert listed
    explained = {match["name"].split()[0] for match in ARGUMENT.finditer(listed)}
    assert set(NAME.findall(listed)) <= explained
