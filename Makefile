PYTHON ?= python

.DEFAULT_GOAL := help
.PHONY: help check test long bench format

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: ## Format, lint, types, then the tests with coverage: what CI runs
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest --cov --cov-report=term-missing:skip-covered --ignore=tests/validation
	$(PYTHON) -m pytest tests/validation

test: ## The tests alone, as in the README
	$(PYTHON) -m pytest -q

long: ## The tests marked long
	$(PYTHON) -m pytest -m long --timeout=3600

bench: ## The benchmarks, one at a time
	$(PYTHON) -m pytest benchmarks --benchmark-only --numprocesses=0

format: ## Format the code and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
