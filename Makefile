# `make demo` and `make test` are all a fresh machine with git, make and Python >= 3.11 needs.
VENV ?= .venv
# Which torch: `pinned` installs the one in constraints.txt; `keep` uses the one that is there already
# (in the environment at VENV, or in the interpreter PYTHON that a new one is made from).
# The stamp of an installation bears its choice, which is the default from then on.
stamp := $(VENV)/.installed-
TORCH ?= $(or $(firstword $(patsubst $(stamp)%,%,$(wildcard $(stamp)*))),pinned)
$(if $(filter-out keep pinned,$(TORCH)),$(error TORCH=$(TORCH) is unknown: use pinned or keep))
# The CPU build, which spares a laptop the CUDA libraries; a GPU machine names another index or keeps its torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHON ?=

python := $(VENV)/bin/python
# Made last in a new environment: one without it was cut short and is made again.
pip := $(VENV)/bin/pip
installed := $(stamp)$(TORCH)
# Two processes of one thread each are faster on two cores than one process of two.
single_threaded := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: install demo test test-all fuzz lint bench notebooks clean
install: $(installed)

$(pip):
	@for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$candidate" --version)"; \
	    exec "$$candidate" -m venv $(if $(filter keep,$(TORCH)),--system-site-packages) $(VENV); \
	  fi; \
	done; \
	echo "No Python >= 3.11 with venv and ensurepip was found; name one: make install PYTHON=/path/to/python" >&2; \
	exit 1

$(installed): pyproject.toml constraints.txt | $(pip)
	@rm -f $(stamp)*
ifeq ($(TORCH),keep)
	@$(python) -c 'from importlib.metadata import version; v = tuple(map(int, version("torch").split(".")[:2])); \
	  exit(not (2, 11) <= v < (2, 14))' 2>/dev/null || \
	  { echo "TORCH=keep: $(VENV) has no torch >=2.11,<2.14; install one there or leave TORCH=keep out" >&2; exit 1; }
	grep -vE '^(torch|setuptools)==' constraints.txt > $(VENV)/constraints.txt
else
	cp constraints.txt $(VENV)/constraints.txt
	$(python) -m pip install --quiet --no-deps --retries 1 --constraint $(VENV)/constraints.txt \
	  --extra-index-url $(TORCH_INDEX) torch
endif
	$(python) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev,notebooks,view]'
	$(python) -m formulations.warm_up
	@touch $@

demo: install
	$(python) -m runtime.commands.demo

# A file is run by one process, which keeps its solvers' processes, its ranks and its traced models for all of it.
pytest := $(single_threaded) $(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The public promise: 13 minutes on two cores.
test: install
	$(pytest)

# What `make test` runs and all that is marked slow: 35 minutes on two cores.
test-all: install
	$(pytest) -m "not fuzz and not bench"

# A problem that a solver gets wrong is shrunk and written to tests/fixtures/problems, where `make test` finds it again.
fuzz: install
	$(single_threaded) $(python) -m pytest -n 2 --dist worksteal -m fuzz --timeout 3600

bench: install
	$(single_threaded) $(python) -m pytest -m bench --benchmark-only

lint: install
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

notebooks: install
	$(python) -m jupytext --sync notebooks/*.py
	$(python) -m pytest --nbmake --overwrite --nbmake-timeout 1200 --timeout 0 --override-ini testpaths=notebooks notebooks

clean:
	rm -rf $(VENV) .demo
