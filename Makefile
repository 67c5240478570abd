# `make` or `make help` lists the targets. Everything lives in .venv; nothing outside this folder is changed.

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# Extra words for pytest and the demo: make test PYTEST_ARGS='-k comparison', make demo DEMO_ARGS='--seed 2'
PYTEST_ARGS ?=
DEMO_ARGS   ?=

SHELL_SCRIPTS := .ci/run $(wildcard */*.sh */*/*.sh */*/*.sbatch */*/*.env)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-gpu lint clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## install everything into .venv (5 GB, mostly torch; done again only when setup.py changes)

demo: $(STAMP)  ## collapse and rescue on this machine, under 10 minutes; results in runs/demo
	@$(PY) examples/demo.py $(DEMO_ARGS)

test: $(STAMP)  ## the test suite; needs no GPU
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	@$(PY) -m pytest -m gpu $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff check, ruff format --check, mypy, shellcheck
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(VENV)/bin/shellcheck $(SHELL_SCRIPTS)

clean:  ## remove .venv, build output, caches and runs/demo
	rm -rf $(VENV) build dist *.egg-info runs/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python is asked to run before it is believed: a pyenv shim is on PATH even where the version behind it is not selected.
# PYTHON=... decides alone where it is given. Candidates fail silently; only the last message speaks.
define FIND_PYTHON
suits() { "$$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }; \
find_python() { \
    local candidate; \
    if [ -n "$${PYTHON:-}" ] && ! suits "$$PYTHON"; then \
        echo "PYTHON=$$PYTHON is no Python >= 3.12 with venv" >&2; return 1; \
    fi; \
    for candidate in $${PYTHON:+"$$PYTHON"} python3.14 python3.13 python3.12 python3; do \
        if suits "$$candidate"; then command -v "$$candidate"; return; fi; \
    done; \
    if command -v pyenv >/dev/null 2>&1; then \
        for candidate in "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python; do \
            if suits "$$candidate"; then echo "$$candidate"; return; fi; \
        done; \
    fi; \
    if command -v uv >/dev/null 2>&1; then \
        candidate="$$(uv python find --no-python-downloads '>=3.12' 2>/dev/null || true)"; \
        if suits "$$candidate"; then echo "$$candidate"; return; fi; \
    fi; \
    echo "No Python >= 3.12 with venv was found. Install one of these, then run make again:" >&2; \
    echo "    Debian 13, Ubuntu 24.04:  sudo apt-get install python3 python3-venv" >&2; \
    echo "    Fedora, RHEL 9 or later:  sudo dnf install python3.12" >&2; \
    echo "    pyenv, no root needed:    pyenv install 3.12" >&2; \
    echo "    uv, no root needed:       uv python install 3.12" >&2; \
    echo "A Python that is not on PATH can be named: make venv PYTHON=/path/to/python3.12" >&2; \
    return 1; \
}
endef
export PYTHON

PIP_NOISE := ^ *(Requirement already|Looking in|Installing build dep|Checking if build|Getting requirements to|Preparing |Created wheel|Stored in)

# pip draws progress bars on a terminal; elsewhere its lines are kept, less those that report nothing done.
$(STAMP): setup.py
	@$(FIND_PYTHON); \
	export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore; \
	start=$$SECONDS; \
	if ! suits $(PY); then \
	    python="$$(find_python)"; \
	    echo "Creating $(VENV) with $$("$$python" --version) ($$python)"; \
	    "$$python" -m venv --clear $(VENV); \
	    echo "Installing megatron-sc and what it needs: the first time this downloads about 5 GB (torch with CUDA)"; \
	else \
	    echo "Bringing $(VENV) up to date with setup.py"; \
	fi; \
	if [ -t 1 ]; then \
	    $(PY) -m pip install --editable '.[dev]'; \
	else \
	    $(PY) -m pip install --progress-bar off --editable '.[dev]' \
	        | { grep --line-buffered -vE '$(PIP_NOISE)' || true; }; \
	fi; \
	touch $@; \
	echo "Ready in $$((SECONDS - start)) s: source $(VENV)/bin/activate, or make demo, make test"
