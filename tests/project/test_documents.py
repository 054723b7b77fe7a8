"""Tests of the form of README.md, the decisions and the glossary."""

import re

from conftest import ROOT

from lockstep.cli import COMMANDS

DECISIONS = ROOT / "docs" / "decisions"
LABELS = ["Context", "Decision"]


def entries_of(text: str) -> dict[str, str]:
    """Return the text below each heading of the third level."""
    parts = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_times_in_readme_are_those_of_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    times = re.findall(r"([\d,]*\.?\d+) ms", text.partition("## Measured")[2].partition("\n## ")[0])
    results = "".join(
        (ROOT / "docs" / "results" / name).read_text() for name in ("cpu.md", "peers.md", "gpu.md")
    )
    measured = [float(number) for number in re.findall(r"\d+\.?\d*", results)]
    assert len(times) == 12
    for time in times:
        n_decimals = len(time.partition(".")[2])
        assert float(time.replace(",", "")) in {round(number, n_decimals) for number in measured}, time


def test_training_names_every_command_of_lockstep() -> None:
    text = " ".join((ROOT / "docs" / "training.md").read_text().split())
    named = re.search(r"with the subcommands ([\w, ]+)\.", text)
    assert named and re.split(r", | and ", named[1]) == list(COMMANDS)


def test_tests_that_documents_name_exist() -> None:
    """Not those of the changelog and of the performance log, which tell what was."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *DECISIONS.glob("*.md")]
    named = {name for path in texts for name in re.findall(r"\btest_\w+(?:\.py)?", path.read_text())}
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = {name for path in files for name in re.findall(r"\bdef (test_\w+)", path.read_text())}
    assert len(named) > 100
    assert sorted(named - functions - {path.name for path in files}) == []


def test_every_decision_has_its_number_its_parts_and_at_most_25_lines() -> None:
    pages = {path: path.read_text() for path in DECISIONS.glob("*.md") if path.name != "README.md"}
    assert len(pages) >= 8
    for path, text in pages.items():
        headings = list(entries_of(text))
        letter = headings[0][0]
        numbers = [heading.partition(". ")[0] for heading in headings]
        assert numbers == [f"{letter}-{number}" for number in range(1, len(headings) + 1)], path
        for heading, entry in entries_of(text).items():
            assert re.findall(r"\*\*(\w+)\.\*\*", entry)[:2] == LABELS, heading
            assert len(entry.strip().splitlines()) <= 25, heading


def test_the_index_lists_every_decision() -> None:
    index = re.findall(r"^- (\w-\d+\. .*)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    pages = [path for path in DECISIONS.glob("*.md") if path.name != "README.md"]
    headings = [heading for path in pages for heading in entries_of(path.read_text())]
    assert sorted(index) == sorted(headings)


def test_the_glossary_is_sorted_and_defines_every_term_in_a_few_lines() -> None:
    entries = entries_of((ROOT / "docs" / "glossary.md").read_text())
    assert list(entries) == sorted(entries)
    assert {"arena", "slot", "ring", "rule", "transport", "logical rank"} < set(entries)
    assert [term for term, entry in entries.items() if not 3 <= len(entry.strip().splitlines()) <= 7] == []


def test_benchmarks_that_documents_name_can_be_run() -> None:
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    named = {name for text in texts for name in re.findall(r"python -m\s+(benchmarks[\w.]*\w)", text)}
    assert len(named) > 5
    places = [ROOT / name.replace(".", "/") for name in sorted(named)]
    files = [(place.with_suffix(".py"), place / "__main__.py") for place in places]
    assert [file for file, package in files if not (file.exists() or package.exists())] == []
