# make train   set up, make the digits' dataset, train on it        make test       set up, run the tests
# make bench   run the CPU benchmarks, write docs/results           make test-all   run slow tests, too
# make bench-peers  compare with other PyTorch programs
# make check   lint, format, types, imports                         make demos      lockstep.synk's demos
# make fuzz    damage files and arguments at random (N=1000 of each kind, SEED=1)
# make chaos   send random signals to processes (N=500, SEED=1)      make soak   check that nothing grows (MINUTES=30)
# make goodput kill processes every 15 s and measure what that costs (MINUTES=15)
# make tampering  change single bits of a run, replay true ones (N=1000)    make recheck  make gradients wrong (N=200)
PYTHON ?= python3
BIN := .venv/bin
# compileall compiles modules on all cores and leaves out the tests of packages; pip does neither.
# It compiles our modules, too, which otherwise each process of a first run would do.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/(tests|testing/_internal|sympy|networkx)/' .venv/lib lockstep preprocessing || true
DIGITS := data/digits/manifest.json
.DEFAULT_GOAL := help

.PHONY: help setup setup-test data train test test-all check format bench bench-peers rules fuzz chaos soak goodput tampering recheck demos clean
help:
	@sed -n '1,7s/^# //p' Makefile

# The dependencies of training, of the report and of the digits; setup-test adds those of tests, checks and benchmarks.
setup: .venv/.installed
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) '.[report,demo]'
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

# Most of a test is starting processes and waiting for them: two more side by side than there are cores, up to five.
# On two cores, make test took 380 s with three side by side, and 362 s with four.
WORKERS := $(shell n=$$(nproc); echo $$((n < 3 ? n + 2 : 5)))
# Bytecode of the tests is kept, whatever the user's environment says: without it, each of the processes compiles
# all tests each time, and each program of a test the project.
test test-all: export PYTHONDONTWRITEBYTECODE :=
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

# Four trainers on real images by each rule, with five seeds: 25 minutes on two busy cores; the same command resumes it.
rules: .venv/.installed $(DIGITS)
	$(BIN)/python -m benchmarks.rules

bench: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m benchmarks

bench-peers: .venv/.installed-test $(DIGITS)
	$(BIN)/python -m benchmarks.peers

CAMPAIGN = PYTHONPATH=tests:tests/support:tests/cuda_sim:tests/faults $(BIN)/python -m campaigns.

# Damaged files for every reader: `make fuzz N=10000` takes about 20 minutes on two busy cores.
SEED ?= 1
fuzz: .venv/.installed-test
	$(CAMPAIGN)fuzz $(or $(N),1000) --seed $(SEED) $(ARGS)

# Random signals to every kind of process: 500 cases take hours. The same command resumes it.
chaos: .venv/.installed-test $(DIGITS)
	$(CAMPAIGN)chaos $(or $(N),500) --seed $(SEED) $(ARGS)

soak: .venv/.installed-test $(DIGITS)
	$(CAMPAIGN)soak $(or $(MINUTES),30) $(ARGS)

# Runs whose processes are killed every 15 seconds, and unbroken ones: an hour for 15 minutes of each network.
goodput: .venv/.installed-test $(DIGITS)
	$(CAMPAIGN)goodput $(or $(MINUTES),15) $(ARGS)

# Single-bit changes in a run's files, and replays of true runs.
tampering: .venv/.installed-test $(DIGITS)
	$(CAMPAIGN)tampering $(or $(N),1000) --seed $(SEED) $(ARGS)

# Trainers that compute wrong gradients, and as many runs of true ones: 200 of each take a quarter of an hour.
recheck: .venv/.installed-test
	$(CAMPAIGN)recheck $(or $(N),200) --seed $(SEED) $(ARGS)

demos: .venv/.installed-test
	demos/run.sh $(abspath $(BIN)/python)

clean:
	rm -rf .venv data/digits data/digits_jpeg *.egg-info build
