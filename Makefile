# make serve    serve the bundled model on port 8000 (sets up .venv first, on a fresh machine)
# make unit     tests that start no engine, under 3 minutes
# make test     lint, type-check and test; ROOM=kv: the tests of one folder of tests/; make test-all adds the long matrix
# make docs     build the documentation into build/site; make reference writes its generated parts
# make kernels  on a machine with a GPU: compile its kernels for the wheel; make wheel builds the wheel with them
# make same BASE=COMMIT  compare tokens, PTX, HTTP schema, flags and wheel with those of a commit, for refactorings
# make clients  install 15 clients of the field in an environment of their own, and talk with each
VENV ?= .venv
# One more than CI has cores: tests of servers wait a third of their time.
WORKERS ?= 3
# Each worker runs a third of the modules in their order, so that it makes their fixtures once, and then helps others.
DIST ?= --dist worksteal
# Retry only tests that failed by a timeout, once. The summary names them.
RETRY := --reruns 1 -rR --only-rerun "TimeoutError|TimeoutExpired|ReadTimeout|ConnectTimeout|it did not happen|did not start"
BIN := $(VENV)/bin
TESTS := $(if $(ROOM),tests/$(ROOM))
export OMP_NUM_THREADS ?= 1
# Some images forbid bytecode. Hundreds of processes of a test run would each compile what they import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve unit test test-all same clients lint docs reference kernels wheel clean

serve: $(VENV)/.ready
	exec env -u OMP_NUM_THREADS $(BIN)/unisono serve

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(WORKERS) $(DIST) -m "unit and not full" --durations=10 $(RETRY) $(TESTS)

test: $(VENV)/.ready $(VENV)/oldest-triton lint
	$(BIN)/python -m pytest -n $(WORKERS) $(DIST) -m "not full" --durations=25 $(RETRY) $(TESTS)

test-all: $(VENV)/.ready $(VENV)/oldest-triton lint
	$(BIN)/python -m pytest -n $(WORKERS) $(DIST) --durations=25 $(RETRY) $(TESTS)

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

docs: $(VENV)/.ready
	$(BIN)/python -c "import mkdocs, mkdocstrings" 2>/dev/null || $(BIN)/python -m pip install --quiet --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

reference: $(VENV)/.ready
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/reference.py metrics

kernels: $(VENV)/.ready
	$(BIN)/python scripts/kernels.py build

wheel: $(VENV)/.ready
	$(BIN)/python scripts/kernels.py check
	$(BIN)/python -m build --wheel

# The oldest Triton that pyproject.toml allows: kernels in Gluon have to compile with it, too.
$(VENV)/oldest-triton: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ "triton~=3.6.0"
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.ready: pyproject.toml scripts/setup.sh
	sh scripts/setup.sh $(VENV)
