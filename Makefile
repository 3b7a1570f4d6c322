# Two commands do everything on a fresh machine with Python 3.11 to 3.13:
#   make train     install, run the main job (configs/vapo.py), draw its curves
#   make test      install, run the test suite
#   make slowtest  install, run the slow tests (alltest: both, as in CI)
#   make docs      install, build the documentation site into build/docs
#   make accelerator EXTRA=gpu    install, measure a GPU (or tpu) in ten minutes
# Variables: PYTHON (interpreter for a new venv), VENV (its folder), CONFIG,
# WORKDIR and ARGS (of the program, e.g. ARGS="--config.run.seed=1"), TESTS (e.g.
# TESTS=tests/metrics_test.py), PYTEST_ARGS.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/vapo.py
WORKDIR ?= runs/vapo
EXTRA ?= plot
ARGS ?=
TESTS ?= tests
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install
# The tests of a file run in one worker, which reuses its compiled programs;
# files start in the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile \
  --no-loadscope-reorder $(PYTEST_ARGS)

# Compiled programs are kept between runs: the next start is much faster.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.5
# Tests compile thousands of programs, nearly all of them in less time.
test slowtest alltest: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0

.PHONY: help train test slowtest alltest docs accelerator lint clean
.DEFAULT_GOAL := help
# A failed `python -m venv` must not leave its target behind.
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

train: $(VENV)/installed-plot
	$(BIN)/python scripts/train.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)
	$(BIN)/python scripts/report.py $(WORKDIR)

test: $(VENV)/installed-test
	$(PYTEST) -m 'not slow' $(TESTS)

slowtest: $(VENV)/installed-test
	$(PYTEST) -m slow $(TESTS)

alltest: $(VENV)/installed-test
	$(PYTEST) $(TESTS)

accelerator: $(VENV)/installed-$(EXTRA)
	$(BIN)/python scripts/accelerator.py $(ARGS)

docs: $(VENV)/installed-docs
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "open build/docs/index.html"

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv .jax_cache build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Installs an extra (plot, test, parity, ...) once, and again when setup.py
# changes.
$(VENV)/installed-%: setup.py | $(VENV)/pyvenv.cfg
	@echo "installing jaxrl_llm[$*] into $(VENV) (the first time takes minutes)"
	@$(PIP) -e '.[$*]'
	@touch $@

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "jaxrl_llm needs Python 3.11 to 3.13, but '$(PYTHON)' is" \
	  "$$($(PYTHON) --version 2>&1): name another, as in make PYTHON=python3.12"; exit 2; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "'$(PYTHON) -m venv' failed:" \
	  "install the venv package of this Python"; exit 2; }
