# The targets of this project. `make help` lists them; `make demo` and `make test` need nothing but Python and make.
# What belongs here: which command a target runs. What does not: logic, which belongs to the programs that it runs.

# Set PYTHON to build the environment with an interpreter of your choice: make demo PYTHON=python3.12
PYTHON ?=
# Further arguments for pytest: make test PYTEST_ARGS="tests/repository/test_layers.py -x"
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder
# `make test CI=1` also runs the slow tests, as .ci/run does: servers, nights, kills, real datasets, the browser.
CI ?=
export CI

# The environment; the campaign makes others beside it, for other versions of Python.
VENV ?= .venv
READY := $(VENV)/ready
TESTS := $(VENV)/tests
CHECKS := $(VENV)/checks
BIN := $(VENV)/bin
CAMPAIGN_PYTHONS ?= python3.11 python3.12 python3.13 python3.14
# The versions that pip installs: those that this project is tested with, the lowest that it allows, or the newest there are.
CONSTRAINTS ?= constraints.txt
CANDIDATES = $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3)

# No program that runs here sends telemetry.
export DAGSTER_DISABLE_TELEMETRY = 1
export HF_HUB_DISABLE_TELEMETRY = 1
export RAY_USAGE_STATS_ENABLED = 0
export GX_ANALYTICS_ENABLED = false
# Many container images switch byte code off; then each process compiles again what it imports: Great Expectations alone
# costs 8 s of processor time instead of 4.
unexport PYTHONDONTWRITEBYTECODE
# No advice that torch is missing: only tokenizers are used.
export TRANSFORMERS_NO_ADVISORY_WARNINGS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# No advertisement of other generators of sites.
export NO_MKDOCS_2_WARNING = 1

# The demo and the tests read only files of the repository; a request to the network would be a mistake.
demo test check campaign bench docs screenshots: export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test ui check fix campaign lowest newest release dist wheel bench docs site lock clean screenshots

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## install what is missing, then build the demo recipe through Dagster and report
	@$(BIN)/python -m dagster_rowmill.materialize demo

test: $(TESTS)  ## install what is missing, then run the tests: five minutes on two cores; with CI=1 also the slow ones
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS)

ui: $(READY)  ## start Dagster's webserver and daemon on 127.0.0.1
	@$(BIN)/rowmill ui

check: $(CHECKS)  ## format, lint, types, import layers, spelling, dead links
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m mkdocs build --strict --quiet

fix: $(CHECKS)  ## apply the formatter and the automatic fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

campaign: $(CHECKS)  ## run every test there is, ask whether builds got slower, then test the lowest, the newest and other Pythons
	@$(call install,.[campaign])
	@$(BIN)/python -m pytest -q --campaign --timeout 3600 $(PYTEST_ARGS)
	@$(BIN)/python -m benchmarks.hold
	@$(MAKE) lowest newest CI=1
	@for one in $(CAMPAIGN_PYTHONS); do \
	  if "$$one" -c 'import venv, ensurepip' 2>/dev/null; then \
	    $(MAKE) test CI=1 PYTHON="$$one" VENV=".venv-$$(basename "$$one")" || exit 1; \
	  else echo "campaign: $$one does not run here, so its tests are left out; name one: CAMPAIGN_PYTHONS=/path/to/python"; fi; \
	done

# The lowest numpy has wheels for Python 3.11 and 3.12 alone.
lowest: PYTHON := $(or $(PYTHON),python3.11)
lowest:  ## run the tests with the lowest version that pyproject.toml allows of everything it names
	@mkdir -p build
	@"$(PYTHON)" -m tests.support.lowest_versions > build/lowest.txt
	@$(MAKE) test PYTHON="$(PYTHON)" VENV=.venv-lowest CONSTRAINTS=build/lowest.txt

newest:  ## run the tests with the newest versions there are, whatever constraints.txt says
	@mkdir -p build
	@: > build/newest.txt
	@$(MAKE) test VENV=.venv-newest CONSTRAINTS=build/newest.txt

