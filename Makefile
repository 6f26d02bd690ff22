# make run: install and run the quickstart.  make check: lint, types and tests that load no model, within two minutes.
# make test: everything CI checks.  make notebooks: run them into build/.
PYTHON ?= python3
VENV ?= .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

NOTEBOOKS = $(filter-out README,$(notdir $(basename $(wildcard docs/notebooks/*.md))))

# Folders whose tests load no model.
FAST_TESTS = tests/algo tests/engine tests/policies tests/sim tests/repository/test_layers.py \
    tests/repository/test_language.py tests/repository/test_module_map.py

.PHONY: run check test lint docs bench notebooks clean

run: $(VENV)/installed
	$(VENV)/bin/python examples/quickstart.py

check: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -q -n 2 $(FAST_TESTS)

test: $(VENV)/installed-dev
	$(MAKE) --output-sync --jobs 2 lint docs
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Strict: a warning, a broken link or a notebook that raises fails the build.
docs: $(VENV)/installed-docs
	@echo "building the site; it runs the notebooks, which takes a minute or several"
	$(VENV)/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/installed
	$(VENV)/bin/python -m hf_slospec bench

notebooks: $(VENV)/installed-docs
	mkdir -p build/notebooks
	for name in $(NOTEBOOKS); do \
	    $(VENV)/bin/jupytext --quiet --to ipynb --output build/notebooks/$$name.ipynb docs/notebooks/$$name.md || exit 1; \
	done
	$(VENV)/bin/jupyter-execute --inplace --timeout 300 $(NOTEBOOKS:%=build/notebooks/%.ipynb)

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV): torch is large, this takes a minute or several"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade -c constraints.txt pip
	$(PIP) install -c constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -c constraints.txt --group dev --group docs
	touch $@ $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) install -c constraints.txt --group docs
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
