# Everything a newcomer needs:
#
#   make quickstart   install, then train a small GPT on text that is already on this machine
#   make test         install, then the tests (about 14 minutes on two idle cores)
#   make test-all     the same and the slow ones
#   make clients      langchain-openai, litellm and lm-eval, installed beside the project, against a server
#   make lint         formatter, linter, type checker, project rules, links, generated parts of the docs
#   make browser      the tests of the chat page; they need Chromium (apt install chromium)
#   make bench        every benchmark; each prints a ratio
#
# Settings: PYTHON=python3.12 (which Python makes the environment), JOBS=4 (test processes),
# PIP_FLAGS="--extra-index-url URL" (for pip), CI_SKIP_INSTALL=1 (use PYTHON as it is, install nothing),
# COVERAGE=1 or 0 (`make test-all` measures line coverage, or does not).

SHELL := /bin/sh
PYTHON ?= python3
JOBS ?= 2
PIP_FLAGS ?=

ifdef CI_SKIP_INSTALL
PY := $(PYTHON)
MEGALITH := megalith
RUNTIME :=
DEV :=
else
PY := .venv/bin/python
MEGALITH := .venv/bin/megalith
RUNTIME := .venv/.runtime-installed
DEV := .venv/.dev-installed
endif

PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)
PYTEST := $(PY) -m pytest --numprocesses $(JOBS) --dist loadfile

# sys.monitoring, which needs Python 3.12, reports a line once. Tracing in Python 3.11 reports it every time it runs:
# tests/plan/test_simulate.py took 2.4 times the CPU time, tests/hf/test_families_train.py 1.7 times (November 2026).
COVERAGE ?= $(shell $(PY) -c 'import sys; print(int(sys.version_info >= (3, 12)))')
COVERAGE_REPORT := build/coverage.json
COVERAGE_OPTIONS = $(if $(filter 1,$(COVERAGE)),--cov=megalith --cov-report=json:$(COVERAGE_REPORT))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test test-all browser clients lint lint-ruff lint-format lint-types lint-rules lint-links lint-map fmt bench install install-dev clean

help:
	@sed -n '3,9s/^# *//p' Makefile

quickstart: $(RUNTIME)
	$(MEGALITH) quickstart

test: $(DEV)
	$(PYTEST) -m "not slow and not browser"

test-all: $(DEV)
	@rm -f $(COVERAGE_REPORT)
	$(PYTEST) -m "not browser" $(COVERAGE_OPTIONS)
	@$(PY) tools/ci_report.py coverage $(COVERAGE_REPORT)

browser: $(DEV)
	@$(PY) -c "import playwright" 2>/dev/null || $(PIP_INSTALL) --editable '.[browser]'
	$(PY) -m pytest -m browser tests/browser

clients: $(DEV) build/clients-venv/.installed
	MEGALITH_PYTHON="$$(command -v $(PY))" build/clients-venv/bin/python -m pytest -W ignore::UserWarning:pydantic \
	  --confcutdir=tests/clients tests/clients

lint: lint-ruff lint-format lint-types lint-rules lint-links lint-map

lint-ruff: $(DEV)
	$(PY) -m ruff check .

lint-format: $(DEV)
	$(PY) -m ruff format --check .

lint-types: $(DEV)
	$(PY) -m mypy --strict megalith tools

lint-rules: $(DEV)
	$(PY) tools/lint_project.py

lint-links: $(DEV)
	$(PY) tools/check_links.py

lint-map: $(DEV)
	$(PY) tools/file_map.py --check
	$(PY) tools/flag_table.py --check
	$(PY) tools/settings_reference.py --check

fmt: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) tools/file_map.py --write
	$(PY) tools/flag_table.py --write
	$(PY) tools/settings_reference.py --write

bench: $(DEV)
	@for file in benchmarks/*.py; do echo "== $$file"; $(PY) "$$file" || exit 1; done

install: $(RUNTIME)

install-dev: $(DEV)

# Torch goes first and alone: asked for together with the rest, an unpinned dependency of the rest could bring another
# build of it. A stamp is newer than what it was made from, so an install happens once per change of the pins.
.venv/.runtime-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11. Install one and run: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv || { \
	  echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu, run: apt install python3-venv" >&2; exit 2; }
	$(PIP_INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(PIP_INSTALL) --editable .
	@touch $@

.venv/.dev-installed: .venv/.runtime-installed
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

# The clients' requirements may contradict those of the project.
build/clients-venv/.installed: tests/clients/requirements.txt
	@test -x build/clients-venv/bin/python || $(PYTHON) -m venv build/clients-venv
	build/clients-venv/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --requirement $<
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find megalith tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
