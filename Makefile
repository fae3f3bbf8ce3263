# Everything runs in .venv, which the first target that needs it creates. `make demo` installs the package; the targets
# for development add linters, tests, documentation and integrations.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
# Without --no-compile pip compiles every module of torch, which takes longer than to install it. Python compiles the
# modules that are used, when they are first used, unless this variable forbids it.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo install lint test pytest faults churn docs wheel clean

.venv/runtime: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) -e .
	touch $@

.venv/dev: .venv/runtime
	$(PIP_INSTALL) -e '.[test]'
	touch $@

install: .venv/dev

# Four real processes, one of them four times slower than the others. A gradient takes 20 ms, as on an accelerator.
demo: .venv/runtime
	$(BIN)/gossamer train --task digits --workers 4 --steps 200 --compute 20ms --straggler 3:4 \
		--method allreduce,a2cid2

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: .venv/dev
	$(MAKE) --no-print-directory -j 2 lint pytest

# More processes than the two cores of the CI: most tests with real workers wait for something. Each process has tests
# that follow each other, so that they share what a module sets up.
pytest: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# Real processes are killed, stopped and poisoned while the others train. It takes minutes; RUNS=50 repeats it, and
# TESTS="ctrl_c or poison" takes only those that pytest -k would choose.
RUNS ?= 1
TESTS ?=
AT_ONCE ?= 8
# Root can make network namespaces: no test is skipped for want of them.
STRICT ?= $(if $(filter 0,$(shell id -u)),--strict)
faults: .venv/dev
	$(BIN)/python tests/process/repeat_faults.py --runs $(RUNS) --at-once $(AT_ONCE) --tests "$(TESTS)" $(STRICT)

# Six workers of which one is killed every 2.5 s and started again, with each method.
MINUTES ?= 10
churn: .venv/dev
	cd tests/process && OMP_NUM_THREADS=1 PYTHONPATH=../../benchmarks ../../$(BIN)/python churn.py --minutes $(MINUTES)

# The documentation as a site: build/site/index.html.
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The source distribution and the wheel: dist/.
wheel: .venv/dev
	$(BIN)/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
