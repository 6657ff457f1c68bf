# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test results lint types wheel fuzz kills install clean

demo: install
	$(BIN)/equipoise demo --out demo

# A file's tests run in one process, which makes what they share once; in order, since the last files are short.
test: install lint types
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not results'

# README's tables, the committed report and what is claimed of the records, against the records.
results: install
	$(BIN)/pytest -m results

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# What `pip install equipoise` gives somebody who has no clone: a wheel in an environment of its own, and the demo from it.
wheel: install
	rm -rf dist build
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd dist && venv/bin/equipoise demo --seeds 1 --out demo

# The stamp makes a second call free; it is made anew when what is installed changes.
install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Equipoise needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What takes minutes and is no part of the tests: saved learners changed at random, and runs killed at random.
fuzz: install
	$(BIN)/python tests/fuzz.py 10000

kills: install
	$(BIN)/python tests/kills.py

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache
