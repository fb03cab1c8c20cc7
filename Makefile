# Two targets are all a fresh machine needs; each does its own set-up (Python >= 3.11 is assumed, nothing else):
#
#   make demo        the daemon, its restart, a pool segment and the dashboard, on this machine, in a minute
#   make test        everything: linters, all suites, the real engine; installs what it needs
#
# PYTHON=... chooses the interpreter. `make help` lists the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test check lint man slow soak bench clean

BIN := .venv/bin
SETUP := tests/support/setup.sh

.venv/.ready: pyproject.toml $(SETUP)
	@$(SETUP) base

.venv-vllm/.ready: pyproject.toml $(SETUP) tests/vllm-requirements.txt
	@$(SETUP) engine

.build/demo-model/config.json: .venv-vllm/.ready tests/support/tiny_model.py
	@HF_HUB_DISABLE_PROGRESS_BARS=1 .venv-vllm/bin/python tests/support/tiny_model.py .build/demo-model --size small >/dev/null

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: .venv/.ready ## put, get, restart, and the bytes are back; then a pool segment and kvtop
	@$(BIN)/kvtools demo

demo-vllm: .venv-vllm/.ready .build/demo-model/config.json ## the same story with a real vLLM
	@.venv-vllm/bin/kvtools demo --engine .build/demo-model

test: ## everything, as continuous integration runs it
	@$(MAKE) --no-print-directory -j2 .venv/.ready .venv-vllm/.ready
	@$(BIN)/python -m tests.support.suites all

check: .venv/.ready ## linters and the suites that need no engine: the quick round
	@$(BIN)/python -m tests.support.suites check

lint: .venv/.ready ## ruff, mypy, import-linter, mandoc
	@$(BIN)/python -m tests.support.suites lint

man: .venv/.ready ## lint the man pages and compare them with the commands
	@$(BIN)/python -m pytest -q tests/repo/test_man_pages.py

slow: .venv/.ready .venv-vllm/.ready ## what is marked slow: minutes
	@$(BIN)/python -m tests.support.suites slow

soak: .venv/.ready ## kill clients and daemon, fill and corrupt its disk, for SOAK_S seconds (default 600): nothing wrong, nothing leaked
	@KVTEST_SOAK_S=$${SOAK_S:-600} $(BIN)/python -m pytest -q -s -m soak --timeout=0 tests/kvd

bench: .venv/.ready ## the numbers of the README, measured here
	@$(BIN)/python -m tests.bench

clean: ## remove the environments and every cache
	rm -rf .venv .venv-vllm .build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
