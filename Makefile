# Every target that needs .venv makes it. CI's commands are in .ci/run.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
FOLDERS := server cache models loadtests tests benchmarks

DEMO := demo
DEMO_ROWS ?= 5000000
SWEEP ?=
GPU_CHECK ?=

.PHONY: help install demo serve test check bench sweep gpu-check clean

help:  ## List the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# The stamp files say which extras are in .venv; an edit of the pins installs again.
$(VENV)/demo.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[cpu,load]'
	touch $@

# torch first, pinned: asked for by a range, it may bring a CUDA build of several gigabytes.
$(VENV)/install.stamp: $(VENV)/demo.stamp
	$(PIP) torch
	$(PIP) --editable '.[cpu,torch,load,dev]'
	touch $@

install: $(VENV)/install.stamp  ## Put everything for work on Hotshelf into .venv.

$(DEMO)/models: | $(VENV)/demo.stamp
	$(BIN)/hotshelf demo init $(DEMO) --rows $(DEMO_ROWS)

demo: sweep  ## Make a ranking model, load-test it, draw p99 against cache size.

# SWEEP has options of `hotshelf sweep`, for example SWEEP="--points 5,20 --duration 5".
sweep: $(VENV)/demo.stamp $(DEMO)/models
	$(BIN)/hotshelf sweep --repository $(DEMO) $(SWEEP)

serve: $(VENV)/demo.stamp $(DEMO)/models  ## Serve the demo on http://127.0.0.1:8000.
	$(BIN)/hotshelf serve --repository $(DEMO)

test: install  ## Run the tests.
	$(BIN)/pytest

check: install  ## Lint, format and types.
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	$(BIN)/mypy

bench: install  ## Measure lookups against NumPy and torch in one run.
	$(BIN)/python -m benchmarks.lookup

# Nothing is installed: PYTHON where it is given, else the first that is there and has CuPy.
GPU_PYTHONS := $(if $(filter file,$(origin PYTHON)),$(BIN)/python python3) $(PYTHON)
HAS_CUPY := import importlib.util, sys; sys.exit(importlib.util.find_spec("cupy") is None)

# GPU_CHECK has options of it, for example GPU_CHECK="--only hits misses".
gpu-check:  ## Check a GPU: right results, then speed against its own ceilings.
	@for python in $(GPU_PYTHONS); do \
	  $$python -c '$(HAS_CUPY)' 2>/dev/null && break; \
	done; exec $$python -m benchmarks.gpu_check $(GPU_CHECK)

clean:  ## Remove what the targets made.
	rm -rf $(VENV) $(DEMO) out build *.egg-info
