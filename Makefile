# Everything a checkout needs: `make demo` and `make test` set up what is missing, then run.
# Set-up is remembered in stamp files inside the virtual environment, so a second call starts at once
# and an edit below csrc/ rebuilds the extension before anything runs.

PYTHON ?= python3
VENV ?= .venv
# Which kernels to build: auto (CUDA kernels if nvcc is found), 0 or 1.
SPECDEC_CUDA ?= auto
# Test processes, one torch thread each; more processes than cores only fight.
WORKERS ?= 2
# The transformers of `make test-transformers`; 5.4.0 is the oldest that is supported.
VERSION ?= 5.17.0
# Extra arguments, e.g. `make test ARGS="-k tree"` or `make demo ARGS="--drafter draft"`.
ARGS ?=

BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find csrc -type f | LC_ALL=C sort)
BUILD_SOURCES := setup.py pyproject.toml $(wildcard build_support/*.py)
FORMATTED := $(filter %.h %.cuh %.cpp %.cu,$(NATIVE_SOURCES)) $(wildcard profiling/*.cu python_tests/helpers/*.c)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest python_tests
PARALLEL := -n $(WORKERS) --dist worksteal
# The CUDA kernels, compiled for the host, run under AddressSanitizer and UBSan. Their runtime has to be in
# the process first, and needs libstdc++ to see exceptions; Python never frees all it has.
SANITIZERS = ASAN_OPTIONS=detect_leaks=0 \
  LD_PRELOAD="$$(c++ -print-file-name=libasan.so):$$(c++ -print-file-name=libstdc++.so.6)"

SITE_PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'
REQUIREMENTS := $(VENV)/.requirements.stamp
# One stamp per kernel choice: changing the choice rebuilds.
BUILD := $(VENV)/.build-cuda-$(SPECDEC_CUDA).stamp
OTHER := .venv-transformers-$(VERSION)

export SPECDEC_CUDA
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-transformers test-architectures lint format docs wheel bench bench-goals bench-ops kernel-report toolchains gpu-check head other-heads clean

help: ## list the targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BUILD) ## set up, then stream a marked completion and compare with Hugging Face generate
	$(BIN)/specdec demo $(ARGS)

test: $(BUILD) ## set up, then run the test suite
	$(PYTEST) -m "not slow and not sweep and not emulated" $(PARALLEL) $(ARGS)
	$(SANITIZERS) $(PYTEST) -m "emulated and not slow" $(PARALLEL) $(ARGS) $(if $(ARGS),|| test $$? = 5)

test-slow: $(BUILD) ## set up, then run the tests marked slow, which `make test` leaves out
	$(PYTEST) -m "slow and not emulated" $(PARALLEL) $(ARGS)
	$(SANITIZERS) $(PYTEST) -m "slow and emulated" $(PARALLEL) $(ARGS) || test $$? = 5

# Ops and packaging don't meet transformers.
test-transformers: $(BUILD) $(OTHER)/.stamp ## set up, then run the tests on another transformers: VERSION=5.17.0
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest python_tests -m "not slow and not sweep and not emulated" \
	  $(PARALLEL) --ignore=python_tests/ops --ignore=python_tests/project $(ARGS)

# On another transformers: make test-transformers ARGS="-m sweep --verdicts profiling/results".
test-architectures: $(BUILD) ## judge every architecture of the installed transformers, and write the tables
	$(PYTEST)/models/test_architectures.py -m sweep $(PARALLEL) --verdicts profiling/results $(ARGS)

lint: $(REQUIREMENTS) ## check style and types of Python and C++ code, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy specdec_ext
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: $(REQUIREMENTS) ## rewrite Python and C++ code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(REQUIREMENTS) ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

wheel: $(REQUIREMENTS) ## build a wheel into dist/, for every Python and with nvcc for every GPU
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-all}" $(BIN)/python -m pip wheel --verbose --no-build-isolation \
	  --no-deps --wheel-dir dist .

bench: $(BUILD) ## tokens per second of every way to generate, in float32 and bfloat16
	$(BIN)/python profiling/bench_generate.py --dtype float32 $(ARGS)
	$(BIN)/python profiling/bench_generate.py --dtype bfloat16 $(ARGS)

bench-goals: $(BUILD) ## every goal of speed and memory on this CPU, float32 and bfloat16: met or missed; an idle machine
	$(BIN)/python profiling/bench_goals.py $(ARGS)

bench-ops: $(BUILD) ## microseconds and bandwidth of every op, against PyTorch's own
	$(BIN)/python profiling/bench_ops.py $(ARGS)

kernel-report: $(REQUIREMENTS) ## registers, spills and occupancy of every kernel on every architecture; needs nvcc
	$(BIN)/python profiling/kernel_report.py $(ARGS)

# A gigabyte of compilers from the package index, kept in build/toolchains.
toolchains: $(REQUIREMENTS) ## compile every kernel with CUDA 12.4 to 13.5 for every architecture, and check the code
	$(BIN)/python profiling/toolchains $(ARGS)

# Runs with the python3 of the machine: one with a GPU may have no index to install from.
gpu-check: ## build, tests, sanitizer and benchmarks on this machine's GPU; ARGS=--dry-run for the plan
	$(PYTHON) profiling/gpu_check.py $(ARGS)

# The state of a run stays in build/bundled: what was stopped goes on.
head: $(BUILD) ## train the bundled draft head from scratch: texts, then under an hour on two cores; can be stopped
	$(BIN)/python tools/bundled/bundled_models.py texts
	$(BIN)/python tools/bundled/bundled_models.py completions
	$(BIN)/python tools/bundled/bundled_models.py completions held_out --files 300
	$(BIN)/specdec train bundled --data build/bundled/head/text_completions.jsonl \
	  --held-out build/bundled/head/held_out_completions.jsonl --out build/bundled/head/tiny-python-head \
	  --layers 1,3,6 --draft-vocab 3072 --learn-everything --updates 1700 --batch-size 4 \
	  --learning-rate 1e-2 --decay 0.8 --evaluate-every 425
	$(BIN)/python tools/bundled/bundled_head.py export

other-heads: $(BUILD) ## train Medusa heads and a P-EAGLE head for the bundled target, on the data of `make head`
	$(BIN)/specdec train bundled --data build/bundled/head/text_completions.jsonl --kind medusa \
	  --out build/bundled/head/tiny-python-medusa --steps 4 --draft-vocab 3072 --learn-everything --batch-size 4
	$(BIN)/specdec train bundled --data build/bundled/head/text_completions.jsonl --kind p-eagle \
	  --out build/bundled/head/tiny-python-p-eagle --steps 5 --decoder-layers 2 --layers 1,3,6 \
	  --draft-vocab 3072 --learn-everything --batch-size 4

# build/bundled holds the corpus and the training state of the bundled models: hours of work, kept.
clean: ## remove what was built (not the virtual environment, not trained models)
	rm -rf dist *.egg-info $(VENV)/.build-cuda-*.stamp
	find specdec_ext -name '*.so' -delete
	if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name bundled -exec rm -rf {} +; fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(REQUIREMENTS): requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# A layer over the virtual environment: what it has itself comes first, everything else (torch) is found below.
.venv-transformers-%/.stamp: $(REQUIREMENTS)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE_PACKAGES))')" > \
	  "$$($(@D)/bin/python -c $(SITE_PACKAGES))/below.pth"
	$(@D)/bin/python -m pip install --quiet transformers==$*
	@touch $@

# pip shows nothing of a build that works: the compilers run before it, in sight.
$(BUILD): $(REQUIREMENTS) $(BUILD_SOURCES) $(NATIVE_SOURCES)
	@rm -f $(VENV)/.build-cuda-*.stamp
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	@touch $@
