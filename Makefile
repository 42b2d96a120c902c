# make demo   train on the shipped Boxing games, then play 30 games against the built-in opponent
# make test   every CPU test (≤ 10 minutes on two cores)
# make goals  what the benchmark records say of benchmarks/goals.toml
# make docs   the tables of README.md and docs/ladder.md, from the benchmark records
# make check  lint, format, types, import layers
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check goals docs format clean

# torch goes first and alone, so that its pinned build is taken and not replaced by a dependency's
$(VENV)/.base: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[games]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[games,melee,dev]'
	touch $@

demo: $(VENV)/.base
	$(BIN)/python -m ridgeline demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not gpu' -n 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file dev/gpu/mypy.ini
	$(BIN)/lint-imports

goals: $(VENV)/.base
	$(BIN)/python -m ridgeline.bench.goals benchmarks/goals.toml benchmarks/results

docs: $(VENV)/.dev
	$(BIN)/python -m ridgeline.report.docs

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)
