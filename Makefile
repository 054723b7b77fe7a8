# make train   set up, make the digits' dataset, train on it        make test       set up, run the tests
# make bench   measure and print the tables of docs/results         make test-all   those too that take long
# make bench-peers  the same beside what people write without Lockstep
# make check   lint, format, types, imports                         make demos      lockstep.synk's demos
# make fuzz    files and words made bad at random (N=1000 of each kind, SEED=1)
# make chaos   processes killed and stopped at random (N=500, SEED=1)      make soak   nothing grows (MINUTES=30)
PYTHON ?= python3
BIN := .venv/bin
# pip compiles modules one after the other, and packages' tests with them: compileall does it on all cores, without.
# Ours are compiled, too: the processes of a first run would each do it for themselves.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing/_internal|sympy|networkx)/' .venv/lib lockstep preprocessing || true
DIGITS := data/digits/manifest.json
.DEFAULT_GOAL := help

.PHONY: help setup setup-test data train test test-all check format bench bench-peers rules fuzz chaos soak demos clean
help:
	@sed -n '1,6s/^# //p' Makefile

# What training needs; the rest is for tests, checks and benchmarks.
setup: .venv/.installed
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) .
	$(COMPILE)
	@if command -v nvidia-smi >/dev/null; then tools/install_pycuda.sh $(BIN)/python || \
		echo "note: PyCUDA could not be built (why: see above), so training will be on the CPU"; fi
	touch $@

setup-test: .venv/.installed-test
.venv/.installed-test: .venv/.installed
	$(INSTALL) '.[dev]'
	$(COMPILE)
	touch $@

data: $(DIGITS)
$(DIGITS): | .venv/.installed
	rm -rf data/digits data/digits_jpeg data/.digits.unfinished
	$(BIN)/python preprocessing/make_digits.py data/digits_jpeg
	$(BIN)/python preprocessing/make_hkl.py data/digits_jpeg data/digits --size 36

train: .venv/.installed $(DIGITS)
	$(BIN)/python train.py report=true $(ARGS)

# Most of a test is starting processes and waiting for them: one more side by side than there are cores, up to four.
# Two more took longer on two cores (387 s against 347 s).
WORKERS := $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
test: .venv/.installed-test
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: .venv/.installed-test
	$(PYTEST) $(ARGS)

check: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Four trainers on real pictures by each rule, with five seeds: 25 minutes on two busy cores; interrupted, it goes on.
rules: .venv/.installed $(DIGITS)
	$(BIN)/python -m benchmarks.rules

bench: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m benchmarks

bench-peers: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m benchmarks.peers

# What every reader of files makes of bad ones: `make fuzz N=10000` takes about 20 minutes on two busy cores.
SEED ?= 1
fuzz: .venv/.installed-test
	$(BIN)/python -m campaigns.fuzz $(or $(N),1000) --seed $(SEED) $(ARGS)

# Every kind of process killed, stopped and asked to stop: 500 cases take hours. Interrupted, it goes on.
chaos: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m campaigns.chaos $(or $(N),500) --seed $(SEED) $(ARGS)

MINUTES ?= 30
soak: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m campaigns.soak $(MINUTES) $(ARGS)

demos: .venv/.installed-test
	demos/run.sh $(abspath $(BIN)/python)

clean:
	rm -rf .venv data/digits data/digits_jpeg *.egg-info build
