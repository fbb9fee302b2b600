.DEFAULT_GOAL := help
.PHONY: help run test test-laws test-faults setup lint bench bench-scheduling bench-replays clean lock

PYTHON_BIN := .venv/bin/python
# Options for what the target starts, as in: make run ARGS="--port 9000 --engine simulated"
ARGS ?=

help: ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | awk -F ': .*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

run: setup ## from nothing to a served model: environment, demo model, database, all processes (ARGS="--port 9000")
	@exec .venv/bin/harness up $(ARGS)

test: setup lint ## from nothing: environment, linters, types, import contracts, the whole test suite
	@$(PYTHON_BIN) -m pytest

test-laws: setup ## the properties of the scheduling core with ten times the examples, new ones each time (ARGS="-k floors")
	@$(PYTHON_BIN) -m pytest --hypothesis-profile=laws tests/core $(ARGS)

test-faults: setup ## the ledger proved by 200 kills of random processes under load: about twenty minutes (ARGS="--kills 50 --seed 7")
	@$(PYTHON_BIN) -m tests.faults.killing $(ARGS)

setup: ## make .venv and install the locked packages (quick when nothing changed)
	@requirements/install.sh

lint: setup ## ruff, formatting, strict types, import contracts
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

bench: setup ## side-by-side measurements, about three minutes; each prints a table of ratios
	@set -e; for name in auth core memory wire gateway settlement; do echo "== benchmarks/$$name.py"; $(PYTHON_BIN) -m benchmarks.$$name; done

bench-scheduling: setup ## policies on the real engine, vLLM alone beside them: about two hours (ARGS="--blocks 4 --seconds 15")
	@$(PYTHON_BIN) -m benchmarks.scheduling $(ARGS)

bench-replays: setup ## policies in virtual time, half an hour to an hour (ARGS="--traces DIR --only headline --docs")
	@$(PYTHON_BIN) -m benchmarks.replays $(ARGS)

clean: ## remove the environment and every cache (the data directory stays)
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock: setup ## resolve pyproject.toml anew into requirements/*.txt
	@$(PYTHON_BIN) requirements/lock.py
