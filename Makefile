# The habits of this repository. `make check` is what to run before a commit (under 3 minutes on a laptop).
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help install format lint types unit docs check test clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: ## .venv with the dev tools
	bash scripts/install.sh --extra dev

format: ## ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: ## ruff, formatting, import floors (under 10 s)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: ## pyright on hybridflow/
	$(BIN)/pyright --pythonpath $(BIN)/python

unit: ## tests of single rooms, two at a time
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not vllm and not ray and not slow and not real_model" tests/unit

docs: ## every link and example of the docs
	$(BIN)/python -m pytest -q tests/unit/docs

check: lint types unit docs ## all of the above

test: ## the whole suite, as CI runs it
	bash scripts/test.sh

clean: ## caches and build outputs
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
