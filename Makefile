# Everything a fresh machine needs: python3 with venv, a C++ compiler and make.
.PHONY: help demo test test-all test-deep test-ascend test-vllm check docs sanitize wheels clean

VENV := .venv
# Tests start hundreds of processes. Where Python may not keep compiled modules, each would compile those of torch again.
export PYTHONDONTWRITEBYTECODE :=
KERNELS := CMakeLists.txt $(wildcard fastattention/backends/common/*.hpp) \
	$(shell find fastattention/backends/cpu/kernels -type f)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.installed  ## continue a real source file with three kinds of attention, and compare them
	$(VENV)/bin/fastattention demo

PYTEST := scripts/test -n auto --maxprocesses 8 --dist worksteal

test: $(VENV)/.installed  ## the quick tests
	$(PYTEST) --tier quick

test-all: $(VENV)/.installed  ## what every change must pass: also of Ascend kernels, sanitizers and 64-bit Arm
	$(PYTEST) --tier all
	scripts/sanitize --build & scripts/test_ascend --install && wait $$!  # each takes a core
	TIER=quick scripts/test_ascend
	scripts/sanitize --tier quick
	scripts/check_aarch64 --slice

test-deep: $(VENV)/.installed  ## everything there is, new random cases, 64-bit Arm; for releases and after changes of kernels
	scripts/test_deep

test-ascend: $(VENV)/.installed  ## kernels for Ascend NPUs and the vendor's operators, without an NPU
	scripts/test_ascend

test-vllm:  ## the plugin inside vLLM for CPUs, in an environment of its own (3.5 GB); skipped where that cannot be had
	plugins/vllm/test.sh

check: $(VENV)/.installed  ## formatting, lint, types and prose
	scripts/check

docs: .venv-docs/.installed  ## the documentation site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

sanitize: $(VENV)/.installed  ## the native library under address, undefined-behaviour and thread sanitizers
	scripts/sanitize

wheels: $(VENV)/.installed  ## dist: the sdist, and wheels for x86-64 and 64-bit Arm that need no compiler; checked
	scripts/build_wheels

$(VENV)/.installed: pyproject.toml scripts/install $(KERNELS)
	scripts/install
	@touch $@

.venv-docs/.installed: pyproject.toml scripts/install_docs
	scripts/install_docs
	@touch $@

clean:
	rm -rf plugins/vllm/.venv $(VENV) .venv-ascend .venv-docs .venv-wheels build dist fastattention/gpu_runtime/cubins
