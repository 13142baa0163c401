# `make demo` and `make test` work on a fresh machine: each sets up what it needs first.
PYTHON      ?= python3
# Where PyTorch's CPU build is taken from if the package index at hand lacks it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
QUICK       ?=
PYTEST_ARGS ?=
BIN         := .venv/bin

.PHONY: help setup setup-dev demo test test-unit bench-quick check format docs lock clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## make .venv with what a run on CPU needs; does nothing when it is up to date
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh

setup-dev: ## make .venv with what tests, checks and the documentation need too
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" bash deploy/setup.sh dev

demo: setup ## the main job: warm-up, mean and max@8 training, evaluation, plots (QUICK=1: 3 minutes)
	@$(BIN)/python -m examples.countdown.demo $(if $(QUICK),--quick)

test: setup-dev ## all tests: unit, then integration with real Ray, vLLM, DeepSpeed and Redis
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)
	@$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)

test-unit: setup-dev ## the tests that take seconds
	@$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

bench-quick: setup-dev ## speed ratios in a few minutes against benchmarks/baseline.json; fails on a loss over 15%
	@$(BIN)/python -m benchmarks.quick

check: setup-dev ## lint, format, types, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup-dev ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: setup-dev ## the documentation as a site, under site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: ## resolve deploy/locks again from pyproject.toml, and the images' locks after it
	@$(BIN)/uv pip compile -q pyproject.toml --extra cpu --extra dev --no-header --no-annotate \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o deploy/locks/dev.txt
	@$(BIN)/uv pip compile -q pyproject.toml --extra cpu --no-header --no-annotate -c deploy/locks/dev.txt \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS)) -o deploy/locks/cpu.txt
	@PIP_FIND_LINKS="$(PIP_FIND_LINKS)" bash deploy/docker/lock.sh

clean: ## remove the environment, caches and demo results
	@rm -rf .venv demo site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
