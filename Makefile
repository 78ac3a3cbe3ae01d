# Everything a newcomer or a continuous-integration job runs. Each target first makes .venv and installs into it;
# the stamp file remembers that, so only a change of the requirements installs again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JAX_STAMP := $(VENV)/.installed-jax
INSTALL := $(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt
CHECKED := src tests examples $(wildcard benchmarks)

# Keep compiled bytecode even where the surroundings forbid it: every process imports PyTorch, in half the time with it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test bench check format clean

help:
	@echo "make demo    train a classifier on real images on the emulated IPU"
	@echo "make test    format check, lint, type check and the whole test suite"
	@echo "make check   the same as make test"
	@echo "make bench   compare speed with eager PyTorch, torch.compile and JAX"
	@echo "make format  rewrite the source in the project's format"

demo: $(STAMP)
	$(BIN)/python examples/digits.py

test check: $(STAMP)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/pyright
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

bench: $(STAMP) $(JAX_STAMP)
	$(BIN)/python -m benchmarks

format: $(STAMP)
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else \
	  "Python 3.10 or newer is needed; choose one with: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time this takes a few minutes."
	@$(INSTALL) -e '.[demo,test,check]'
	@touch $@

# The benchmark says so if there is no JAX, and measures the others.
$(JAX_STAMP): $(STAMP)
	-@$(INSTALL) -e '.[bench]' && touch $@
