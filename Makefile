# Everything is installed into .venv and nothing outside it. `make demo` and `make test` do the set-up they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILD_TOOLS := $(VENV)/build
TYPES := $(VENV)/types/headrace
# A file's tests share what they start; tests/conftest.py says which files begin.
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
FOLDERS := core executor frontend ipc kernels
# For `make check`: what has changed since the last commit, and since the branch left SINCE; and what mypy calls it.
SINCE ?= main
CHANGED = $(shell { git diff --name-only --diff-filter=d HEAD; git ls-files --others --exclude-standard; \
  git diff --name-only --diff-filter=d "$$(git merge-base HEAD $(SINCE))" HEAD; } 2>/dev/null | grep '\.py$$' | sort -u)
TYPED = $(filter benchmarks/% tests/%,$(CHANGED)) $(patsubst headrace/%,$(TYPES)/%,$(filter headrace/%,$(CHANGED))) \
  $(addprefix $(TYPES)/,$(filter $(FOLDERS:=/%),$(CHANGED)))

.PHONY: demo test pytest test-system test-versions lint types fmt docs docs-site install demo-model bench-check
.PHONY: package image release-check clean distclean
.DELETE_ON_ERROR:

# PROMPT="..." is what to ask.
demo: demo-model
	@PROMPT="$${PROMPT:-Why is the sky blue?}" $(BIN)/headrace demo

# While one writes: in under a minute, what needs no process, no model and no torch (tests/check.txt).
check: install $(TYPES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(strip $(TYPED)),$(BIN)/python tests/support/check_types.py $(TYPED))
	$(BIN)/pytest $(PARALLEL) @tests/check.txt

# mypy is one process, which takes what the tests leave: they wait for other processes often enough for it to end first.
test: install demo-model $(TYPES)
	@$(MAKE) --no-print-directory --jobs 2 MYPY_PRIORITY='nice -n 19' lint pytest

pytest: install
	$(BIN)/pytest $(PARALLEL)

# What takes too long for every change: whole matrices of deaths, long random runs, every model on several ranks.
test-system: install demo-model
	$(BIN)/pytest $(PARALLEL) -m system

# With the lowest and the highest versions of the small dependencies that pyproject.toml allows.
test-versions: install
	$(BIN)/python tests/support/dependency_versions.py lowest highest

lint: install $(TYPES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python tests/support/tree_figures.py
	@git ls-files '*.py' | xargs wc -l | awk '$$1 > 600 && $$2 != "total" { print "long: " $$1 " lines in " $$2 }'
	@wc -l < docs/architecture.md | awk '$$1 > 200 { print "long: " $$1 " lines in docs/architecture.md, which is a map" }'
	$(MYPY_PRIORITY) $(BIN)/python tests/support/check_types.py

types: $(TYPES)
	$(BIN)/python tests/support/check_types.py

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What hot paths cost beside the commit before, by instructions; BASE=REV compares with another.
bench-check: install
	$(BIN)/python benchmarks/check.py $(if $(BASE),--base $(BASE))

# The wheel, with the kernels compiled for each level of instruction sets, and the sdist that it is made from: in dist/.
package: $(BUILD_TOOLS)
	@rm -rf dist
	$(BUILD_TOOLS)/bin/python -m build --outdir dist
	$(BUILD_TOOLS)/bin/twine check --strict dist/*

$(BUILD_TOOLS):
	@$(PYTHON) -m venv $@ && $@/bin/pip install --quiet build 'setuptools>=77' twine

# An image, TARGET=client, cpu or cuda, by docker or by another BUILDER with its command line. Those of a release have the
# names that the chart and compose use, such as headrace:0.1.0-cpu.
TARGET ?= cpu
BUILDER ?= docker
image: $(BUILD_TOOLS)
	version=$$($(BUILD_TOOLS)/bin/python setup.py --version) && \
	$(BUILDER) build --file docker/Dockerfile --target $(TARGET) --build-arg HEADRACE_VERSION="$$version" \
	  --build-arg TORCH_INDEX="$(TORCH_INDEX)" --tag "headrace:$$(echo "$$version" | tr + -)-$(TARGET)" .

# What a release takes, in order; it stops at the first thing that is missing.
release-check:
	@git diff --quiet HEAD || { echo "uncommitted changes"; exit 1; }
	@git describe --tags --exact-match --match 'v[0-9]*' > /dev/null 2>&1 || { \
	  echo "this commit has no tag: git tag -a v1.2.3"; exit 1; }
	@grep -q "^## $$(git describe --tags --match 'v[0-9]*' | tail -c +2)$$" CHANGELOG.md || { \
	  echo "CHANGELOG.md has no section of this version"; exit 1; }
	$(MAKE) docs && git diff --exit-code
	$(MAKE) test
	$(MAKE) test-system
	$(MAKE) test-versions
	$(MAKE) package
	@ls -l dist
	@echo "left to do: make bench-check BASE=the last release; git push --tags; upload dist/*; an announcement"

docs: install
	$(BIN)/python -m headrace.core.options.document
	$(BIN)/python -m headrace.frontend.vllm.stubs
	$(BIN)/python -m headrace.executor.checkpoints.formats.document
	PYTHONPATH=tests/support $(BIN)/python tests/models/models_document.py
	$(BIN)/python docs_site/dashboard.py
	$(BIN)/python docs_site/reference.py
	$(BIN)/python docs_site/plots.py

# The pages of docs/ as a site, in build/site, with all links checked. Its program lives in an environment of its own.
docs-site:
	@$(PYTHON) -m venv $(VENV)/docs && $(VENV)/docs/bin/pip install --quiet --constraint constraints.txt zensical
	$(VENV)/docs/bin/zensical build --clean --strict
	@echo "the site is in build/site; $(VENV)/docs/bin/zensical serve shows it"

install: $(INSTALLED)

# torch comes first and alone, so that the build that constraints.txt was tested with is the one that the rest sees.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Headrace needs Python 3.11 or newer; name one with: make PYTHON=python3.12 (here: $$($(PYTHON) --version 2>&1))"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "Python could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,bench,dev]'
	@touch $@

demo-model: install
	@$(BIN)/python -m headrace.executor.checkpoints.demo_model > /dev/null

# mypy does not see that headrace.core is the folder core; this tree of links tells it.
$(TYPES): Makefile $(INSTALLED)
	@rm -rf $@ && mkdir -p $@
	@for file in headrace/*.py headrace/py.typed; do ln -s ../../../$$file $@; done
	@for folder in $(FOLDERS); do ln -s ../../../$$folder $@/$$folder; done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(FOLDERS) headrace tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
