# `make demo` and `make test` are all the set-up there is. `make` alone lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PROMPT ?= What is the capital of France?

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-device fuzz lint bench clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/run.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "plait needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[run]'
	@touch $@

.venv/dev.stamp: pyproject.toml .venv/run.stamp
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@

demo: .venv/run.stamp  ## install, pull a small real model, compile it for two vendors, answer PROMPT
	$(BIN)/plait pull smollm2 -o models/smollm2
	$(BIN)/plait compile models/smollm2 --targets h100,mi300 -o models/smollm2.plait
	$(BIN)/plait run models/smollm2.plait "$(PROMPT)" --max-tokens 64

test: .venv/dev.stamp lint  ## every check and test that CI runs
	$(BIN)/python -m pytest -q

test-slow: .venv/dev.stamp  ## the long suites (minutes each)
	$(BIN)/python -m pytest -q -m "slow and not device"

test-device: .venv/dev.stamp  ## what needs a GPU, under 8 minutes on an H100; without one it says why it skips
	export PLAIT_CACHE="$${PLAIT_CACHE:-$$HOME/.cache/plait}"; \
	$(BIN)/python -m tests.device.compile && $(BIN)/python -m pytest -q -W default -m device tests/device

fuzz: .venv/dev.stamp  ## 2,000 damaged files of every kind (half an hour); `python -m tests.fuzz config` is one kind
	$(BIN)/python -m tests.fuzz

lint: .venv/dev.stamp  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev.stamp  ## the pipeline benchmark (see benchmarks/ for the others)
	$(BIN)/python benchmarks/pipeline.py

clean:  ## remove the virtual environment and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
