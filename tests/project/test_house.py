"""The code style of the project: which package imports which, what loads torch, how long a file may be."""

import ast
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from limits import limit

import lockstep

TOP = sorted(ROOT.glob("*.py"))
SOURCES = [
    *TOP,
    *(
        path
        for package in ("lockstep", "models", "preprocessing")
        for path in ROOT.glob(f"{package}/**/*.py")
    ),
]
LONGEST = {"train.py": 150, "train_funcs.py": 200}  # lines; of all others 500
WITHOUT_TORCH = ("comm", "memory", "exchange")
DEVICES = {"cpu", "cuda"}
FOLDERS = "lockstep|tests|docs|benchmarks|preprocessing|models|tools"
FILE_NAME = re.compile(rf"(?<![\w/.<>-])(?:{FOLDERS})/[\w/]+\.(?:py|md|sh|cu|yaml|json)\b")


def modules_of(package: str) -> list[str]:
    """All of a package, by their full names, itself included."""
    found = pkgutil.walk_packages([str(ROOT / "lockstep" / package)], f"lockstep.{package}.")
    return [f"lockstep.{package}", *(module.name for module in found)]


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_no_module_of_the_lower_packages_loads_torch(package: str) -> None:
    """One fresh interpreter imports them in turn, and names the first one that loads torch."""
    names = modules_of(package)
    assert len(names) > 2
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=limit(30)
    )
    assert result.returncode == 0, result.stderr


def lint_imports(place: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with the project's contract, on the lockstep that is in `place`."""
    program = Path(sys.executable).parent / "lint-imports"
    return subprocess.run(
        [program, "--no-cache", "--config", ROOT / "pyproject.toml"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )


UPWARD = [
    ("comm/pipes", "backends", "backend_of"),
    ("synk/blocks", "synk.slots", "make_slots"),
    ("flow/lanes", "flow.engine", "Engine"),
]


def test_an_upward_import_breaks_the_contract(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "lockstep", tmp_path / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    clean = lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout
    for file_name, package, name in UPWARD:
        with open(tmp_path / "lockstep" / f"{file_name}.py", "a") as file:
            file.write(f"\nfrom lockstep.{package} import {name}\n")
    broken = lint_imports(tmp_path)
    assert broken.returncode == 1
    for file_name, package, _ in UPWARD:
        assert f"lockstep.{file_name.replace('/', '.')} -> lockstep.{package}" in broken.stdout


def test_the_map_names_every_package() -> None:
    assert lockstep.__doc__
    words = lockstep.__doc__.split()
    packages = [
        path
        for path in (ROOT / "lockstep").iterdir()
        if path.name.strip("_") == path.name and path.suffix != ".typed"
    ]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in packages]
    assert [name for name in names if name not in words] == []
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    assert [path.name for path in packages if path.is_dir() and f"`{path.name}`" not in page] == []


def test_what_a_package_says_of_its_files_is_so() -> None:
    top = {path.name for path in TOP}
    for init in (ROOT / "lockstep").glob("*/__init__.py"):
        words = ast.get_docstring(ast.parse(init.read_text()))
        assert words, init
        named = set(re.findall(r"(?<![\w/.])\w+\.py\b", words)) - top
        assert [name for name in named if not (init.parent / name).exists()] == [], init


def test_files_that_are_named_are_there() -> None:
    """In sources and documents; but what extending.md and models.md tell to write is not there yet."""
    documents = {
        path for path in (ROOT / "docs").glob("*.md") if path.name not in ("extending.md", "models.md")
    }
    texts = [*documents, *ROOT.glob("*.md"), *ROOT.glob("*.yaml"), *ROOT.glob("lockstep/**/*.cu"), *SOURCES]
    named = {(path, name) for path in texts for name in FILE_NAME.findall(path.read_text())}
    assert len(named) > 50
    assert [(str(path), name) for path, name in named if not (ROOT / name).exists()] == []


def test_every_line_that_installs_keeps_the_torch_that_is_there() -> None:
    """Without the constraints, pip may replace a build of torch by another."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    lines = [line for page in pages for line in page.read_text().splitlines() if line.startswith("    ")]
    installing = [line for line in lines if "pip install" in line]
    assert len(installing) >= 6
    assert [line for line in installing if "python -m pip install -c constraints.txt" not in line] == []


def test_files_are_short() -> None:
    assert ROOT / "train_funcs.py" in SOURCES and len(SOURCES) > 100
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    long = {str(path): count for path, count in lines.items() if count > LONGEST.get(path.name, 500)}
    assert long == {}


def names_of_devices(path: Path) -> list[int]:
    """The lines of a file that compare something with the name of a kind of device."""
    comparisons = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)]
    return [
        node.lineno
        for node in comparisons
        for part in (node.left, *node.comparators)
        for value in ast.walk(part)
        if isinstance(value, ast.Constant) and value.value in DEVICES
    ]


def test_only_back_ends_ask_what_they_run_on() -> None:
    assert names_of_devices(ROOT / "lockstep" / "backends" / "devices.py")
    package = ROOT / "lockstep" / "backends"
    others = [path for path in SOURCES if package not in path.parents]
    found = {str(path): names_of_devices(path) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_commit_hooks_are_the_environments_programs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in hooks] == ["local"]  # nothing is fetched
    entries = [hook["entry"].split() for hook in hooks[0]["hooks"] if hook["language"] == "system"]
    checks = [line.split() for line in (ROOT / "Makefile").read_text().splitlines() if "$(BIN)/" in line]
    checked = {Path(words[0]).name for words in checks}
    for program, *_ in entries:
        assert Path(program).parent == Path(".venv/bin") and Path(program).name in checked
        assert (Path(sys.executable).parent / Path(program).name).exists()
    assert {Path(program).name for program, *_ in entries} == {"ruff", "mypy", "lint-imports"}


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    assert len(links) > 30 and all(page.read_text().strip() for page in pages)
    for page, link in links:
        place, _, anchor = link.partition("#")
        if ":" in place:
            continue  # elsewhere
        target = page.parent / place if place else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def imported_modules(path: Path) -> set[str]:
    """Return the last part of the name of every module that a file imports or imports from."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {node.module or "", *(alias.name for alias in node.names)}
    return {module.rpartition(".")[2] for module in modules}


def test_no_test_imports_a_test() -> None:
    """Helpers that several tests share belong in tests/support."""
    tests = {path.stem for path in (ROOT / "tests").glob("**/test_*.py")}
    assert len(tests) > 80
    files = (ROOT / "tests").glob("**/*.py")
    imports = {str(path.relative_to(ROOT)): imported_modules(path) & tests for path in files}
    assert {path: found for path, found in imports.items() if found} == {}
