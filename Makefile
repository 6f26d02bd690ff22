# make run: install and run the quickstart.  make test: everything CI checks.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: run test lint docs bench clean

run: $(VENV)/installed
	$(VENV)/bin/python examples/quickstart.py

test: lint docs
	$(VENV)/bin/python -m pytest

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Strict: a warning, a broken link or a notebook that raises fails the build.
docs: $(VENV)/installed-dev
	$(VENV)/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs

bench: $(VENV)/installed
	$(VENV)/bin/python -m hf_slospec bench

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade -c constraints.txt pip
	$(PIP) install -c constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -c constraints.txt --group dev --group docs
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
