# Everything a fresh machine needs is made on the way: `make demo` and `make test` set themselves up.
#   TORCH_SPEC  which torch, e.g. TORCH_SPEC=torch==2.13.0+cpu
#   PIP_ARGS    passed to pip, e.g. PIP_ARGS="--extra-index-url ..." for a CPU build of torch

PYTHON     ?= python3
TORCH_SPEC ?= torch==2.13.0
PIP_ARGS   ?=

BIN   := .venv/bin
STAMP := .venv/.installed

export PATH := $(CURDIR)/$(BIN):$(PATH)
export DS_ACCELERATOR ?= cpu
export RAY_AUTH_MODE ?= disabled
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-fast evidence lint install preflight

demo: $(STAMP)
	$(BIN)/python -m jobs.demo --config configs/smollm2-135m.yaml

test: lint
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/ray
	$(BIN)/python -m pytest tests/e2e

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m "not slow"

evidence: $(STAMP)
	$(BIN)/python -m tests.evidence

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory preflight
	$(PYTHON) -m venv .venv
	@grep -v '^torch==' constraints.txt > .venv/constraints.txt  # TORCH_SPEC decides about torch
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) "$(TORCH_SPEC)"
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c .venv/constraints.txt -e ".[dev]"
	$(BIN)/python -c "from pipelines.training.environment import build_cpu_kernel; build_cpu_kernel()"
	@touch $@

preflight:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is too old: Python 3.11 or newer is needed (make PYTHON=python3.11 ...)" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make a virtual environment: install python3-venv" >&2; exit 2; }
	@command -v g++ >/dev/null || { echo "g++ is missing: install a C++ compiler (build-essential)" >&2; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo "Python.h is missing: install the headers of $(PYTHON) (python3-dev)" >&2; exit 2; }
	@$(PYTHON) -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < 4e9)' \
		|| { echo "less than 4 GB of disk is free in $(CURDIR)" >&2; exit 2; }
