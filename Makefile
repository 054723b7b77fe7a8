# make train   set up, make the digits' dataset, train on it        make test    set up, run the tests
# make bench   measure and print the tables of docs/results         make check   lint, format, types
# make demos   run the demos of lockstep.synk
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e
DIGITS := data/digits/manifest.json
.DEFAULT_GOAL := help

.PHONY: help setup data train test check format bench demos clean
help:
	@sed -n '1,3s/^# //p' Makefile

setup: .venv/.installed
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[dev]'
	@if command -v nvidia-smi >/dev/null; then tools/install_pycuda.sh $(BIN)/python || \
		echo "note: PyCUDA could not be built (why: see above), so training will be on the CPU"; fi
	touch $@

data: $(DIGITS)
$(DIGITS): | .venv/.installed
	rm -rf data/digits data/digits_jpeg data/.digits.unfinished
	$(BIN)/python preprocessing/make_digits.py data/digits_jpeg
	$(BIN)/python preprocessing/make_hkl.py data/digits_jpeg data/digits --size 36

train: .venv/.installed $(DIGITS)
	$(BIN)/python train.py report=true $(ARGS)

# Most of a test is starting processes and waiting for them: side by side on up to four cores.
test: .venv/.installed
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.installed $(DIGITS)
	$(BIN)/python -m benchmarks

demos: .venv/.installed
	demos/run.sh $(abspath $(BIN)/python)

clean:
	rm -rf .venv data/digits data/digits_jpeg *.egg-info build
