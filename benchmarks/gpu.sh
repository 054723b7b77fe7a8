#!/usr/bin/env bash
# Every GPU test and benchmark in one command, a part in less than nine minutes:  benchmarks/gpu.sh [folder] [options]
#   folder       for the results, gpu-<date>.json, .md and .log; else $OUT, else docs/results
#   --part n     1: what is worth most (preflight, AlexNet in bf16, layers, torch.compile, loading);
#                2: the tests that need a GPU, and table1; 3: exchange, fp32 and tf32, ResNet-50, lockstep.synk and flow, two hosts
#   --only a,b   these sections only, of those named above: preflight, alexnet, layers, compiled, loading, tests, tests2, table1,
#                exchange, precisions, resnet50, functions, flow, hosts
#   --seconds n  for everything (500)
#   --rehearse   small sizes on the simulated driver, without a GPU: shows that it works, and measures nothing
# PYTHON names the Python (python3). PyCUDA may lie in a folder on PYTHONPATH. LOCKSTEP_COMMIT names the code where git can't.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}

fail() {
    echo "gpu.sh: $*" >&2
    exit 2
}

has() { "$PYTHON" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON: set PYTHON to one that has torch"
for module in torch numpy h5py yaml safetensors tqdm pytest; do
    has $module || fail "$PYTHON has no module $module"
done
has xdist || echo "note: $PYTHON has no module xdist: the tests will take longer"

# The kernels' binaries are kept in a cache folder, which must be one that can be written to.
cache=${XDG_CACHE_HOME:-${HOME:-/nowhere}/.cache}
if ! { mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; }; then
    export XDG_CACHE_HOME=${TMPDIR:-/tmp}/lockstep-cache
fi

list_gpus='import sys
from lockstep.backends.gpus import list_gpus
from lockstep.errors import UserError
try:
    print(*list_gpus(), sep="\n")
except UserError as error:
    sys.exit(f"gpu.sh: {error}")'

case " $* " in
*" --rehearse "*) ;;
*)
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi || fail "nvidia-smi fails: the driver does not work"
    else # as in some containers: a process of its own asks the driver's library
        "$PYTHON" -c "$list_gpus" || fail "there is no GPU to measure; without one: --rehearse"
    fi
    "$PYTHON" -c "import pycuda.driver" ||
        fail "$PYTHON can't import PyCUDA: put the folder in which it is installed onto PYTHONPATH"
    "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || fail "torch sees no GPU"
    ;;
esac
# A cold disk must not cost the first sections their limits: the libraries are read once, in the background.
libraries='import importlib.util, pathlib
for name in ("torch", "nvidia", "pycuda"):
    spec = importlib.util.find_spec(name)
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in pathlib.Path(folder).rglob("*.so*"):
            with open(path, "rb") as file:
                while file.read(1 << 24):
                    pass'
case " $* " in
*" --rehearse "*) ;;
*) "$PYTHON" -c "$libraries" 2>/dev/null & ;;
esac
exec "$PYTHON" -m benchmarks.gpu "$@"
