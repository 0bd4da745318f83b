# Every target first brings .venv up to date (scripts/setup.sh), which takes well under a second when it is.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python

# Extra arguments: make demo DEMO_ARGS="--help", make test PYTEST_ARGS="-k wire -x"
DEMO_ARGS ?=
PYTEST_ARGS ?=
LOCK_ARGS ?=

# The CPU server reserves this many GiB for its KV cache; the models used here need far less.
export VLLM_CPU_KVCACHE_SPACE ?= 1
# Models come from this repository; nothing is looked up on a hub.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help setup demo test lint format docs lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Create or refresh .venv (2 to 5 minutes and 4 GB the first time)
	@scripts/setup.sh

demo: setup ## Run the end-to-end demo on the CPU (DEMO_ARGS="...")
	@$(PYTHON_BIN) examples/demo.py $(DEMO_ARGS)

test: lint ## Lint, types, ring check, then the tests (PYTEST_ARGS="...")
	$(PYTHON_BIN) -m pytest $(PYTEST_ARGS)

lint: setup ## Ruff, mypy, the three-ring import check, generated docs
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) -m mypy
	$(PYTHON_BIN) -m scripts.check_rings
	$(PYTHON_BIN) scripts/make_docs.py --check

format: setup ## Sort imports, apply safe fixes, format
	$(PYTHON_BIN) -m ruff check --fix .
	$(PYTHON_BIN) -m ruff format .

docs: setup ## Write docs/reference.md from the code
	$(PYTHON_BIN) scripts/make_docs.py

lock: setup ## Resolve requirements/cpu.in into cpu.lock (LOCK_ARGS="--upgrade")
	$(PYTHON_BIN) scripts/lock.py $(LOCK_ARGS)

clean: ## Remove caches and build leftovers; .venv stays
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -path ./.git -prune -o -type d -name __pycache__ -print0 | xargs -0 rm -rf
