#!/bin/sh
# Runs all demos with this Python: demos/run.sh .venv/bin/python. Graphs are computed without compiling them first.
set -e
synk=$(dirname "$0")/synk # no cd, since "$@" may be a relative path
for demo in "$synk"/[1-5]_*.py "$synk"/digits_*.py "$synk"/lbfgs.py "$synk"/paper_sgd.py "$synk"/torch_mlp.py; do
    echo "== $(basename "$demo")"
    PYTENSOR_FLAGS="mode=FAST_COMPILE" "$@" "$demo"
done
