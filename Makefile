# Two commands do all the set-up: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Three processes, each with files of tests of its own, as tests of lost workers wait more than they compute;
# files with jobs of several workers come first. Each computes with one thread, on any number of cores: more would
# wait for each other. With bytecode, whatever the environment says: tests start dozens of processes, and each would
# compile the whole package again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile --no-loadscope-reorder

.PHONY: install train test test-all slow chaos schedules check docs bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

train: install
	$(BIN)/samestep train digits --towers 8

# Without what is marked. That of the folder is not even imported, which takes seconds in each of the processes.
test: install
	$(PYTEST) -m "not slow and not packages and not long" --ignore tests/packages

# With what takes long, or other packages: those compared with, and those that build and check the package.
test-all: test check
	$(PYTEST) -m "(packages or long) and not slow" tests

slow: install
	$(PYTEST) -m slow

chaos: install
	$(BIN)/python -m pytest -q -m "slow or long" tests/integration/test_elastic.py tests/integration/test_hosts.py \
		tests/integration/test_launch.py
	$(BIN)/python -m tests.integration.chaos
	$(BIN)/python -m tests.integration.takeover

schedules: install
	$(BIN)/python -m tests.schedules --count 100000 --processes 2
	$(BIN)/python -m tests.schedules --count 2000 --processes 2 --model
	$(BIN)/python -m tests.takeovers --program small --count 100000 --processes 2
	$(BIN)/python -m tests.takeovers --program trainer --count 2000 --processes 2
	$(BIN)/python -m tests.takeovers --program loop --count 2000 --processes 2

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: install $(VENV)/.docs
	$(BIN)/python docs/pictures/draw.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

bench: install
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
