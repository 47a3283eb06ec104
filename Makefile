# Everything a stranger needs: `make demo`, `make serve`, `make test`. Needs Python >= 3.11, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo serve test lint types imports unit triton faults model clean

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

model: $(STAMP)
	$(BIN)/turnkeep model pull

demo: model
	$(BIN)/turnkeep demo

serve: model
	$(BIN)/turnkeep serve

test: lint types imports unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

unit: model
	$(BIN)/pytest -q

# The Triton kernels alone: interpreted, and compiled for GPUs that need not be here. Part of `unit`.
triton: $(STAMP)
	$(BIN)/pytest -q tests/engine/kernels/test_triton.py

# 200 workers killed under 2,000 streams, and every answer compared with the undisturbed one. Minutes; not part of `unit`.
faults: model
	$(BIN)/pytest -q -s tests/faults/full_size.py

clean:
	rm -rf $(VENV)
