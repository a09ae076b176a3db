# The whole interface of a checkout; each target sets up what it needs first.
#
#   make setup      virtual environment, CPU kernels, demo model
#   make serve      the demo on http://127.0.0.1:8000 (PORT=9000 for another port)
#   make test       every test
#   make check      lint, types, layering, tests (SKIP_TESTS=1 when they have just run)
#   make fmt        rewrite the sources in the project's format
#   make bench      serving benchmark against a running `make serve`
#   make bench-quick  fails when a ratio of the engine benchmark got much worse
#   make gpu-check  kernels and engine on a GPU

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := setup
.PHONY: setup venv kernels model serve test check fmt bench bench-quick gpu-check

VENV := .venv
BIN := $(VENV)/bin
CACHE := $(or $(LORAFLEET_HOME),.cache)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Everything that runs after the set-up works without a network, and says nothing to anyone.
export HF_HUB_OFFLINE := 1
export RAY_USAGE_STATS_ENABLED := 0

setup: venv kernels model

venv: $(VENV)/.installed
kernels: $(CACHE)/.kernels

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "==> installing into $(VENV): 3 GB on disk, some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --progress-bar off -c constraints.txt -e '.[dev]' \
	    | sed -un -e '/Downloading/p' -e 's/^Installing collected .*/==> unpacking/p'
	@touch $@

# Without a compiler this reports so and the kernels run on torch alone.
$(CACHE)/.kernels: $(VENV)/.installed $(wildcard kernels/build.py kernels/csrc/*)
	@echo "==> building the CPU kernels"
	@mkdir -p $(CACHE)
	@$(BIN)/python -m kernels.build
	@touch $@

model: $(VENV)/.installed
	@$(BIN)/python -m scripts.prepare_demo

serve: setup
	@echo "==> serving on http://127.0.0.1:$(PORT), ready when /health answers 200"
	@exec $(BIN)/lorafleet serve serve_config.yaml --port $(PORT)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(SKIP_TESTS),,$(BIN)/python -m pytest)

fmt: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks.serving --url http://127.0.0.1:$(PORT) \
	    --model smollm2-135m-instruct --model sql --model pirate --model sentiment \
	    --concurrency 8 --prompt-tokens 75 --output-tokens 64 --json $(CACHE)/bench_serving.json

bench-quick: setup
	$(BIN)/python -m benchmarks.guard

gpu-check: venv
	@mkdir -p $(CACHE)
	$(BIN)/python -m benchmarks.gpu_check \
	    --json $(CACHE)/gpu_check.json --markdown $(CACHE)/gpu_check.md
