"""Workers import the modules that graphs need while the caller does, and no others."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from limits import limit

SCRIPT = """
import sys, time
{first}
import lockstep.synk as synk
synk.fork(2)
import pytensor
pid = synk.session.current_team("a test").workers[0].process.pid
until = time.monotonic() + {seconds}
while "{library}" not in open(f"/proc/{{pid}}/maps").read() and time.monotonic() < until:
    time.sleep(0.02)
maps = open(f"/proc/{{pid}}/maps").read()
print("scipy" in maps, "llvmlite" in maps)
x = pytensor.tensor.vector("x")
f = synk.function([x], (x.sum(), "sum"))
synk.distribute()
assert f([1.0, 2.0, 4.0]) == 7
assert not [finder for finder in sys.meta_path if type(finder).__name__ == "ImportHook"]
synk.close()
"""


@pytest.mark.parametrize("first", ["", "import pytensor"], ids=["import after fork", "import before fork"])
@pytest.mark.parametrize(
    ("flags", "library", "found"),
    [
        pytest.param("", "llvmlite", "True True", marks=pytest.mark.slow),
        ("mode=FAST_COMPILE", "scipy", "True False"),
    ],
    ids=["numba", "no compiler"],
)
def test_workers_import_while_the_caller_does(first: str, flags: str, library: str, found: str) -> None:
    script = SCRIPT.format(first=first, library=library, seconds=limit(30))
    environment = {**os.environ, "PYTENSOR_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=limit(90),
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found


@pytest.mark.slow
def test_a_worker_outlives_a_module_that_no_rank_can_import() -> None:
    script = """
import lockstep.synk as synk
synk.fork(2)
try:
    import pytensor
except ValueError as error:
    print("ValueError")
f = synk.function(lambda x: 2 * x, "gather")
synk.distribute()
print(f([1.0, 2.0]))
"""
    environment = {**os.environ, "PYTENSOR_FLAGS": "floatX=float1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(90), env=environment)
    assert done.stdout == "ValueError\n[2. 4.]\n", done.stderr
