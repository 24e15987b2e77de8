# make demo      set up .venv with what a run needs and train the tiny arithmetic recipe
# make test      the tests of a change, five minutes      make test-all  every test without a GPU, recorded
# make lint      style, bans, types                       make gpu-test  the tests marked gpu
# make oldest    the oldest versions setup.cfg allows     make bench     benchmarks, on a green tree
#
# Variables: PYTHON       the interpreter .venv is made from (3.11 or newer)
#            TORCH_INDEX  the index torch comes from; for the small CPU build on an ordinary machine
#                         TORCH_INDEX=https://download.pytorch.org/whl/cpu
#            TEST_WORKERS test processes, one thread each
#            GPU_PYTHON   the interpreter of the GPU machine, with its own torch
#            GPU_WORKERS  test processes that share the GPU; most of their time is compilation
#            BENCH_FOLDER where `make bench` writes its JSON

PYTHON ?= python3
TORCH_INDEX ?=
TEST_WORKERS ?= 2
GPU_PYTHON ?= python3
GPU_WORKERS ?= 12
BENCH_FOLDER ?= runs/bench
RECIPE ?= recipes/grpo_arithmetic_tiny_cpu.yaml

BIN := .venv/bin
# What is never imported need not be compiled, and no process should compile again what another has.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet
unexport PYTHONDONTWRITEBYTECODE
CONSTRAINTS := constraints-cpu.txt
PACKAGING := setup.cfg pyproject.toml $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint oldest gpu-test bench

help:
	@sed -n '1,4p' Makefile

demo: .venv/.ready
	$(BIN)/rl-consistency train $(RECIPE) --overwrite

test: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal \
	  -m "not gpu and not thorough" --ignore tests/gpu

# Before a release, and whenever what is marked thorough or its code changes.
test-all: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/test_all.py $(TEST_WORKERS)

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/banned_patterns.py
	$(BIN)/pyright --pythonpath $(BIN)/python

oldest: .venv/.ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/oldest_versions.py

gpu-test:
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m gpu -n $(GPU_WORKERS) --dist load --maxschedchunk 1 \
	  --ignore tests/gpu/vllm
	OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest -m gpu -n 5 --dist loadfile tests/gpu/vllm

# DEVICE=cuda measures the GPU of this machine with its own torch; without it, accuracy on this CPU.
# Each writes a JSON file of its own.
ifeq ($(DEVICE),cuda)
bench: gpu-test
	for what in ops train rollout; do \
	  $(GPU_PYTHON) -m benchmarks $$what --json $(BENCH_FOLDER)/$$what.json || exit 1; done
else
bench: .venv/.ready-dev test
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks accuracy --json $(BENCH_FOLDER)/accuracy.json
endif

# torch first and alone: the index it may come from need not hold its dependencies, which the next
# line takes from the usual one, without replacing the build that is already there.
.venv/.ready: $(PACKAGING)
	@$(PYTHON) -c 'import sys; sys.exit("rl-consistency needs Python 3.11 or newer, got %d.%d: make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up .venv (once, about a minute) ..."
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c $(CONSTRAINTS) torch
	$(PIP) -c $(CONSTRAINTS) -e .
	@touch $@

.venv/.ready-dev: .venv/.ready
	@echo "Adding the development tools to .venv ..."
	$(PIP) -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@
