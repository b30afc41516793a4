PYTHON ?= python
# The seed of random tests: any word.
SEED ?= $(shell git rev-parse HEAD 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help check lint drawn docs pictures test long sample mutants bench presets format

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: lint docs drawn ## Format, lint, types, docs, then the tests that CI draws, with coverage

lint: ## Format, lint and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

drawn: ## The tests that CI draws, with coverage: all that `make test` runs, and a share of all others
	$(PYTHON) -m pytest -q -n 2 --ci --shuffle --cov --cov-report= --cov-fail-under=0
	$(PYTHON) -m coverage report --skip-covered --show-missing --omit='cdpsim/draw/*'
	$(PYTHON) -m coverage report --skip-covered --show-missing --include='cdpsim/draw/*' --fail-under=0

docs: ## The pages of docs/ as HTML, in build/docs
	$(PYTHON) -m sphinx -E -W --keep-going -q -b html docs build/docs

pictures: ## The pictures of docs/, drawn anew by the commands that pages show
	$(PYTHON) -m tests.helpers.pages

test: ## The tests alone, as in the README
	$(PYTHON) -m pytest -q

long: ## The tests marked long
	CDPSIM_TEST_SEED=$(SEED) $(PYTHON) -m pytest -m long --timeout=3600

sample: ## A hundredth of them, drawn by SEED (default: the commit), as CI runs it
	@echo "to repeat what is drawn: make sample SEED=$(SEED)"
	CDPSIM_TEST_SEED=$(SEED) CDPSIM_TEST_SHARE=0.01 $(PYTHON) -m pytest -m long tests/across_rooms/test_long.py

mutants: ## A hundred mutants of the core, drawn by SEED: do the tests that cover them fail?
	$(PYTHON) -m tests.mutation $(or $(SEED),1)

bench: ## The benchmarks, one at a time
	$(PYTHON) -m pytest benchmarks --benchmark-only --numprocesses=0

MODELS ?= $(patsubst cdpsim/presets/models/%.toml,%,$(wildcard cdpsim/presets/models/*.toml))

presets: ## Profile the shipped models again (or MODELS="resnet50 gpt2"), each by the command in its first line
	@set -e; for model in $(MODELS); do \
	  file=cdpsim/presets/models/$$model.toml; new=$$(mktemp -d); \
	  $(PYTHON) -m validation $$(sed -n '1s/^# made by: python -m validation \(.*\) -o .*/\1/p' $$file) -o $$new/made.toml; \
	  { grep '^#' $$file; cat $$new/made.toml; } > $$new/file; cat $$new/file > $$file; rm -r $$new; \
	done

format: ## Format the code and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
