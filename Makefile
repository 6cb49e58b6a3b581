# Development commands. Each target first sets up what is missing: virtual environment, packages, extension.
# Stamp files in the virtual environment record what was set up, so a second call starts at once, and an edit
# in csrc/ rebuilds the extension first.

PYTHON ?= python3
VENV ?= .venv
# Which kernels to build: auto (CUDA kernels if nvcc is found), 0 or 1.
SPECDEC_CUDA ?= auto
# Number of test processes, with one torch thread each; more processes than cores would be slower.
WORKERS ?= 2
# Version of transformers for `make test-transformers`; 5.4.0 is the oldest supported one.
VERSION ?= 5.17.0
# Extra arguments, e.g. `make test ARGS="-k tree"` or `make demo ARGS="--drafter draft"`.
ARGS ?=

BIN := $(VENV)/bin
NATIVE_SOURCES := $(shell find csrc -type f | LC_ALL=C sort)
BUILD_SOURCES := setup.py pyproject.toml $(wildcard build_support/*.py)
FORMATTED := $(filter %.h %.cuh %.cpp %.cu,$(NATIVE_SOURCES)) $(wildcard profiling/gpu/*.cu python_tests/helpers/*.c)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest python_tests
# The rooms of the tests on emulated kernels (python_tests/conftest.py); sanitizers slow the search in others.
EMULATED := $(PYTEST)/ops python_tests/ptx
PARALLEL := -n $(WORKERS) --dist worksteal
# The CUDA kernels, compiled for the host, run under AddressSanitizer and UBSan. The sanitizers' runtime must be
# loaded first and needs libstdc++ to intercept exceptions. Leaks are ignored: Python never frees all memory. New
# memory is filled with ones, which are NaN, so a workspace's contents before a launch must have no effect.
SANITIZERS = ASAN_OPTIONS=detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=67108864 \
  LD_PRELOAD="$$(c++ -print-file-name=libasan.so):$$(c++ -print-file-name=libstdc++.so.6)"

SITE_PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'
REQUIREMENTS := $(VENV)/.requirements.stamp
# One stamp per kernel choice: changing the choice rebuilds.
BUILD := $(VENV)/.build-cuda-$(SPECDEC_CUDA).stamp
OTHER := .venv-transformers-$(VERSION)
QUANTISED := .venv-quantised
RAY := .venv-ray

export SPECDEC_CUDA
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-transformers test-quantised test-cluster test-architectures lint format docs wheel bench bench-goals bench-ops kernel-report toolchains gpu-check head other-heads clean

help: ## list all targets (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BUILD) ## show a completion with marked drafts and compare the speed with Hugging Face generate
	$(BIN)/specdec demo $(ARGS)

test: $(BUILD) ## run the test suite, as CI does
	$(PYTEST) -m "not slow and not sweep and not emulated" $(PARALLEL) $(ARGS)
	$(SANITIZERS) $(EMULATED) -m "emulated and not slow" $(PARALLEL) $(ARGS) $(if $(ARGS),|| test $$? = 5)

test-slow: $(BUILD) ## run the slow tests, which `make test` leaves out
	$(PYTEST) -m "slow and not emulated" $(PARALLEL) $(ARGS)
	$(SANITIZERS) $(EMULATED) -m "slow and emulated" $(PARALLEL) $(ARGS) || test $$? = 5

# Without the tests of ops and packaging, which do not depend on transformers.
test-transformers: $(BUILD) $(OTHER)/.stamp ## run the tests with another version of transformers: VERSION=5.17.0
	OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest python_tests -m "not slow and not sweep and not emulated" \
	  $(PARALLEL) --ignore=python_tests/ops --ignore=python_tests/project $(ARGS)

# torchao has an environment of its own, because transformers imports it, slowly, whenever it loads a model.
test-quantised: $(BUILD) $(QUANTISED)/.stamp ## test weights of 8 and 4 bits with torchao and other libraries that make them
	OMP_NUM_THREADS=1 $(QUANTISED)/bin/python -m pytest python_tests/models/quantised -m "not emulated" $(PARALLEL) $(ARGS)

# Ray has an environment of its own, because uvicorn serves with other loops and parsers where Ray's are installed.
test-cluster: $(BUILD) $(RAY)/.stamp ## test Ray Data, Ray Serve and tensor parallelism with two processes
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest python_tests/cluster -m "not emulated" $(ARGS)

# With another version of transformers:
#   make test-transformers ARGS="-m sweep --verdicts profiling/results/architectures"
test-architectures: $(BUILD) ## test every architecture of the installed transformers and write the result tables
	$(PYTEST)/models/test_architectures.py -m sweep $(PARALLEL) --verdicts profiling/results/architectures $(ARGS)

lint: $(REQUIREMENTS) ## check style and types of the Python and C++ code, without changes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy specdec_ext
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: $(REQUIREMENTS) ## rewrite Python and C++ code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(REQUIREMENTS) ## build the documentation in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

wheel: $(REQUIREMENTS) ## build a wheel in dist/ for all Python versions and, if nvcc is found, all GPUs
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-all}" $(BIN)/python -m pip wheel --verbose --no-build-isolation \
	  --no-deps --wheel-dir dist .

bench: $(BUILD) ## measure tokens per second of every drafter and Hugging Face, in float32 and bfloat16
	$(BIN)/python profiling generate --dtype float32 $(ARGS)
	$(BIN)/python profiling generate --dtype bfloat16 $(ARGS)

bench-goals: $(BUILD) ## measure all goals of speed and memory on this CPU; needs an idle machine
	$(BIN)/python profiling goals $(ARGS)

bench-ops: $(BUILD) ## measure time and bandwidth of every op against PyTorch
	$(BIN)/python profiling ops $(ARGS)

kernel-report: $(REQUIREMENTS) ## report registers, spills and occupancy of every kernel; needs nvcc
	$(BIN)/python profiling kernel-report $(ARGS)

# Installs a gigabyte of compilers from the package index in build/toolchains.
toolchains: $(REQUIREMENTS) ## compile every kernel with CUDA 12.4 to 13.5 for every architecture and check the code
	$(BIN)/python profiling toolchains $(ARGS)

# Uses the machine's own python3, because a machine with a GPU may have no access to a package index.
gpu-check: ## run build, tests, sanitizer and benchmarks on this machine's GPU; ARGS=--dry-run prints the plan
	$(PYTHON) profiling gpu-check $(ARGS)

# The training state is kept in build/bundled, so the next call resumes a run that was stopped.
head: $(BUILD) ## train the bundled draft head from scratch; hours on two cores; resumes
	$(BIN)/python tools/bundled/bundled_models.py texts
	$(BIN)/python tools/bundled/bundled_models.py completions
	$(BIN)/python tools/bundled/bundled_models.py completions held_out --files 100
	$(BIN)/specdec train --recipe tools/bundled/head.yaml
	$(BIN)/python tools/bundled/bundled_head.py export

other-heads: $(BUILD) ## train Medusa heads and a P-EAGLE head for the bundled target on the data of `make head`
	$(BIN)/specdec train bundled --data build/bundled/head/text_completions.jsonl --kind medusa \
	  --out build/bundled/head/tiny-python-medusa --steps 4 --draft-vocab 3072 --learn-everything --batch-size 4
	$(BIN)/specdec train bundled --data build/bundled/head/text_completions.jsonl --kind p-eagle \
	  --out build/bundled/head/tiny-python-p-eagle --steps 5 --decoder-layers 2 --layers 1,3,6 \
	  --draft-vocab 3072 --learn-everything --batch-size 4

# Keeps build/bundled, because the corpus and the training state of the bundled models took hours to make.
clean: ## remove build outputs, but not the virtual environment and trained models
	rm -rf dist *.egg-info $(VENV)/.build-cuda-*.stamp
	find specdec_ext -name '*.so' -delete
	if [ -d build ]; then find build -mindepth 1 -maxdepth 1 ! -name bundled -exec rm -rf {} +; fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 is needed: make PYTHON=..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)

$(REQUIREMENTS): requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

# A layer over the virtual environment: its own packages come first, all others (torch) are found in .venv.
define layer
	$(BIN)/python -m venv --clear --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE_PACKAGES))')" > \
	  "$$($(@D)/bin/python -c $(SITE_PACKAGES))/below.pth"
endef

.venv-transformers-%/.stamp: $(REQUIREMENTS)
	$(layer)
	$(@D)/bin/python -m pip install --quiet transformers==$*
	@touch $@

# Without their requirements, which .venv has in versions of its own.
$(QUANTISED)/.stamp: $(REQUIREMENTS)
	$(layer)
	$(@D)/bin/python -m pip install --quiet --no-deps torchao==0.18.0 bitsandbytes==0.50.2
	@touch $@

$(RAY)/.stamp: $(REQUIREMENTS)
	$(layer)
	$(@D)/bin/python -m pip install --quiet 'ray[data,serve]==2.60.0'
	@touch $@

# The extension is built before pip runs, because pip would hide the output of the compilers.
$(BUILD): $(REQUIREMENTS) $(BUILD_SOURCES) $(NATIVE_SOURCES)
	@rm -f $(VENV)/.build-cuda-*.stamp
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	@touch $@
