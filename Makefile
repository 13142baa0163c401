# `make demo` and `make test` work on a fresh machine: they first set up what they need.
PYTHON      ?= python3
# Index for PyTorch's CPU build, used if the configured package index lacks it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
QUICK       ?=
PYTEST_ARGS ?=
# Lanes of tests: one waits for processes to start or end while another computes. Empty for a single one.
LANES       ?= -n 2
UNIT_LANES  ?= -n 3
ORDER       := --dist loadfile --no-loadscope-reorder
BIN         := .venv/bin

.PHONY: help setup setup-dev demo demo-llm demo-tools test test-unit bench-quick check format docs lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## create .venv with what a run on CPU needs; does nothing if it is up to date
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh

setup-dev: ## create .venv and add what tests, checks and the documentation need
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh dev

demo: setup ## run the main example: warm-up, mean and max@8 training, evaluation, plots (QUICK=1: 3 minutes)
	@$(BIN)/python -m examples.countdown.demo $(if $(QUICK),--quick)

demo-llm: setup ## fetch SmolLM2-135M-Instruct and train it on generated tasks for three objectives (QUICK=1: two steps each)
	@$(BIN)/python -m examples.smollm2.demo $(if $(QUICK),--quick)

demo-tools: setup ## teach SmolLM2-135M-Instruct to use the tool python (QUICK=1: two steps)
	@$(BIN)/python -m examples.tool_use.demo $(if $(QUICK),--quick)

test: setup-dev ## run all tests: unit, then integration with real Ray, vLLM, DeepSpeed and Redis; print the ten slowest
	@$(BIN)/python -m pytest tests/unit $(UNIT_LANES) $(ORDER) $(PYTEST_ARGS)
	@$(BIN)/python -m pytest tests/integration $(LANES) $(ORDER) --durations=10 $(PYTEST_ARGS)

test-unit: setup-dev ## run the unit tests
	@$(BIN)/python -m pytest tests/unit $(UNIT_LANES) $(ORDER) $(PYTEST_ARGS)

bench-quick: setup-dev ## measure speed ratios for a few minutes; fails if one is over 15% below benchmarks/baseline.json
	@$(BIN)/python -m benchmarks.quick

check: setup-dev ## check lint, format, types and import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup-dev ## format the code and apply automatic lint fixes
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: setup-dev ## build the documentation site in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: ## resolve the lock files in deploy/locks again from pyproject.toml
	@$(BIN)/uv pip compile -q pyproject.toml --extra cpu --extra dev --no-header --no-annotate --generate-hashes \
		--python-version 3.11 \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o deploy/locks/dev.txt
	@$(BIN)/uv pip compile -q pyproject.toml --extra cpu --extra reasoning-gym --no-header --no-annotate -c deploy/locks/dev.txt \
		--python-version 3.11 \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o deploy/locks/cpu.txt
	@PIP_FIND_LINKS="$(PIP_FIND_LINKS)" bash deploy/docker/lock.sh

clean: ## delete the environment, caches, the documentation site and demo results
	@rm -rf .venv demo demo-llm demo-tools site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
