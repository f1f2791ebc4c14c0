# The project's commands. `make quick` is the main job: from a fresh clone to a verdict.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: quick muon-study test bench lint clean

# The environment, made anew whenever what it is made from changes.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("xsalab needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with PYTHON=...") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'from xsalab.model import native; print(native.describe())'
	touch $@

quick: $(VENV)/.ready
	$(BIN)/xsalab check experiments/quick.toml
	$(BIN)/xsalab run experiments/quick.toml

# The published study again, on a machine with GPUs: about 13 hours on 8 H100. It resumes.
muon-study: $(VENV)/.ready
	$(BIN)/xsalab run experiments/muon-study.toml

test: $(VENV)/.ready
	$(BIN)/pytest tests --ignore=tests/compiled -n auto --dist loadscope
	$(BIN)/pytest tests/compiled

# The table of targets on this machine, quiet while it runs; with a nanochat checkout: make bench NANOCHAT=DIR
bench: $(VENV)/.ready
	$(BIN)/python bench/table.py $(if $(NANOCHAT),--nanochat $(NANOCHAT)) --out out/bench.json

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/pyright
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
