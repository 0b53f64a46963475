# Two commands do everything on a fresh clone: `make demo` and `make test`.
# PYTHON is only used to create .venv; pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf) are respected.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e

.PHONY: help demo test lint format bench wheel clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo    guard a real training run and show what was caught (a few minutes on two cores)"
	@echo "make test    lint, types, import layers and the whole test suite (PYTEST_ARGS='-k spike')"
	@echo "make lint    the same without the tests"
	@echo "make format  let ruff format the tree and sort imports"
	@echo "make bench   what the guard costs, beside clip_grad_norm_ and stabilityguard (BENCH_ARGS=--quick)"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove what was built; 'make distclean' removes $(VENV) too"

# pip is the last thing that `python -m venv` writes, so a half-made environment is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "dynguard needs Python 3.11 or newer; type: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps spare the second call a reinstall; .stamp-dev holds all that .stamp-demo does.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[demo]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) '.[test,dev]'
	@touch $(VENV)/.stamp-demo $@

demo: $(VENV)/.stamp-demo
	$(BIN)/dynguard demo

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports --no-logo

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --select I --fix
	$(BIN)/ruff format

bench: $(VENV)/.stamp-dev
	$(BIN)/python benchmarks/overhead.py --json build/overhead.json $(BENCH_ARGS)

wheel: $(VENV)/.stamp-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

clean:
	rm -rf build dist dynguard-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) benchmarks/.peers
