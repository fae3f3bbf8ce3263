# Everything runs in .venv, which is made on first use and again whenever the requirements change.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test faults lint docs install clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# Four real processes, one of them four times slower than the rest; a gradient takes 20 ms, as on an accelerator. Who is
# done when, how good is the model, how much was sent.
demo: $(INSTALLED)
	$(BIN)/gossamer train --task digits --workers 4 --steps 200 --compute 20ms --straggler 3:4 \
		--method allreduce,a2cid2

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Real processes killed, stopped and poisoned while the others train: minutes, and more of them with RUNS=50.
RUNS ?= 1
AT_ONCE ?= 6
faults: $(INSTALLED)
	$(BIN)/python tests/process/repeat_faults.py --runs $(RUNS) --at-once $(AT_ONCE)

# The documentation as a site, in build/site/index.html.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
