# make serve   serve the bundled model on port 8000 (sets up .venv first, on a fresh machine)
# make test    set up, lint, type-check and test; make test-all adds the long matrix
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: serve test test-all lint clean

serve: $(VENV)/.ready
	exec env -u OMP_NUM_THREADS $(BIN)/unisono serve

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full"

test-all: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	sh scripts/setup.sh $(VENV)