release: check  ## test, build twice, check and tag a release: make release VERSION=0.1.0
	@$(MAKE) test CI=1
	@$(MAKE) dist VERSION="$(VERSION)"
	@git tag --annotate "v$(VERSION)" --message "rowmill $(VERSION)"
	@echo "tagged v$(VERSION); to publish: git push origin v$(VERSION)"

dist: $(TESTS)  ## build the files of a release twice, and check them: make dist VERSION=0.1.0
	@$(BIN)/python -m pip install -qq 'twine>=6'
	@$(BIN)/python -m release.make_release "$(VERSION)"

wheel: $(TESTS)  ## build a wheel, dist/rowmill-VERSION-py3-none-any.whl, to install elsewhere
	@$(BIN)/python -m pip wheel -qq --no-deps --no-build-isolation --wheel-dir dist .

bench: $(TESTS)  ## run the benchmarks; one JSON line each
	@$(BIN)/python -m benchmarks

screenshots: $(TESTS)  ## take the documentation's screenshots with the browser tests (needs Debian's chromium)
	@$(call install,.[browser])
	@ROWMILL_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q --slow tests/end_to_end/test_browser.py tests/end_to_end/test_report_in_browser.py tests/end_to_end/test_viewer_in_browser.py

docs: $(READY)  ## regenerate the generated pages and the JSON Schema
	@$(BIN)/python -m docs.generate.reference
	@$(BIN)/python -m docs.generate.transcripts
	@$(BIN)/python -m docs.generate.template_table

site: $(CHECKS)  ## build the documentation as a site with search, in build/site
	@$(BIN)/python -m mkdocs build --strict --quiet
	@echo "$(BIN)/python -m http.server --directory build/site --bind 127.0.0.1 8000"

lock:  ## rewrite constraints.txt with the newest versions that pyproject.toml allows (Python 3.11)
	rm -rf build/lock && python3.11 -m venv build/lock
	build/lock/bin/pip install --quiet --editable '.[campaign]'
	build/lock/bin/pip freeze --all --exclude pip --exclude-editable > build/lock/frozen.txt
	(sed -n '/^#/p' constraints.txt; sed -n '/^[A-Za-z0-9_.-]*==/p' build/lock/frozen.txt) > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

clean:  ## remove the environment; keep built data (.rowmill) and Dagster's history (.dagster)
	rm -rf .venv build

# Modules are byte-compiled on first import: compiling all 1.4 GB would take a quarter of the installation time.
install = $(BIN)/python -m pip install -qq --no-compile --constraint $(CONSTRAINTS) --editable '$(1)'

# A name such as python3.13 may be on the PATH and still not run (a version manager's stub), or lack venv (Debian splits
# it off), so each candidate is run, not only looked up.
define environment
@set -eu; chosen=; \
for one in $(CANDIDATES); do \
  if "$$one" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then chosen=$$one; break; fi; \
done; \
if [ -z "$$chosen" ]; then \
  echo "make: none of [$(CANDIDATES)] is a Python 3.11 or newer with venv; install one" \
    "(Debian: apt install python3-venv) or name it: make $(or $(MAKECMDGOALS),demo) PYTHON=/path/to/python3" >&2; \
  exit 1; \
fi; \
if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
  echo "Creating $(VENV) with $$("$$chosen" --version): once, 1.4 GB, a minute or more depending on the network"; \
  "$$chosen" -m venv --clear $(VENV); \
fi
endef

# Imports once what every build imports, so that `rowmill` called directly finds byte code, too.
warm = $(BIN)/python -c 'import dagster, duckdb, great_expectations, polars, transformers; import rowmill.cli.main' 2>/dev/null

$(READY): pyproject.toml $(CONSTRAINTS)
	$(environment)
	@$(call install,.[all])
	@$(warm)
	@touch $@

$(TESTS): pyproject.toml $(CONSTRAINTS)
	$(environment)
	@$(call install,.[test])
	@$(warm)
	@touch $@ $(READY)

$(CHECKS): $(TESTS)
	@$(call install,.[check])
	@touch $@
