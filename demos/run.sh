#!/bin/sh
# Runs all demos with this Python: demos/run.sh .venv/bin/python. Graphs are computed without compiling them first.
set -e
cd "$(dirname "$0")/synk"
for demo in [1-5]_*.py digits_*.py lbfgs.py paper_sgd.py torch_mlp.py; do
    echo "== $demo"
    PYTENSOR_FLAGS="mode=FAST_COMPILE" "$@" "$demo"
done
