# Every target sets up what it needs: a virtual environment, the exact versions of
# constraints.txt, then the work. `make` alone says what there is.

VENV ?= .venv
# The first Python that is new enough.
PYTHON ?= $(firstword $(foreach python,python3 python3.11 python3.12 python3.13,$(shell \
	$(python) -c 'import sys; print("$(python)" if sys.version_info >= (3, 11) else "")' \
	2>/dev/null)))
ARGS ?=

RUN := $(VENV)/bin/python
# Bytecode is written when a module is first used: compiling all of torch at once would double
# the time that the set-up takes.
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# One process per core and one thread per process (a single small model rarely fills two);
# up to four, because each of them imports torch.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow docs notebooks bench fidelity peers lint format parity-deps clean

help:
	@echo 'make demo     train a small network with IVON and audit its data'
	@echo 'make test     run the fast tests      (ARGS="-k posterior" for some of them)'
	@echo 'make test-slow  run the others'
	@echo 'make docs     build the site: docs/_build/index.html'
	@echo 'make notebooks  write the tutorials as notebooks, beside them'
	@echo 'make bench    measure side by side with other packages'
	@echo 'make fidelity compare estimates with retraining, beside other packages'
	@echo 'make lint     check style and types;  make format rewrites the style'
	@echo 'make clean    remove the environments and the caches'

demo: $(VENV)/.demo
	$(VENV)/bin/blr-analysis demo --force $(ARGS)

test: parity-deps
	$(PYTEST) -m 'not slow' $(ARGS)

test-slow: parity-deps $(VENV)/.chromium
	PATH="$(CURDIR)/$(VENV)/chromium/bin:$$PATH" $(PYTEST) -m slow $(ARGS)

# A warning, a broken link among them, is an error.
docs: $(VENV)/.test
	$(RUN) -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build $(ARGS)

notebooks: $(VENV)/.test
	$(RUN) -m jupytext --to ipynb tutorials/0*.py

bench: parity-deps
	$(RUN) -m benchmarks $(ARGS)

# laplace-torch is there already, among the packages that the tests compare with.
fidelity: parity-deps peers
	$(RUN) -m benchmarks.fidelity --peers $(VENV)-peers $(ARGS)
	$(RUN) -m benchmarks.field

peers: $(foreach peer,kronfluence dattri traker captum pydvl mergekit fusion-bench,$(VENV)-peers/$(peer)/.done)

lint: parity-deps
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

format: parity-deps
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The packages that the tests compare with.
parity-deps: $(VENV)/.parity

clean:
	rm -rf $(VENV) $(VENV)-peers .pytest_cache .ruff_cache .hypothesis build dist docs/_build docs/_made

# The environment, in steps; a stamp says that a step is done.
$(RUN):
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer was found: name one, as in' \
		'make demo PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'Setting up $(VENV): a few minutes at most, once'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: pyproject.toml constraints.txt | $(RUN)
	$(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(RUN)
	$(INSTALL) -c constraints.txt -e '.[test,dev,docs,tutorials]'
	@touch $@ $(VENV)/.demo

$(VENV)/.parity: requirements/parity.txt $(VENV)/.test
	$(INSTALL) --no-deps -r requirements/parity.txt
	@touch $@

# A browser for the tests that look at pages, where there is none and apt can fetch one.
$(VENV)/.chromium: .ci/chromium | $(RUN)
	@.ci/chromium $(VENV)/chromium
	@touch $@

# Every peer lives in an environment of its own: what they ask for does not go together.
$(VENV)-peers/%/.done: requirements/peers-%.txt constraints.txt | $(RUN)
	@$(RUN) -m venv $(@D)
	$(subst $(RUN),$(@D)/bin/python,$(INSTALL)) -c constraints.txt torch
	$(subst $(RUN),$(@D)/bin/python,$(INSTALL)) --no-deps -r $<
	@touch $@
