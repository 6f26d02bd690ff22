# make run: install and run the quickstart.  make test: everything CI checks.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: run test lint bench clean

run: $(VENV)/installed
	$(VENV)/bin/python examples/quickstart.py

test: lint
	$(VENV)/bin/python -m pytest

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/installed
	$(VENV)/bin/python -m hf_slospec bench

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade -c constraints.txt pip
	$(PIP) install -c constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -c constraints.txt --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
