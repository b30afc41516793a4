PYTHON ?= python
# The seed of mutants: any word.
SEED ?= $(shell git rev-parse HEAD 2>/dev/null)
PYTEST = $(PYTHON) -m pytest -q -n 2
EVERYTHING = --cases all --slow
# The word that decides which tests and examples are drawn; without one, the commit.
WITH_DRAW = $(if $(DRAW),--draw $(DRAW))

.DEFAULT_GOAL := help
.PHONY: help quick test check lint drawn all room long sample release-check lowest mutants docs pictures bench presets format

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quick: ## What a change of one room needs, in under 20 seconds
	@$(PYTHON) -m tests.quick

test: ## The small suite, as in the README: make test DRAW=word
	$(PYTEST) $(WITH_DRAW)

check: lint docs drawn ## Format, lint, types, docs, then the tests that CI draws, with coverage

lint: ## Format, lint and types
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

drawn: ## The tests that CI draws, with coverage: all that `make test` runs, and a share of all others
	$(PYTEST) $(WITH_DRAW) --ci --shuffle --cov --cov-report= --cov-fail-under=0
	$(PYTHON) -m coverage report --skip-covered --show-missing --omit='cdpsim/draw/*'
	$(PYTHON) -m coverage report --skip-covered --show-missing --include='cdpsim/draw/*' --fail-under=0

docs: ## The pages of docs/ as HTML, in build/docs
	$(PYTHON) -m sphinx -E -W --keep-going -q -b html docs build/docs

pictures: ## The pictures of docs/, drawn anew by the commands that pages show
	$(PYTHON) -m tests.helpers.pages

all: ## Every case of every test that this environment can run; with torch those of the harness, too
	$(PYTEST) $(EVERYTHING)

room: ## Every case of one room: make room ROOM=trace
	$(if $(TESTS),,$(error ROOM=$(ROOM) has no tests; give a folder of tests/, such as ROOM=trace))
	$(PYTEST) $(EVERYTHING) $(TESTS)
TESTS = $(if $(ROOM),$(wildcard tests/$(ROOM) tests/test_$(ROOM).py cdpsim/$(ROOM) cdpsim/$(ROOM).py))

long: ## The tests that take minutes: make long DRAW=word
	$(PYTEST) $(EVERYTHING) $(WITH_DRAW) -m long --timeout=3600

sample: ## A hundredth of them: make sample DRAW=word
	$(PYTEST) $(EVERYTHING) $(WITH_DRAW) -m long --share 0.01 tests/across_rooms/test_long.py

release-check: ## What a release needs beside that: results of every schedule, measured on a CPU and on a GPU
	$(PYTEST) $(EVERYTHING) -m release

lowest: ## Ten commands with the lowest versions that pyproject.toml allows, in an environment of their own
	$(PYTHON) -m tests.lowest

mutants: ## A hundred mutants, drawn by SEED: do the tests that cover them fail? (QUICK=1: drawn tests first)
	$(PYTHON) -m tests.mutation $(or $(SEED),1) $(if $(QUICK),--quick)

bench: ## The benchmarks, one at a time
	$(PYTHON) -m pytest benchmarks --benchmark-only

MODELS ?= $(patsubst cdpsim/presets/models/%.toml,%,$(shell grep -l '^# made by: ' cdpsim/presets/models/*.toml))

presets: ## Profile the shipped profiles again (or MODELS="resnet50"), each by the command in its first line
	@set -e; for model in $(MODELS); do \
	  file=cdpsim/presets/models/$$model.toml; new=$$(mktemp -d); \
	  $(PYTHON) -m validation $$(sed -n '1s/^# made by: python -m validation \(.*\) -o .*/\1/p' $$file) -o $$new/made.toml; \
	  { grep '^#' $$file; cat $$new/made.toml; } > $$new/file; cat $$new/file > $$file; rm -r $$new; \
	done

format: ## Format the code and mend what ruff can mend
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .
