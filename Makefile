# make serve   serve the bundled model on port 8000 (sets up .venv first, on a fresh machine)
# make test    set up, lint, type-check and test; make test-all adds the long matrix
# make same BASE=COMMIT  compares tokens, PTX, HTTP schema, flags and wheel with those of a commit, for refactorings
# make clients installs 15 clients of the field in an environment of their own, and talks with each
VENV ?= .venv
# One more than CI has cores: tests of servers wait a third of their time.
WORKERS ?= 3
# A test that waited in vain is tried once more, and the summary names it: a machine may stand still for a minute. Nothing else is.
RETRY := --reruns 1 -rR --only-rerun "TimeoutError|TimeoutExpired|ReadTimeout|ConnectTimeout|it did not happen|did not start"
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: serve test test-all same clients lint clean

serve: $(VENV)/.ready
	exec env -u OMP_NUM_THREADS $(BIN)/unisono serve

test: $(VENV)/.ready $(VENV)/oldest-triton lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full" --durations=25 $(RETRY)

test-all: $(VENV)/.ready $(VENV)/oldest-triton lint
	$(BIN)/python -m pytest -n $(WORKERS) --durations=25 $(RETRY)

same: $(VENV)/.ready
	$(BIN)/python scripts/same.py $(or $(BASE),main)

clients: .venv-clients/.ready
	.venv-clients/bin/python -m pytest -v tests/http/test_clients.py

.venv-clients/.ready: pyproject.toml scripts/clients.sh
	sh scripts/clients.sh

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/words.py
	$(BIN)/mypy

# The oldest Triton that pyproject.toml allows: kernels in Gluon have to compile with it, too.
$(VENV)/oldest-triton: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ "triton~=3.6.0"
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	sh scripts/setup.sh $(VENV)
