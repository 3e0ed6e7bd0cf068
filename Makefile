# make demo       install, then distil a small model with the whole stack
# make test       install, lint, types, import contracts, tests
# make test-all   the same with the long tests
PY := .venv/bin/python

.PHONY: setup demo test test-all lint lock

setup:
	@scripts/setup.sh

demo: setup
	$(PY) -m rlhf.launch +recipes=demo

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

# Tests of tests/unit start no role, so two of them can run at a time; a run of tests/integration needs all cores.
test: lint
	$(PY) -m pytest -m "not slow and not gpu" -n 2 tests/unit
	$(PY) -m pytest -m "not slow and not gpu" tests/integration

test-all: lint
	$(PY) -m pytest -m "not gpu" -n 2 tests/unit
	$(PY) -m pytest -m "not gpu" tests/integration

# After a change of requirements/cpu.in. The folder with the CPU build of torch is the one pip is configured with.
lock: setup
	.venv/bin/pip install --quiet "$$(cat requirements/uv.txt)"
	.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
	  --override requirements/overrides.txt \
	  $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--extra-index-url https://download.pytorch.org/whl/cpu) \
	  requirements/cpu.in -o requirements/cpu.lock
