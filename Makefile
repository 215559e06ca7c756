# The commands a user and a developer need.  `make help` lists them.
#
#   PYTHON=python3.12   the interpreter to build the virtual environment from
#   SYSTEM=1            use PYTHON's own packages: no virtual environment, no
#                       network, no build isolation
#   PYTEST_ARGS=...     more arguments for pytest
#   JOBS=4              processes of gpu-test
#   BENCH_ARGS=...      more arguments for `python -m benchmarks`

PYTHON ?= python3
SYSTEM ?=
PYTEST_ARGS ?=
JOBS ?= 4
BENCH_ARGS ?=
VENV := .venv

ifeq ($(SYSTEM),)
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check
else
PY := $(PYTHON)
CLANG_FORMAT := clang-format
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation
endif

SOURCES := $(wildcard cpu/* cuda/* ffi/*) CMakeLists.txt pyproject.toml
INSTALLED := build/installed-$(subst /,_,$(PY))

.PHONY: help demo test gpu-test receipt-check bench figures lint format test-all wheel install clean

help:
	@sed -n 's/^#: //p' Makefile
	@echo
	@sed -n 's/^#   //p' Makefile

#: make demo           install, run the indexer on real text, check every row, draw one picture
demo: $(INSTALLED)
	$(PY) examples/demo.py

# Most of the suite's time is XLA's, which compiles some thousand programs that run once.
TEST_XLA_FLAGS := --xla_backend_optimization_level=0

#: make test           the CPU suite and the checks of the CUDA compilation
test: $(INSTALLED)
	@$(PY) tests/receipt.py check || true
	$(PY) -c "import jax_fused_topk as j; print('CUDA COMPILED' if j.build_info()['cuda'] else 'NO CUDA: nvcc was not found, the GPU kernels were not compiled')"
	XLA_FLAGS="$(TEST_XLA_FLAGS) $$XLA_FLAGS" $(PY) -m pytest -m "not gpu" $(PYTEST_ARGS)

#: make gpu-test       the tests that need a GPU; writes tests/gpu_receipt.json
gpu-test: $(INSTALLED)
	$(PY) tests/gpu_jobs.py $(JOBS) $(PYTEST_ARGS)

#: make receipt-check  whether the kernels at hand are those that passed on a GPU
receipt-check:
	@$(PYTHON) tests/receipt.py check

#: make bench          times the suites on a GPU (10 minutes), then `make figures`
bench: $(INSTALLED)
	$(PY) -m benchmarks --suite prefill,small-q,lengths,topk,adversarial $(BENCH_ARGS) --out benchmarks/results/h200
	$(PY) -m benchmarks counts --out benchmarks/results/h200/counts.jsonl
	$(PY) examples/dsa_attention.py --benchmark --out benchmarks/results/h200/model.jsonl
	$(PY) -m benchmarks --suite scopes --shapes 4096x131072 --out benchmarks/results/h200
	if command -v ncu; then \
	  $(PY) -m benchmarks counters --out benchmarks/results/h200/counters.jsonl; \
	else echo "NO ncu ON THE PATH: hardware counters not measured"; fi
	$(MAKE) figures

#: make figures        tables and pictures of docs/ and README.md from benchmarks/results
figures: $(INSTALLED)
	$(PY) -m benchmarks tables
	$(PY) -m benchmarks figures

#: make lint           ruff, clang-format, mypy
lint: $(INSTALLED)
	$(PIP_INSTALL) -e ".[lint]"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(wildcard cpu/*.cc cpu/*.h cpu/*.inc cuda/*.cu cuda/*.cuh cuda/*.h ffi/*.cc ffi/*.h benchmarks/*.cu)
	$(PY) -m mypy

#: make format         what lint would ask for
format:
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(wildcard cpu/*.cc cpu/*.h cpu/*.inc cuda/*.cu cuda/*.cuh cuda/*.h ffi/*.cc ffi/*.h benchmarks/*.cu)

#: make test-all       the CPU suite on every supported Python found, with the oldest and newest jax
test-all:
	tests/test_all.sh

#: make wheel          one wheel in dist/
wheel:
	$(PYTHON) -m pip wheel --no-deps $(if $(SYSTEM),--no-index --no-build-isolation) -w dist .

#: make install        into the virtual environment .venv
install: $(INSTALLED)

# Editable, so that Python started in this folder finds the compiled modules too.
$(INSTALLED): $(SOURCES)
ifeq ($(SYSTEM),)
	@echo "building jax_fused_topk, about 2 minutes"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e ".[test]"
else
	@echo "building jax_fused_topk, about a minute"
	$(PIP_INSTALL) -e .
endif
	@mkdir -p $(@D) && touch $@

#: make clean          removes what was built and the virtual environments
clean:
	rm -rf $(VENV) .venvs build dist demo_output
