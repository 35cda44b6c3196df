# `make demo`, `make serve` and `make test` each do all of their own set-up on a fresh Debian or Ubuntu machine with Python.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# the one that PyPI's torch of that version pins
TRITON := triton==3.7.1
# root installs what is missing; others are told
APT := $(shell [ "$$(id -u)" = 0 ] || echo sudo) apt-get install -y -qq
COMPILER = command -v c++ >/dev/null || { $(APT) g++ || { apt-get update -qq; $(APT) g++; }; }

.PHONY: demo serve test lint docs figures test-ascend test-ascend-large second-ascend mutate-ascend test-torchair test-vllm test-portability
.PHONY: portability test-corners test-extras dist fuzz mutate clean

demo: $(VENV)/.ready
	$(BIN)/python examples/deepseek_v32_decode.py

serve: $(VENV)/.ready
	$(BIN)/python examples/serve.py

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet -n auto --timeout 900 tests

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy sees the packages as they are installed, everything below `custom`, and no kernels
	@rm -rf $(VENV)/typed && $(BIN)/python -m tests.tools.typed_tree $(VENV)/typed
	MYPYPATH=$(VENV)/typed:$(lastword $(sort $(wildcard tests/vllm/stubs/vllm-*))):$(wildcard tests/vllm/stubs/vllm_ascend-*):$(wildcard tests/vllm/stubs/sglang-*) $(BIN)/mypy -p custom
	@# the examples, and the first lines of README
	sed -n '/^```python/,/^```$$/{/^```/d;p};/^## /q' README.md > $(VENV)/typed/readme.py
	cd examples && MYPYPATH=../$(VENV)/typed ../$(BIN)/mypy --config-file= --ignore-missing-imports --follow-imports silent *.py ../$(VENV)/typed/readme.py

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

# the plots of docs/figures/*.csv, and the pictures of docs/pictures.py
figures: $(VENV)/.ready
	$(BIN)/python -m docs.plots

# every NPU kernel and tile configuration, through the real Ascend compilers (its own environment)
test-ascend:
	tests/ascend/run.sh --check
	tests/ascend/run.sh --onboard compile --dry

# the bench's rows, all of them: about an hour
test-ascend-large:
	tests/ascend/run.sh --large

# a second model of time, MindStudio's, beside ours and what others measured (its own environment): half an hour
second-ascend:
	tests/ascend/second.sh published

# mistakes planted in every NPU kernel and launcher: hours; SAMPLE=200 for some of them, CHANGED=1 for
# those of functions that have changed
mutate-ascend:
	tests/ascend/run.sh --mutate $(if $(CHANGED),--changed) $(if $(SAMPLE),--sample $(SAMPLE))

# mistakes planted in the Python half: hours; SAMPLE=20 for some whose verdict is known, SEED for others
mutate: $(VENV)/.ready
	nice $(BIN)/python -m tests.mutate $(if $(SAMPLE),--sample $(SAMPLE)) --seed $(or $(SEED),0)

# npugraph_ex and the conversion to Ascend IR, through the real torchair (its own environment)
test-torchair:
	@# for the stand-ins of CANN's libraries
	$(COMPILER)
	tests/torchair/run.sh

# our plug-in in an unmodified vLLM, tokens against Hugging Face's (its own environment)
test-vllm:
	tests/vllm/run.sh

# every CUDA kernel compiled for GPUs that are not here (its own Tritons): whether what is kept is of
# today, and a sample; `make test` does so with its own Triton
test-portability: $(VENV)/.ready
	tests/portability/run.sh --check

# what is not known, kept in tests/portability/results.json and docs/portability.md
portability: $(VENV)/.ready
	tests/portability/run.sh

# the oldest and the newest Python and torch, where those Pythons are (their own environments)
test-corners:
	tests/tools/corners.sh

# every extra is found on PyPI alone, for x86-64 and for aarch64
test-extras: $(VENV)/.ready
	$(BIN)/python -m tests.tools.extras

# wheel and sdist, installed and tried where nothing else of this repository is; a bill of materials
dist: $(VENV)/.ready
	tests/tools/dist.sh

# random calls of every op: minutes; CASES=10000 for hours
fuzz: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz all --cases $(or $(CASES),500) --processes $$(nproc)

clean:
	rm -rf $(VENV) .ascend .msop .torchair .vllm .portability .corners .dist .mutate build dist sbom site *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.ready: setup.cfg pyproject.toml Makefile
	@# torch.compile and AOTInductor need a C++ compiler and Python's headers
	$(COMPILER)
	$(PYTHON) -c 'import ensurepip, venv' || { $(APT) python3-venv || { apt-get update -qq; $(APT) python3-venv; }; }
	$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || $(APT) python3-dev
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77,<82" wheel build $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ruff==0.17.5 mypy==2.4.1 pytest==9.2.0 uv==0.13.9 transformers==5.17.0 $(TRITON) --editable ".[test,hf,onnx,bench]"
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check mkdocs-material==9.8.2 "mkdocstrings[python]==1.0.8"
	touch $@
